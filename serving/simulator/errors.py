"""Errors of the simulator."""

from amoeba_jax.errors import ConfigError


class SimulationError(ConfigError):
    """Error for settings or files that cannot be simulated. The message has the value and its limit."""
