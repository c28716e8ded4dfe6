"""First layer of the HTTP server, before FastAPI.

This layer checks the access token of a request, and limits the size of the request body. It also sends the replies to
refused requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from amoeba_jax.errors import DeadlineError
from serving.grpc_server.callers import Caller, bearer_token
from serving.grpc_server.request_handler import RequestHandler
from serving.grpc_server.statuses import (
    CredentialsError,
    LimitError,
    TooLargeError,
    code_of,
)
from serving.http_server.errors import error_response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
"""Paths that need the token of a client, if the server has tokens."""
BODY_S = 30.0
"""Seconds in which the body of a request must arrive."""


class Gate:
    """ASGI middleware that checks the access token and reads the body of a request, before FastAPI gets the request.

    The bytes of the body count against the limit of the client until the request ends. The application finds the
    identity of the client in `scope["caller"]`.
    """

    def __init__(self, app: App, handler: RequestHandler):
        self._app, self._handler = app, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = scope["caller"] = self._caller(scope)
        body = bytearray()
        try:
            try:
                self._check_token(scope)
                await self._read(scope, receive, caller, body)
            except (CredentialsError, LimitError, TooLargeError, DeadlineError) as error:
                await self._handler.refusals.wait(caller.account, code_of(error))
                response = error_response(error)
                # Part of the body is unread.
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            whole: bytes | None = bytes(body)

            async def replay() -> MutableMapping[str, Any]:
                nonlocal whole
                if whole is None:
                    return await receive()
                message = {"type": "http.request", "body": whole, "more_body": False}
                whole = None
                return message

            await self._app(scope, replay, send)
        finally:
            self._handler.admission.count_bytes(caller.client, -len(body))

    def _caller(self, scope: Scope) -> Caller:
        host, port = scope.get("client") or ("unix", 0)
        headers = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"])
        token = scope["token"] = bearer_token(headers)
        return self._handler.callers.identify(host, f"{host}:{port}", token)

    def _check_token(self, scope: Scope) -> None:
        callers, token = self._handler.callers, scope["token"]
        if not scope["path"].startswith(PROTECTED) or callers.inference_is_open:
            return
        if not callers.is_client(token) and not callers.is_admin(token):
            raise CredentialsError("send a valid token in the header: Authorization: Bearer TOKEN")

    async def _read(self, scope: Scope, receive: Receive, caller: Caller, body: bytearray) -> None:
        """Read the body of a request into `body`. Count the bytes of the body against the limit of the client."""
        limits, admission = self._handler.limits, self._handler.admission
        most = limits.max_message_bytes
        told = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        if told.isdigit() and int(told[:20]) > most:
            raise TooLargeError(f"the body has {int(told[:20])} bytes: at most {most} are allowed (max_message_bytes)")
        try:
            async with asyncio.timeout(BODY_S):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    chunk = message.get("body", b"")
                    if len(body) + len(chunk) > most:
                        raise TooLargeError(f"the body has more than {most} bytes (max_message_bytes)")
                    admission.check_bytes(caller.client, len(chunk))
                    admission.count_bytes(caller.client, len(chunk))
                    body += chunk
                    more = message.get("more_body", False)
        except TimeoutError:
            raise DeadlineError(f"the body has not arrived within {BODY_S:g} s") from None
