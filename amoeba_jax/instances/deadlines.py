"""Deadlines of waiting sequences."""

import heapq
import itertools

from amoeba_jax.instances.sequence import Sequence

_FEW = 256


class Deadlines:
    """Tells which sequences have waited past their deadline, at a cost that does not grow with the queue."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()
        self._most = _FEW

    def add(self, sequence: Sequence) -> None:
        """A sequence waits, or waits again."""
        if sequence.deadline is None:
            return
        if len(self._heap) >= self._most:  # let go of those that have ended before their deadline
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
            self._most = max(_FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (sequence.deadline, next(self._numbers), sequence))

    def expired(self, now_s: float) -> list[Sequence]:
        """Those that still wait though their deadline is before `now_s`, by `time.monotonic()`; each is returned once.

        One that runs now is left out, and would be added again if it were preempted.
        """
        found: list[Sequence] = []
        while self._heap and self._heap[0][0] < now_s:
            _, _, sequence = heapq.heappop(self._heap)
            if sequence.slot < 0 and not sequence.finished and sequence not in found:
                found.append(sequence)
        return found
