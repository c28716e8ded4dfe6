"""Queue of waiting sequences: order, deadlines, shares of clients, and further samples of requests."""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, KeysView
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from amoeba_jax.instances.sequence import Sequence

_FEW_MARKED = 64
"""Maximum number of marked sequences to move one by one. For more, sorting the whole queue is cheaper."""
_FEW_DEADLINES = 256
"""Minimum size of the heap at which deadlines of finished sequences are removed from it."""
_RESERVED_SHARE = 8
"""One in this many slots is reserved for sequences that are not siblings. With fewer slots, none is reserved."""

_order, _order_of_client = attrgetter("order"), attrgetter("order_of_client")


class Waiting:
    """Waiting sequences, sorted by `Sequence.order`. Used by the dispatcher thread only."""

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._members: set[int] = set()
        self._by_client: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def __contains__(self, sequence: object) -> bool:
        return id(sequence) in self._members

    @property
    def clients(self) -> KeysView[str]:
        """Clients that have waiting sequences."""
        return self._by_client.keys()

    def of_client(self, client: str) -> SequenceOf[Sequence]:
        """Return the sequences of a client by `Sequence.order_of_client`. The caller must not change the list."""
        return self._by_client.get(client, ())

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at its position in the order."""
        insort(self._ordered, sequence, key=_order)
        insort(self._by_client.setdefault(sequence.client, []), sequence, key=_order_of_client)
        self._members.add(id(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises `ValueError` if it does not wait."""
        _take(self._ordered, sequence, _order)
        self._members.remove(id(sequence))
        mine = self._by_client[sequence.client]
        _take(mine, sequence, _order_of_client)
        if not mine:
            del self._by_client[sequence.client]

    def mark(self, sequences: SequenceOf[Sequence], beyond: bool) -> None:
        """Set `Sequence.beyond_share` of waiting sequences, and move them to their new positions.

        Raises `ValueError`, and changes nothing, if a sequence does not wait.
        """
        if missing := [sequence.request_id for sequence in sequences if sequence not in self]:
            raise ValueError(f"sequences {missing} do not wait")
        if len(sequences) > _FEW_MARKED:
            for sequence in sequences:
                sequence.beyond_share = beyond
            self._ordered.sort(key=_order)
            return
        for sequence in sequences:
            _take(self._ordered, sequence, _order)
            sequence.beyond_share = beyond
            insort(self._ordered, sequence, key=_order)

    def clear(self) -> None:
        """Remove all sequences."""
        for table in (self._ordered, self._members, self._by_client):
            table.clear()


def _take(ordered: list[Sequence], sequence: Sequence, order: attrgetter) -> None:
    """Remove a sequence from a sorted list. Raises `ValueError` if the list does not contain it."""
    place = bisect_left(ordered, order(sequence), key=order)
    if place == len(ordered) or ordered[place] is not sequence:
        raise ValueError(f"sequence {sequence.request_id} does not wait")
    del ordered[place]


def mark_beyond_share(running: Collection[Sequence], waiting: Waiting, num_slots: int, num_tokens: int) -> bool:
    """Set `Sequence.beyond_share` of all sequences. Return whether any value has changed.

    With N clients, a client's share is an N-th of all slots and an N-th of all tokens in KV caches. A client's running
    sequences use its share first, then its waiting sequences, each in order. All further sequences are beyond the
    share.

    The first sequence of a client is never beyond its share, so that a request of any length can end. Clients without
    requests have no share. With a single client, no sequence is beyond its share.
    """
    of_client: defaultdict[str, list[Sequence]] = defaultdict(list)
    for sequence in sorted(running, key=_order_of_client):
        if not sequence.finished:
            of_client[sequence.client].append(sequence)
    clients = {*of_client, *waiting.clients}
    slots, tokens = num_slots / max(len(clients), 1), num_tokens / max(len(clients), 1)
    changed = False
    to_mark: dict[bool, list[Sequence]] = {False: [], True: []}
    for client in clients:
        count = used = 0
        beyond = False
        for sequence in of_client[client]:
            count, used = count + 1, used + sequence.num_tokens
            beyond = _exceeds(count, used, slots, tokens, len(clients))
            changed |= beyond != sequence.beyond_share
            sequence.beyond_share = beyond
        for sequence in waiting.of_client(client):
            if not beyond:  # once a sequence is beyond the share, all later ones are
                count, used = count + 1, used + sequence.num_tokens
                beyond = _exceeds(count, used, slots, tokens, len(clients))
            if beyond != sequence.beyond_share:
                to_mark[beyond].append(sequence)
    for beyond, sequences in to_mark.items():
        waiting.mark(sequences, beyond)
    return changed or any(to_mark.values())


