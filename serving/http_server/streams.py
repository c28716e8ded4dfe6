"""Generation of replies to HTTP requests: whole answers, and streams of server-sent events."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from amoeba_jax.outputs import RequestDelta
from serving.grpc_server.calls import Call
from serving.grpc_server.output_coalescer import LAST_READ_S
from serving.grpc_server.request_handler import RequestHandler
from serving.grpc_server.statuses import SlowReaderError
from serving.http_server.errors import dump, error_body

logger = logging.getLogger(__name__)

SendDelta = Callable[[int, RequestDelta], Awaitable[None]]
"""Function that takes the index of a call, and its next output."""
Write = Callable[[bytes], Awaitable[None]]
DONE = b"data: [DONE]\n\n"


class ClientGoneError(ValueError):
    """The client has closed its connection."""


def event(body: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with a JSON body."""
    start = b"" if name is None else b"event: " + name.encode() + b"\n"
    return start + b"data: " + dump(body) + b"\n\n"


async def serve_all(handler: RequestHandler, calls: Sequence[Call], send: SendDelta) -> None:
    """Serve several calls at the same time, and pass their output to `send`.

    If a call fails, abort the others and raise its error.
    """

    async def send_first(delta: RequestDelta) -> None:
        await send(0, delta)

    if len(calls) == 1:
        await handler.serve(calls[0], send_first)
        return

    def serve(index: int, call: Call) -> "asyncio.Task[None]":
        async def send_one(delta: RequestDelta) -> None:
            await send(index, delta)

        return asyncio.ensure_future(handler.serve(call, send_one))

    tasks = [serve(index, call) for index, call in enumerate(calls)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await _cancel(tasks)


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work` to its end. If the client closes its connection first, cancel `work`.

    Raises `ClientGoneError` if the client has closed its connection.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client has closed its connection")
        working.result()
    finally:
        await _cancel((working, leaving))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence["asyncio.Future[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """HTTP response that is a stream of server-sent events.

    An error before the first event becomes an HTTP response with the status of the error. A later error becomes an
    event.

    Args:
        produce: coroutine function that writes the events. It is cancelled if the client closes the connection.
        headers: HTTP headers.
        on_error: function that returns the event for an error.
    """

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        headers: dict[str, str],
        on_error: Callable[[BaseException], bytes] = lambda error: event(error_body(error)[1]),
    ):
        super().__init__(headers=headers, media_type="text/event-stream")
        self._produce, self._on_error = produce, on_error
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        has_started = False

        async def write(data: bytes) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            try:
                await while_connected(receive, self._produce(write))
            except (ClientGoneError, SlowReaderError):
                return  # without a last message, so that the connection is closed
            except Exception as error:
                if not has_started:
                    raise
                async with asyncio.timeout(LAST_READ_S):
                    await write(self._on_error(error))
            async with asyncio.timeout(LAST_READ_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.warning("a client has not read the end of its stream for %g s", LAST_READ_S)
