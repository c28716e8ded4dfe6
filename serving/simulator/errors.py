"""Errors of the simulator."""

from amoeba_jax.errors import ConfigError


class SimulationError(ConfigError):
    """Error for settings or files that cannot be simulated. The message names the value and the allowed values."""


class DoesNotFitError(SimulationError):
    """Error for a model or layout that does not fit the devices. Other policies may fit."""
