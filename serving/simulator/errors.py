"""Errors of the simulator."""

from amoeba_jax.errors import ConfigError


class SimulationError(ConfigError):
    """The simulator cannot use a setting or a file. The message names the invalid value and the allowed values."""


class DoesNotFitError(SimulationError):
    """The devices cannot hold the instances that a policy needs.

    Either the model needs more memory, or the devices cannot be divided into instances of the needed degrees. A
    simulation of another policy may be possible.
    """
