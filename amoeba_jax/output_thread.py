"""The thread that turns what the engine reports into outputs, beside the dispatcher: text costs no step any time."""

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

# Updates of one request, by their weight, that are taken before the next request has its turn.
_TURN = 64
# Updates after which event loops are woken up, even if there are more of them already.
_MAX_BEFORE_WAKE = 256
MAX_BACKLOG = 4096
"""Updates that were not taken yet, of all requests, from which on `behind` is true: a fraction of a second's work. One
of a prompt's log-probabilities counts as many times as it has entries."""


class OutputThread:
    """Takes the updates of all requests, a turn each: none waits for more than one turn of every other.

    What a request has got meanwhile is taken together and delivered once.

    Args:
        end_early: ends a sequence for a stop string, or because its request failed (None).
        on_room: called from this thread when it was `behind` and is no longer; must not block.
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
        """Queue an update; never blocks for long. Only from the dispatcher thread."""
        with self._changed:
            if not request.inbox:
                self._ready.append(request)
                self._changed.notify()
            request.inbox.append(update)
            self._backlog += _weight(update)

    @property
    def backlog(self) -> int:
        """Updates that were not taken yet; see `MAX_BACKLOG`."""
        return self._backlog

    @property
    def behind(self) -> bool:
        """The backlog is over its limit: no more steps should be launched until `on_room` is called."""
        if self._backlog < MAX_BACKLOG:
            return False
        with self._changed:
            self._was_behind = self._backlog >= MAX_BACKLOG
            return self._was_behind

    def in_loop(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]
    ) -> Callable[[Delivery], None]:
        """`deliver` for a `Request`, called in an event loop, which is woken up once for all requests of a step."""

        def deliver_later(delivery: Delivery) -> None:
            self._for_loops.setdefault(loop, []).append(partial(deliver, delivery))

        return deliver_later

    def close(self) -> None:
        """Deliver what is queued and stop."""
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
        """Serve the next request, waiting for one. False: closed, and nothing is queued."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits there
                loop.call_soon_threadsafe(_call_all, calls)


def _weight(update: Update) -> int:
    """The work for an update, in those of one token: log-probabilities of a prompt are many at once."""
    entries = update.prompt_logprobs
    return 1 if entries is None else max(1, len(entries.tokens) * (1 + entries.k))


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:  # of one request: the others go on
            logger.exception("an output cannot be delivered")
