"""Errors of requests, with the gRPC status and the HTTP status of each error."""

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
    """A limit of the server is reached. The client may try again later."""


class NotServingError(ValueError):
    """The server is loading its model, the server is shutting down, or the engine has failed."""


class TooLargeError(ValueError):
    """The message is longer than `Limits.max_message_bytes`."""


class SlowReaderError(ValueError):
    """The client reads its messages too slowly."""


class PreconditionError(ValueError):
    """The state of the server does not allow the call. Nothing was changed."""


class CredentialsError(ValueError):
    """The call has no access token, or a wrong access token."""


class ForbiddenError(ValueError):
    """The access token does not allow this call."""


# Error, gRPC status and HTTP status. Subclasses before their base classes.
_STATUSES: tuple[tuple[type[BaseException], grpc.StatusCode, int], ...] = (
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (UnknownPolicyError, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (UnknownModelError, grpc.StatusCode.NOT_FOUND, 404),
    (DuplicateIdError, grpc.StatusCode.ALREADY_EXISTS, 409),
    (LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (TooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    (NotServingError, grpc.StatusCode.UNAVAILABLE, 503),
    (EngineClosedError, grpc.StatusCode.UNAVAILABLE, 503),
    (SlowReaderError, grpc.StatusCode.CANCELLED, 408),
    (PreconditionError, grpc.StatusCode.FAILED_PRECONDITION, 409),
    (LayoutError, grpc.StatusCode.FAILED_PRECONDITION, 409),
    (CredentialsError, grpc.StatusCode.UNAUTHENTICATED, 401),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED, 403),
    (NotANumberError, grpc.StatusCode.INTERNAL, 500),
    (RequestFailedError, grpc.StatusCode.INTERNAL, 500),
)
# Errors that clients cause: they do not count as failures of the server.
_ABORTED = asyncio.CancelledError | DeadlineError | SlowReaderError
_REFUSED = RequestError | LimitError | TooLargeError | DuplicateIdError | UnknownModelError
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
    """Return the gRPC status of an error, and the text for the client.

    An unknown error has the status INTERNAL. Its text is logged, and the client gets a general text.
    """
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        logger.error("a call failed", exc_info=error)
    text = next((text for kind, text in _FIXED_TEXTS if isinstance(error, kind)), None)
    if text is None and code is grpc.StatusCode.INTERNAL:
        text = "internal error: see the log of the server"
    return code, text or public_text(str(error))


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status of an error. A cancelled task has the status CANCELLED."""
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    return next((code for kind, code, _ in _STATUSES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def http_status_of(error: BaseException) -> int:
    """Return the HTTP status of an error. An unknown error has the status 500."""
    return next((status for kind, _, status in _STATUSES if isinstance(error, kind)), 500)


def reason_of(error: BaseException) -> str:
    """Return the finish reason that metrics show for a failed request: `abort`, `refused` or `error`."""
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
