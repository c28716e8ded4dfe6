"""Thread that converts new tokens from the engine to outputs, so that detokenization does not delay steps."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from amoeba_jax.instances.sequence import Update
from amoeba_jax.request import Delivery, EndEarly, Request

logger = logging.getLogger(__name__)

# A turn takes updates of one request until the sum of their weights reaches this number.
_TURN = 64
# Maximum number of turns before event loops are woken.
_MAX_BEFORE_WAKE = 256
MAX_BACKLOG = 4096
"""Value of `OutputThread.backlog` at which `OutputThread.behind` becomes true.

A backlog of this size takes a fraction of a second.
"""


class OutputThread:
    """Thread that converts updates (new tokens of a request) to outputs.

    In each turn, the thread processes some updates of one request.

    Args:
        end_early: function `(sequence, stop_string)` that asks the engine to end a sequence early. `stop_string` is
            None if the request failed.
        on_room: function that this thread calls when `behind` was true and the backlog has shrunk to half of
            `MAX_BACKLOG`. The function must not block.
    """

    def __init__(self, end_early: EndEarly, on_room: Callable[[], None] = lambda: None):
        self._end_early, self._on_room = end_early, on_room
        self._ready: deque[Request] = deque()
        self._backlog = 0
        self._was_behind = self._closing = False
        self._changed = threading.Condition(threading.Lock())
        self._for_loops: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._thread = threading.Thread(target=self._run, name="amoeba-outputs", daemon=True)
        self._thread.start()

    def put(self, request: Request, update: Update) -> None:
        """Queue an update without waiting for its conversion. Only the engine's thread may call this."""
        with self._changed:
            if not request.inbox:
                self._ready.append(request)
                self._changed.notify()
            request.inbox.append(update)
            self._backlog += _weight(update)

    @property
    def backlog(self) -> int:
        """Amount of work in the queue. The unit is the work for an update of one token."""
        return self._backlog

    @property
    def behind(self) -> bool:
        """Whether the backlog has reached `MAX_BACKLOG`.

        The engine then launches no steps until `on_room` is called.
        """
        if self._backlog < MAX_BACKLOG:
            return False
        with self._changed:
            self._was_behind = self._backlog >= MAX_BACKLOG
            return self._was_behind

    def in_loop(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]
    ) -> Callable[[Delivery], None]:
        """Return a function that calls `deliver` in an event loop. Use it as `Request(deliver=...)`.

        The output thread collects the deliveries of several requests, and wakes the loop once for all of them.
        """

        def deliver_later(delivery: Delivery) -> None:
            self._for_loops.setdefault(loop, []).append(partial(deliver, delivery))

        return deliver_later

    def close(self) -> None:
        """Deliver all queued updates and stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        num_taken = 0
        while self._take_turn():
            num_taken += 1
            if num_taken == _MAX_BEFORE_WAKE or not self._ready:
                self._wake_loops()
                num_taken = 0
        self._wake_loops()

    def _take_turn(self) -> bool:
        """Wait for a request with queued updates. Process some of its updates and deliver the output.

        Return False if `close` was called and no update is queued.
        """
        with self._changed:
            while not self._ready:
                if self._closing:
                    return False
                self._changed.wait()
            request = self._ready.popleft()
            updates, weight = [], 0
            while request.inbox and weight < _TURN:
                updates.append(request.inbox.popleft())
                weight += _weight(updates[-1])
            if request.inbox:
                self._ready.append(request)
            self._backlog -= weight
            has_room = self._was_behind and self._backlog < MAX_BACKLOG // 2
            if has_room:
                self._was_behind = False
        try:
            request.take(updates, self._end_early)
        except Exception:
            logger.exception("outputs of request %s cannot be delivered", request.id)
        if has_room:
            self._on_room()
        return True

    def _wake_loops(self) -> None:
        waiting, self._for_loops = self._for_loops, {}
        for loop, calls in waiting.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(_call_all, calls)


def _weight(update: Update) -> int:
    """Return the work for an update, relative to an update of one token."""
    entries = update.prompt_logprobs
    return 1 if entries is None else max(1, len(entries.tokens) * (1 + entries.k))


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:  # affects one request only
            logger.exception("an output cannot be delivered")
