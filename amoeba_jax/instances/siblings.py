"""The second and later samples of requests: they wait for their leader's prompt, and leave slots to others."""

import heapq
from collections.abc import Callable

from amoeba_jax.instances.sequence import Sequence

# Of all slots: those that are not given to them. Where there are fewer than 8 slots, none.
_RESERVED_SHARE = 8


class Siblings:
    """Lets siblings into the queue, as many as leave an eighth of all slots to other requests: one with 128 samples
    would otherwise take every slot, for as long as its longest sample. Used by the dispatcher thread only.

    Args:
        enqueue: puts a sequence into the queue.
        num_slots: how many sequences all instances can run.

    Attributes:
        held: those that could be in the queue but for the limit.
    """

    def __init__(self, enqueue: Callable[[Sequence], None], num_slots: Callable[[], int]):
        self._enqueue, self._num_slots = enqueue, num_slots
        self.held: set[Sequence] = set()
        self._heap: list[tuple[tuple[int, ...], int, Sequence]] = []
        """The held ones by `Sequence.order`, and some that have ended."""
        self._admitted: set[Sequence] = set()

    def release(self, leader: Sequence) -> None:
        """Let a leader's siblings begin: its prompt is computed, or it has ended."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if not sibling.finished:
                self.held.add(sibling)
                heapq.heappush(self._heap, (sibling.order, id(sibling), sibling))
        self._admit()

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended: if it was a sibling, the next may begin."""
        if sequence in self._admitted:
            self._admitted.remove(sequence)
            self._admit()
        elif sequence in self.held:
            self.held.remove(sequence)
            if len(self._heap) > 2 * len(self.held):  # going through all each time would be quadratic
                self._heap = [entry for entry in self._heap if entry[-1] in self.held]
                heapq.heapify(self._heap)

    def clear(self) -> None:
        """Forget all of them: the engine ends."""
        self.held.clear()
        self._heap.clear()
        self._admitted.clear()

    def _admit(self) -> None:
        if not self.held:
            return
        slots = self._num_slots()
        limit = slots - slots // _RESERVED_SHARE
        while self.held and (len(self._admitted) < limit or slots < _RESERVED_SHARE):
            *_, sibling = heapq.heappop(self._heap)
            if sibling not in self.held:
                continue
            self.held.remove(sibling)
            self._admitted.add(sibling)
            self._enqueue(sibling)
