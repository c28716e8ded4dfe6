"""Errors that users see: each names the value, the limit, and what to do."""

from sharding.errors import LayoutError, MemoryBudgetError


class ConfigError(ValueError):
    """An `EngineConfig` field, alone or together with others, cannot work."""


class ModelNotFoundError(ValueError):
    """A model name or path leads to nothing that can be loaded."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or disagrees with its own config."""


class RequestError(ValueError):
    """One request cannot be served as asked; other requests are not affected."""


class DeadlineError(RequestError):
    """The request's time was over before it was served."""


class QueueFullError(RequestError):
    """Too many requests wait: try again later."""


class NotANumberError(RuntimeError):
    """The model's logits for one request were infinite or not numbers; other requests are not affected."""


class RequestFailedError(RuntimeError):
    """The engine could not go on with one request: a program for it did not compile, load or run, or a device had no
    memory for it. Other requests are not affected."""


class NotCompiledError(RequestError):
    """A request needs a program that was not compiled before the engine was ready, and `strict_compile` is set."""


class ProgramsNotReadyError(RequestError):
    """A degree whose programs are still being compiled in the background."""


class TransformError(RuntimeError):
    """A transformation failed part-way. Requests go on: where the message says so, computed again."""


class EngineClosedError(RuntimeError):
    """The engine was closed, or died of an earlier error, which is then its cause."""


class EngineStuckError(RuntimeError):
    """The engine's thread lives and does not answer."""


__all__ = [
    "CheckpointError",
    "ConfigError",
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
