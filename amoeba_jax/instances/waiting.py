"""The sequences that wait, in order, and what has changed of them recently."""

import bisect
from collections import Counter, deque
from collections.abc import Iterator

from amoeba_jax.instances.sequence import Sequence

_MOST_CHANGES = 4096

Change = tuple[Sequence, bool]
"""A sequence, and whether it waits now, or has gone."""


class Waiting:
    """Sequences by `Sequence.order`. Used by the dispatcher thread only.

    Attributes:
        clients: how many sequences each client has here.
        version: number of changes since the start.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._members: set[int] = set()
        self._changes: deque[Change] = deque(maxlen=_MOST_CHANGES)
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
        self._members.add(id(sequence))
        self.clients[sequence.client] += 1
        self._change(sequence, True)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raises `ValueError` if it does not wait."""
        place = bisect.bisect_left(self._ordered, sequence.order, key=lambda s: s.order)
        if place == len(self._ordered) or self._ordered[place] is not sequence:
            place = self._ordered.index(sequence)  # its order has changed since it came
        del self._ordered[place]
        self._members.remove(id(sequence))
        self.clients[sequence.client] -= 1
        if not self.clients[sequence.client]:
            del self.clients[sequence.client]
        self._change(sequence, False)

    def sort(self) -> None:
        """Orders have changed: all changes up to now are forgotten, so that everything is read again."""
        self._ordered.sort(key=lambda s: s.order)
        self._changes.clear()
        self.version += 1

    def clear(self) -> None:
        """Forget all."""
        self._ordered.clear()
        self._members.clear()
        self.clients.clear()
        self._changes.clear()
        self.version += 1

    def _change(self, sequence: Sequence, waits: bool) -> None:
        self._changes.append((sequence, waits))
        self.version += 1

    def changes_since(self, version: int) -> list[Change] | None:
        """What has changed since a version, in order; None if that is not known any more."""
        count = self.version - version
        if not 0 <= count <= len(self._changes):
            return None
        return [self._changes[place] for place in range(len(self._changes) - count, len(self._changes))]
