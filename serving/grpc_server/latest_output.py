"""What a client has not read yet of a request: bounded, as newer outputs replace older ones."""

import asyncio
from collections.abc import Awaitable, Callable

from amoeba_jax.outputs import RequestOutput
from serving.grpc_server.statuses import SlowReaderError

Send = Callable[[RequestOutput | None, RequestOutput], Awaitable[None]]
"""Called with the output that was sent before (None at first) and the one to send: the difference is news."""


class LatestOutput:
    """Holds the latest output of a request. Outputs only grow, so that the latest has all that there is to send."""

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        self._latest: RequestOutput | None = None
        self._sent: RequestOutput | None = None
        self._news = asyncio.Event()
        self._closed = False

    def put(self, output: RequestOutput) -> None:
        """Replace the latest output. Raises `SlowReaderError` where too much of it has not been sent."""
        self._latest = output
        self._news.set()
        waiting = num_tokens(output) - num_tokens(self._sent)
        if waiting > self._max_tokens and not output.finished:
            raise SlowReaderError(
                f"the client has not read {waiting} tokens, over the limit of {self._max_tokens}: read faster"
            )

    async def send_all(self, send: Send) -> None:
        """Send what comes, up to the end of the request, or until `close`."""
        while self._sent is None or not self._sent.finished:
            await self._news.wait()
            if self._closed:
                return
            self._news.clear()
            latest = self._latest
            assert latest is not None, "there is news"
            await send(self._sent, latest)
            self._sent = latest

    def close(self) -> None:
        """Begin to send nothing more. What is being sent is sent."""
        self._closed = True
        self._news.set()


def num_tokens(output: RequestOutput | None) -> int:
    """Tokens generated so far, of all samples."""
    return 0 if output is None else sum(len(completion.token_ids) for completion in output.outputs)
