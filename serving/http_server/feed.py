"""Messages for all viewers of the live page. Each message is made once, and only while there are viewers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serving.grpc_server.statuses import LimitError, SlowReaderError

logger = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]
MAX_VIEWERS = 64
"""Streams at the same time."""
MAX_MESSAGES_PER_S = 20
"""Messages to all viewers together. If there are many viewers, each gets messages less often."""
MAX_WRITE_S = 30.0
"""Seconds after which a viewer that reads nothing is cut off."""


class Feed:
    """Sender of the same messages to all viewers, at intervals. All methods run in one event loop.

    Args:
        produce: function that returns the next message.
        interval_s: seconds between two messages to a viewer. It grows if `max_messages_per_s` is reached.
        max_viewers: largest number of viewers.
        max_messages_per_s: largest number of messages a second to all viewers together.
        max_write_s: seconds after which a viewer that does not read is cut off.
    """

    def __init__(
        self,
        produce: Callable[[], Awaitable[bytes]],
        interval_s: float,
        max_viewers: int = MAX_VIEWERS,
        max_write_s: float = MAX_WRITE_S,
        max_messages_per_s: float = MAX_MESSAGES_PER_S,
    ):
        self._produce, self._interval_s = produce, interval_s
        self._max_viewers, self._max_write_s = max_viewers, max_write_s
        self._max_messages_per_s = max_messages_per_s
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._message = b""
        self._ready = asyncio.Event()

    async def watch(self, write: Write, first: bytes) -> None:
        """Write `first`, and then each new message of the feed, until the task is cancelled.

        If several messages are made during one write, this viewer gets only the latest message.

        Raises:
            LimitError: there are `max_viewers` viewers.
            SlowReaderError: a write took more than `max_write_s` seconds.
        """
        if self._num_viewers >= self._max_viewers:
            raise LimitError(f"{self._max_viewers} pages already watch this server, which is the limit: close one")
        self._num_viewers += 1
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            message = first
            while True:
                ready = self._ready
                try:
                    async with asyncio.timeout(self._max_write_s):
                        await write(message)
                except TimeoutError:
                    raise SlowReaderError(f"the page has read nothing for {self._max_write_s:g} s") from None
                await ready.wait()
                message = self._message
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            start_s = clock()
            try:
                self._message = await self._produce()
            except Exception:  # the next message may succeed
                logger.exception("the state for the page could not be read")
            else:
                ready, self._ready = self._ready, asyncio.Event()
                ready.set()
            interval_s = max(self._interval_s, self._num_viewers / self._max_messages_per_s)
            await asyncio.sleep(max(start_s + interval_s - clock(), 0.0))
