"""Waiting sequences, in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator, KeysView, Mapping
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from amoeba_jax.instances.sequence import Sequence

_FEW = 64
"""Up to this many sequences that are marked, moving each is cheaper than sorting all again."""

_order, _order_of_client = attrgetter("order"), attrgetter("order_of_client")


class Waiting:
    """Sequences by `Sequence.order`. Used by the dispatcher thread only."""

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._members: dict[int, Sequence] = {}
        self._by_client: dict[str, list[Sequence]] = {}
        self._within: dict[str, dict[int, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def __contains__(self, sequence: object) -> bool:
        return id(sequence) in self._members

    @property
    def clients(self) -> KeysView[str]:
        """Clients that have sequences here."""
        return self._by_client.keys()

    def of_client(self, client: str) -> SequenceOf[Sequence]:
        """The sequences of a client, by `Sequence.order_of_client`. Not to be changed."""
        return self._by_client.get(client, ())

    def within_share(self, client: str) -> Mapping[int, Sequence]:
        """Those that are not beyond the client's share, by their Python ids."""
        return self._within.get(client, {})

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._ordered, sequence, key=_order)
        insort(self._by_client.setdefault(sequence.client, []), sequence, key=_order_of_client)
        self._members[id(sequence)] = sequence
        if not sequence.beyond_share:
            self._within.setdefault(sequence.client, {})[id(sequence)] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raises `ValueError` if it does not wait."""
        _take(self._ordered, sequence, _order)
        del self._members[id(sequence)]
        mine, within = self._by_client[sequence.client], self._within.get(sequence.client, {})
        _take(mine, sequence, _order_of_client)
        within.pop(id(sequence), None)
        if not mine:
            del self._by_client[sequence.client]
        if not within:
            self._within.pop(sequence.client, None)

    def mark(self, sequences: SequenceOf[Sequence], beyond: bool) -> None:
        """Set `Sequence.beyond_share` of sequences, and put them in their new places. More than a few have all that
        waits sorted again. Raises `ValueError`, with nothing done, if one does not wait."""
        if missing := [sequence.request_id for sequence in sequences if sequence not in self]:
            raise ValueError(f"sequences {missing} do not wait")
        if len(sequences) <= _FEW:
            for sequence in sequences:
                _take(self._ordered, sequence, _order)
                sequence.beyond_share = beyond
                insort(self._ordered, sequence, key=_order)
        else:
            for sequence in sequences:
                sequence.beyond_share = beyond
            self._ordered.sort(key=_order)
        for sequence in sequences:
            within = self._within.setdefault(sequence.client, {})
            if beyond:
                within.pop(id(sequence), None)
            else:
                within[id(sequence)] = sequence
            if not within:
                del self._within[sequence.client]

    def clear(self) -> None:
        """Forget all."""
        for table in (self._ordered, self._members, self._by_client, self._within):
            table.clear()


def _take(ordered: list[Sequence], sequence: Sequence, order: attrgetter) -> None:
    """Take a sequence out of a list in order. Raises `ValueError` if it is not there."""
    place = bisect_left(ordered, order(sequence), key=order)
    if place == len(ordered) or ordered[place] is not sequence:
        raise ValueError(f"sequence {sequence.request_id} does not wait")
    del ordered[place]
