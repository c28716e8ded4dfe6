"""What a simulation cannot work with."""

from amoeba_jax.errors import ConfigError


class SimulationError(ConfigError):
    """A setting, file or combination of both cannot be simulated. Names the value, the limit and what to do."""
