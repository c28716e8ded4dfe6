"""The second and later samples of requests: they wait for their leader's prompt, and leave slots to others."""

import bisect
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
        held: those that could be in the queue but for the limit, in order.
    """

    def __init__(self, enqueue: Callable[[Sequence], None], num_slots: Callable[[], int]):
        self._enqueue, self._num_slots = enqueue, num_slots
        self.held: list[Sequence] = []
        self._admitted: set[Sequence] = set()

    def release(self, leader: Sequence) -> None:
        """Let a leader's siblings begin: its prompt is computed, or it has ended."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if not sibling.finished:
                bisect.insort(self.held, sibling, key=lambda s: s.order)
        self._admit()

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended: if it was a sibling, the next may begin."""
        if sequence in self._admitted:
            self._admitted.remove(sequence)
            self._admit()
        elif sequence in self.held:
            self.held.remove(sequence)

    def clear(self) -> None:
        """Forget all of them: the engine ends."""
        self.held.clear()
        self._admitted.clear()

    def _admit(self) -> None:
        if not self.held:
            return
        slots = self._num_slots()
        limit = slots - slots // _RESERVED_SHARE
        while self.held and (len(self._admitted) < limit or slots < _RESERVED_SHARE):
            sibling = self.held.pop(0)
            self._admitted.add(sibling)
            self._enqueue(sibling)
