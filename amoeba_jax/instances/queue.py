"""Queue of waiting sequences, equal shares of clients, and siblings that may not enter the queue yet."""

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from operator import attrgetter

from amoeba_jax.instances.sequence import Sequence

_RESERVED_SHARE = 8
"""One of every 8 slots is reserved for sequences that are not siblings. With fewer than 8 slots, none is reserved."""

_order, _order_of_client = attrgetter("order"), attrgetter("order_of_client")


class Waiting:
    """Queue of waiting sequences, sorted by `Sequence.order`. Only the dispatcher thread uses the queue.

    Attributes:
        clients: for each client, the number of its sequences in the queue.
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
        """Insert a sequence at the position that `Sequence.order` gives."""
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
        """Sort the queue again. Call this method after `Sequence.beyond_share` has changed for some sequences."""
        self._ordered.sort(key=_order)

    def expired(self, now_s: float) -> list[Sequence]:
        """Return the sequences in the queue whose deadline is before `now_s`, a value of `time.monotonic()`.

        The caller must remove the returned sequences from the queue, because later calls do not always return them
        again.
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
    """Set `Sequence.beyond_share` of all running and waiting sequences. Return whether any value has changed.

    The clients with running or waiting sequences have equal shares. With N such clients, a share is an N-th of all
    slots, and an N-th of the tokens that fit in all KV caches. This function lists the sequences of each client: first
    the running sequences, then the waiting sequences, both in the order of `Sequence.order_of_client`. A sequence is
    beyond the share if the list up to and including this sequence needs more slots or more tokens than the share has.
    Example: with 8 slots and 2 clients, the fifth and all later sequences of each client are beyond the share.

    The first sequence of a client is never beyond the share, so that even a request longer than the share can run. If
    there is only one client, no sequence is beyond the share. At the end, this function sorts `waiting` by
    `Sequence.order`, which depends on `beyond_share`.

    Args:
        num_slots: number of slots of all instances together.
        num_tokens: number of tokens that fit in the KV caches of all instances together.
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
    """Siblings (later samples of requests) that must not enter the queue yet. Used by the dispatcher thread only.

    A sibling first waits until the prompt of its leader (the first sample of the request) is computed. Then the sibling
    may still have to wait because of a limit: the number of siblings that have entered the queue and have not ended may
    be at most seven eighths of the number of slots. Without this limit, a request with 128 samples could occupy all
    slots until the longest of these samples ends. If there are fewer than eight slots, there is no limit.

    Attributes:
        held: siblings that wait only because of the limit.
    """

    def __init__(self) -> None:
        self.held: set[Sequence] = set()
        self._admitted: set[Sequence] = set()

    def release(self, leader: Sequence) -> None:
        """Move the siblings in `leader.siblings` to `held`. Siblings that have ended are dropped.

        Call this method when the leader's prompt is computed, or when the leader is preempted or ends.
        """
        siblings, leader.siblings = leader.siblings, []
        self.held.update(sibling for sibling in siblings if not sibling.finished)

    def remove(self, sequence: Sequence) -> None:
        """Forget an ended sequence. The limit of `admit` for unfinished siblings no longer counts this sequence."""
        self._admitted.discard(sequence)
        self.held.discard(sequence)

    def clear(self) -> None:
        """Forget all siblings. Call this method when the engine ends."""
        self.held.clear()
        self._admitted.clear()

    def admit(self, num_slots: int) -> list[Sequence]:
        """Return the siblings that may enter the queue now, and remove these siblings from `held`.

        The result is sorted by `Sequence.order`.

        Args:
            num_slots: number of sequences that all instances together may run.
        """
        limit = num_slots - num_slots // _RESERVED_SHARE
        room = len(self.held) if num_slots < _RESERVED_SHARE else limit - len(self._admitted)
        if room <= 0 or not self.held:
            return []
        found = heapq.nsmallest(room, self.held, key=_order)
        self.held.difference_update(found)
        self._admitted.update(found)
        return found
