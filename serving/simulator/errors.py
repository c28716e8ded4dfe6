"""Errors of the simulator."""

from amoeba_jax.errors import ConfigError


class SimulationError(ConfigError):
    """Settings or files that cannot be simulated. The message names the value and the allowed values."""


class DoesNotFitError(SimulationError):
    """A model or a division into instances does not fit the devices. Other policies may fit."""
