"""Errors of the simulator."""

from amoeba_jax.errors import ConfigError


class SimulationError(ConfigError):
    """Error for settings or files that cannot be simulated. The message names the value and the allowed values."""
