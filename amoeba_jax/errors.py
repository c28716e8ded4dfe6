"""Errors for users. Messages name the value, the limit and a remedy."""

from sharding.errors import LayoutError, MemoryBudgetError


class ConfigError(ValueError):
    """A setting, or a combination of settings, is not supported."""


class ModelNotFoundError(ValueError):
    """There is no model with this name or path."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, not supported, or does not match its config."""


class RequestError(ValueError):
    """A request cannot be served. Other requests are not affected."""


class ContextLengthError(RequestError):
    """A request has more tokens than the context of the model, or more than the largest instance can hold."""


class DeadlineError(RequestError):
    """The deadline of a request passed before the request started."""


class QueueFullError(RequestError):
    """Too many requests are waiting. Try again later."""


class NotANumberError(RuntimeError):
    """The logits for a request were infinite or NaN. Other requests are not affected."""


class RequestFailedError(RuntimeError):
    """The engine could not continue a request. Other requests are not affected.

    Possible causes: a program failed, or a device had too little memory.
    """


class NotCompiledError(RequestError):
    """A request or transformation needs a program that the warm-up did not compile, and `strict_compile` is set."""


class ProgramsNotReadyError(RequestError):
    """Programs of the requested degree are still being compiled in the background."""


class TransformError(RuntimeError):
    """A transformation failed after it started. No request is lost.

    The message says whether requests are computed again.
    """


class EngineClosedError(RuntimeError):
    """The engine was closed or has failed. After a failure, `__cause__` is the error of the engine."""


class EngineStuckError(RuntimeError):
    """The engine's thread is alive but does not respond."""


__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "DeadlineError",
    "EngineClosedError",
    "EngineStuckError",
    "LayoutError",
    "MemoryBudgetError",
    "ModelNotFoundError",
    "NotANumberError",
    "NotCompiledError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "TransformError",
]