def _exceeds(count: int, used: int, slots: float, tokens: float, num_clients: int) -> bool:
    return num_clients > 1 and count > 1 and (count > slots or used > tokens)


class Deadlines:
    """Deadlines of waiting sequences, in a heap. The cost of `expired` does not grow with the queue."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()
        self._limit = _FEW_DEADLINES

    def add(self, sequence: Sequence) -> None:
        """Add the deadline of a sequence that starts to wait, or waits again after a preemption."""
        if sequence.deadline is None:
            return
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
            self._limit = max(_FEW_DEADLINES, 2 * len(self._heap))
        heapq.heappush(self._heap, (sequence.deadline, next(self._numbers), sequence))

    def expired(self, now_s: float) -> list[Sequence]:
        """Remove and return the waiting sequences whose deadline is before `now_s`, a value of `time.monotonic()`.

        Running sequences are removed, but not returned. If such a sequence is preempted, `add` must be called again.
        """
        found: list[Sequence] = []
        while self._heap and self._heap[0][0] < now_s:
            _, _, sequence = heapq.heappop(self._heap)
            if sequence.slot < 0 and not sequence.finished and sequence not in found:
                found.append(sequence)
        return found


class Siblings:
    """Siblings: second and later samples of requests.

    They wait until the first sample, the leader, has a computed prompt. Siblings may use at most seven eighths of all
    slots. Without this limit, a request with 128 samples could hold every slot until its longest sample ends. Used by
    the dispatcher thread only.

    Attributes:
        held: siblings that would be in the queue without this limit.
    """

    def __init__(self) -> None:
        self.held: set[Sequence] = set()
        self._heap: list[tuple[tuple[int, ...], int, Sequence]] = []
        """Held siblings by `Sequence.order`. Some entries may be for finished siblings."""
        self._admitted: set[Sequence] = set()

    def release(self, leader: Sequence) -> None:
        """Move the siblings of a leader to `held`.

        Call this when the leader's prompt is computed, or when the leader has ended.
        """
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if not sibling.finished:
                self.held.add(sibling)
                heapq.heappush(self._heap, (sibling.order, id(sibling), sibling))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. Do nothing if it is not a sibling."""
        if sequence in self._admitted:
            self._admitted.remove(sequence)
        elif sequence in self.held:
            self.held.remove(sequence)
            if len(self._heap) > 2 * len(self.held):  # a search for each removed sibling would be quadratic
                self._heap = [entry for entry in self._heap if entry[-1] in self.held]
                heapq.heapify(self._heap)

    def clear(self) -> None:
        """Remove all siblings, because the engine ends."""
        self.held.clear()
        self._heap.clear()
        self._admitted.clear()

    def admit(self, num_slots: int) -> list[Sequence]:
        """Remove and return the held siblings that may enter the queue now, in order.

        Args:
            num_slots: number of sequences that all instances together can run.
        """
        found: list[Sequence] = []
        limit = num_slots - num_slots // _RESERVED_SHARE
        while self.held and (len(self._admitted) < limit or num_slots < _RESERVED_SHARE):
            *_, sibling = heapq.heappop(self._heap)
            if sibling in self.held:
                self.held.remove(sibling)
                self._admitted.add(sibling)
                found.append(sibling)
        return found
