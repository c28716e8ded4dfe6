"""Errors in the form of OpenAI's API."""

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from amoeba_jax.errors import ContextLengthError, RequestError
from amoeba_jax.shorten import shorten
from serving.grpc_server.statuses import http_status_of, status_of

# Error type and error code by HTTP status.
_TYPES: dict[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", "model_not_found"),
    408: ("timeout_error", None),
    409: ("conflict_error", None),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", None),
    504: ("timeout_error", "deadline_exceeded"),
}
# Statuses after which the same request may succeed later.
_RETRY = (429, 503)


class FieldError(RequestError):
    """A field of a request is invalid or not supported.

    Attributes:
        param: path of the field, such as `messages[0].content`.
    """

    def __init__(self, param: str, text: str):
        super().__init__(f"{param} {text}")
        self.param = param


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status of an error, and the body of the reply in OpenAI's form."""
    status = http_status_of(error)
    _, text = status_of(error)
    default = ("server_error", None) if status >= 500 else ("invalid_request_error", None)
    kind, code = _TYPES.get(status, default)
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    return status, error_object(text, kind, getattr(error, "param", None), code)


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON object of an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException) -> Response:
    """Return the HTTP response for an error. The response has the header `Retry-After` if a retry may help."""
    status, body = error_body(error)
    return json_response(body, status, {"retry-after": "1"} if status in _RETRY else None)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(dump(body), status, headers, media_type="application/json")


def dump(body: Any) -> bytes:
    """Return a JSON value as compact UTF-8 text. Surrogates are escaped, because UTF-8 cannot express them."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def field_error(error: ValidationError) -> RequestError:
    """Return the error for the first problem that pydantic found.

    The message has the name of the field and a short form of the value.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    kind, value = first["type"], first.get("input")
    if kind == "too_many_keys":
        return FieldError(".".join(map(str, first["loc"])) or "the body", first["msg"])
    if not first["loc"]:
        return RequestError(f"the body must be a JSON object, got {shorten(value)}")
    path = "".join(f"[{it}]" if isinstance(it, int) else f".{it[:100]}" for it in first["loc"])
    path = path.removeprefix(".")
    if kind == "extra_forbidden":
        return FieldError(path, "is not a field that this server supports")
    if kind == "missing":
        return FieldError(path, "is missing")
    return FieldError(path, f"is invalid: {first['msg']}, got {shorten(value)}")
