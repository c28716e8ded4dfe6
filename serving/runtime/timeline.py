"""Tokens, TTFT and ITL of each of the last seconds, for the live page."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Second(NamedTuple):
    """Metrics of one second. A time is None if nothing was measured in this second."""

    start_s: int
    """Start of the second, by the clock of the timeline."""
    tokens: int = 0
    """Generated tokens."""
    ttft_median_s: float | None = None
    ttft_max_s: float | None = None
    itl_median_s: float | None = None
    itl_p99_s: float | None = None


class Timeline:
    """Metrics of each of the last seconds. All methods must be called from one thread.

    Args:
        length_s: number of seconds to keep.
        clock: clock in seconds that never goes back.
    """

    def __init__(self, length_s: int = 300, clock: Callable[[], float] = time.monotonic):
        self._length_s, self._clock = length_s, clock
        self._first = self._second = int(clock())
        self._tokens, self._ttft, self._itl = 0, [], []
        self._closed: dict[int, Second] = {}

    def add_tokens(self, count: int) -> None:
        """Add `count` generated tokens to the present second."""
        self._advance()
        self._tokens += count

    def add_ttft(self, seconds: float) -> None:
        """Record the time from the arrival of a request to its first token."""
        self._advance()
        self._ttft.append(seconds)

    def add_itl(self, seconds: float) -> None:
        """Record the time between two tokens of a sample."""
        self._advance()
        self._itl.append(seconds)

    def seconds(self, last: int | None = None) -> list[Second]:
        """Return the metrics of the last complete seconds, oldest first.

        Args:
            last: number of seconds. None: all that are kept.
        """
        self._advance()
        length = self._length_s if last is None else min(last, self._length_s)
        starts = range(max(self._first, self._second - length), self._second)
        return [self._closed.get(start) or Second(start) for start in starts]

    def _advance(self) -> None:
        """Close the present second if it has ended."""
        now = int(self._clock())
        if now == self._second:
            return
        if self._tokens or self._ttft or self._itl:
            ttft, itl = sorted(self._ttft), sorted(self._itl)
            self._closed[self._second] = Second(
                self._second, self._tokens, _rank(ttft, 0.5), _rank(ttft, 1.0), _rank(itl, 0.5), _rank(itl, 0.99)
            )
            self._tokens, self._ttft, self._itl = 0, [], []
            for start in [start for start in self._closed if start < now - self._length_s]:
                del self._closed[start]
        self._second = now


def _rank(ordered: Sequence[float], share: float) -> float | None:
    """Return a percentile of sorted values, by nearest rank: the 99th for `share` 0.99. None: there are no values."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None
