"""Queue of waiting sequences, shares of clients, and second and later samples of requests."""

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from operator import attrgetter

from amoeba_jax.instances.sequence import Sequence

_RESERVED_SHARE = 8
"""One in this many slots is reserved for sequences that are not siblings. With fewer slots, none is reserved."""

_order, _order_of_client = attrgetter("order"), attrgetter("order_of_client")


class Waiting:
    """Queue of waiting sequences, sorted by `Sequence.order`. Used by the dispatcher thread only.

    Attributes:
        clients: number of waiting sequences of each client.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._members: set[int] = set()
        self.clients: Counter[str] = Counter()
        self._next_deadline_s = math.inf

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def __contains__(self, sequence: object) -> bool:
        return id(sequence) in self._members

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue, at its position in the order."""
        insort(self._ordered, sequence, key=_order)
        self._members.add(id(sequence))
        self.clients[sequence.client] += 1
        if sequence.deadline is not None:
            self._next_deadline_s = min(self._next_deadline_s, sequence.deadline)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises `ValueError` if the sequence is not in the queue."""
        place = bisect_left(self._ordered, sequence.order, key=_order)
        if place == len(self._ordered) or self._ordered[place] is not sequence:
            raise ValueError(f"sequence {sequence.request_id} does not wait")
        del self._ordered[place]
        self._members.remove(id(sequence))
        self.clients -= Counter([sequence.client])  # drops clients without sequences

    def sort(self) -> None:
        """Sort the queue again, after `Sequence.beyond_share` of some sequences has changed."""
        self._ordered.sort(key=_order)

    def expired(self, now_s: float) -> list[Sequence]:
        """Return the sequences whose deadline is before `now_s`, a value of `time.monotonic()`.

        The sequences stay in the queue, and the caller must remove them. The queue is searched only if a deadline has
        passed since the latest search.
        """
        if now_s <= self._next_deadline_s:
            return []
        deadlines = [(s.deadline, s) for s in self._ordered if s.deadline is not None]
        self._next_deadline_s = min((deadline for deadline, _ in deadlines if deadline >= now_s), default=math.inf)
        return [sequence for deadline, sequence in deadlines if deadline < now_s]

    def clear(self) -> None:
        """Remove all sequences."""
        self._ordered.clear()
        self._members.clear()
        self.clients.clear()


def mark_beyond_share(running: Collection[Sequence], waiting: Waiting, num_slots: int, num_tokens: int) -> bool:
    """Mark the sequences that exceed the share of their client. Return whether any mark has changed.

    The mark is `Sequence.beyond_share`. The queue is sorted again afterwards.

    If N clients have sequences, each client's share is an N-th of all slots, and an N-th of the tokens that fit in all
    KV caches. The running sequences of a client use up its share first, then the waiting sequences. Both are in the
    order of `Sequence.order_of_client`. Sequences for which the share does not suffice are marked. Example: with 8
    slots and 2 clients, the fifth and all later sequences of each client are marked.

    The first sequence of a client is never marked, so that even a request longer than the share can run. If there is
    only one client, no sequence is marked.

    Args:
        num_slots: number of slots of all instances.
        num_tokens: number of tokens that fit in all KV caches.
    """
    of_client: defaultdict[str, list[Sequence]] = defaultdict(list)
    present = [s for s in running if not s.finished]
    for sequence in (*sorted(present, key=_order_of_client), *sorted(waiting, key=_order_of_client)):
        of_client[sequence.client].append(sequence)
    slots, tokens = num_slots / max(len(of_client), 1), num_tokens / max(len(of_client), 1)
    changed: list[Sequence] = []
    for sequences in of_client.values():
        used = 0
        for count, sequence in enumerate(sequences, 1):
            used += sequence.num_tokens
            beyond = len(of_client) > 1 and count > 1 and (count > slots or used > tokens)
            if beyond != sequence.beyond_share:
                changed.append(sequence)
    for sequence in changed:
        sequence.beyond_share = not sequence.beyond_share
    waiting.sort()
    return bool(changed)


class Siblings:
    """Second and later samples of requests, called siblings. Used by the dispatcher thread only.

    The first sample of a request is the leader of the request's siblings. Siblings wait until their leader's prompt is
    computed. Then they may enter the queue, up to a limit: the siblings of all requests may use at most seven eighths
    of all slots. Without this limit, a request with 128 samples could hold every slot until its longest sample ends.

    Attributes:
        held: siblings that no longer wait for their leader. They wait only because of the limit.
    """

    def __init__(self) -> None:
        self.held: set[Sequence] = set()
        self._admitted: set[Sequence] = set()

    def release(self, leader: Sequence) -> None:
        """Move the siblings of a leader to `held`.

        Call this when the leader's prompt is computed, or when the leader is preempted or has ended.
        """
        siblings, leader.siblings = leader.siblings, []
        self.held.update(sibling for sibling in siblings if not sibling.finished)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. Do nothing if the sequence is not a sibling."""
        self._admitted.discard(sequence)
        self.held.discard(sequence)

    def clear(self) -> None:
        """Remove all siblings, because the engine ends."""
        self.held.clear()
        self._admitted.clear()

    def admit(self, num_slots: int) -> list[Sequence]:
        """Return the siblings in `held` that may enter the queue now, and remove them from `held`.

        The result is in the order of `Sequence.order`.

        Args:
            num_slots: number of sequences that all instances together can run.
        """
        limit = num_slots - num_slots // _RESERVED_SHARE
        room = len(self.held) if num_slots < _RESERVED_SHARE else limit - len(self._admitted)
        if room <= 0 or not self.held:
            return []
        found = heapq.nsmallest(room, self.held, key=_order)
        self.held.difference_update(found)
        self._admitted.update(found)
        return found
