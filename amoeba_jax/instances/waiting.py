"""The sequences that wait, in order, and what has changed of them recently."""

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from amoeba_jax.instances.sequence import Sequence

_MOST_CHANGES = 4096


class Waiting:
    """Sequences by `Sequence.order`. Used by the dispatcher thread only.

    Attributes:
        clients: how many sequences each client has here.
        version: number of changes since the start.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._members: dict[int, Sequence] = {}
        self._changes: deque[int] = deque(maxlen=_MOST_CHANGES)
        """Ids alone: sequences that have ended are not kept alive."""
        self.clients: Counter[str] = Counter()
        self.version = 0

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def __contains__(self, sequence: object) -> bool:
        return id(sequence) in self._members

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        bisect.insort(self._ordered, sequence, key=lambda s: s.order)
        self._members[id(sequence)] = sequence
        self.clients[sequence.client] += 1
        self._change(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raises `ValueError` if it does not wait."""
        place = bisect.bisect_left(self._ordered, sequence.order, key=lambda s: s.order)
        if place == len(self._ordered) or self._ordered[place] is not sequence:
            place = self._ordered.index(sequence)  # its order has changed since it came
        del self._ordered[place]
        del self._members[id(sequence)]
        self.clients[sequence.client] -= 1
        if not self.clients[sequence.client]:
            del self.clients[sequence.client]
        self._change(sequence)

    def sort(self, changed: Iterable[Sequence] | None = None) -> None:
        """Orders have changed: those of `changed`, which need not all wait. None: of any, so that all changes up to
        now are forgotten, and everything is read again."""
        self._ordered.sort(key=lambda s: s.order)
        if changed is None:
            self._changes.clear()
            self.version += 1
            return
        for sequence in changed:
            if sequence in self:
                self._change(sequence)

    def clear(self) -> None:
        """Forget all."""
        self._ordered.clear()
        self._members.clear()
        self.clients.clear()
        self._changes.clear()
        self.version += 1

    def _change(self, sequence: Sequence) -> None:
        self._changes.append(id(sequence))
        self.version += 1

    def changes_since(self, version: int) -> dict[int, Sequence | None] | None:
        """What has changed since a version: the ids of the sequences concerned, each with the one that waits now, or
        None. An id may be that of another sequence by now. None if what has changed is not known any more."""
        count = self.version - version
        if not 0 <= count <= len(self._changes):
            return None
        latest = (self._changes[place] for place in range(len(self._changes) - count, len(self._changes)))
        return {number: self._members.get(number) for number in latest}
