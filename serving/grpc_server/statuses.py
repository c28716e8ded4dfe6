"""The gRPC status of each error."""

import asyncio
import logging
import re

import grpc

from amoeba_jax.errors import (
    DeadlineError,
    EngineClosedError,
    LayoutError,
    NotANumberError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    TransformError,
)
from serving.scheduler import UnknownPolicyError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Maximum number of characters of an error text, which is sent in a header."""


class UnknownModelError(ValueError):
    """The call names a model or version that is not served."""


class DuplicateIdError(ValueError):
    """Another request with this id has not ended yet."""


class LimitError(ValueError):
    """A limit of the server is reached: try again later."""


class NotServingError(ValueError):
    """The server is loading, draining, or its engine has failed."""


class SlowReaderError(ValueError):
    """The client does not read its messages."""


class PreconditionError(ValueError):
    """The state of the server does not allow the call. Nothing was changed."""


class CredentialsError(ValueError):
    """The call has no token, or a wrong one."""


class ForbiddenError(ValueError):
    """The token does not allow this call."""


# Subclasses before their base classes.
_STATUSES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownPolicyError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModelError, grpc.StatusCode.NOT_FOUND),
    (DuplicateIdError, grpc.StatusCode.ALREADY_EXISTS),
    (LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotServingError, grpc.StatusCode.UNAVAILABLE),
    (EngineClosedError, grpc.StatusCode.UNAVAILABLE),
    (SlowReaderError, grpc.StatusCode.CANCELLED),
    (PreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    (LayoutError, grpc.StatusCode.FAILED_PRECONDITION),
    (CredentialsError, grpc.StatusCode.UNAUTHENTICATED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (NotANumberError, grpc.StatusCode.INTERNAL),
    (RequestFailedError, grpc.StatusCode.INTERNAL),
)
# Errors that clients cause: they do not count as failures of the server.
_ABORTED = asyncio.CancelledError | DeadlineError | SlowReaderError
_REFUSED = RequestError | LimitError | DuplicateIdError | UnknownModelError
# Errors whose own texts are for the log only.
_FIXED_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (EngineClosedError, "the engine has failed or was closed: try another server"),
    (NotANumberError, "the model's logits for this request are not numbers; other requests are not affected"),
    (RequestFailedError, "the engine could not continue this request; other requests are not affected. Send it again"),
    (TransformError, "the transformation failed part-way; the server's log says how it ended"),
)
# A word that may be a path. It is a path if it has a folder in it.
_WORD = re.compile(r"(?<![\w/])(?:[A-Za-z]:\\|~?/)[^\s'\",;:)]*")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC status of an error, and the text for the client. An unknown error is INTERNAL, and its own text
    is only logged."""
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        logger.error("a call failed", exc_info=error)
    text = next((text for kind, text in _FIXED_TEXTS if isinstance(error, kind)), None)
    if text is None and code is grpc.StatusCode.INTERNAL:
        text = "internal error: see the log of the server"
    return code, text or public_text(str(error))


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status of an error. Cancellation is CANCELLED."""
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    return next((code for kind, code in _STATUSES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def reason_of(error: BaseException) -> str:
    """Return the finish reason of a failed request for metrics: `abort`, `refused` or `error`."""
    if isinstance(error, _ABORTED):
        return "abort"
    return "refused" if isinstance(error, _REFUSED) else "error"


def public_text(text: str) -> str:
    """Return a text without file paths and memory addresses, shortened to `MAX_MESSAGE_CHARS` characters."""
    cut = text[: 2 * MAX_MESSAGE_CHARS]
    cut = _ADDRESS.sub("(address)", _WORD.sub(_without_path, cut))
    whole = len(text) <= 2 * MAX_MESSAGE_CHARS and len(cut) <= MAX_MESSAGE_CHARS
    return cut if whole else f"{cut[: MAX_MESSAGE_CHARS - 3]}..."


def _without_path(match: re.Match[str]) -> str:
    word = match[0]
    root = 3 if word[1:2] == ":" else word.index("/") + 1
    is_path = any(separator in word[root:].rstrip("/\\") for separator in "/\\")
    return "(path)" if is_path else word
