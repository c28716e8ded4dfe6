"""The queue in the order in which it is served, kept up to date by what changes."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.view import WaitingRequest
from serving.scheduler.waiting_queue import QueueSnapshot

_FEW = 64
"""From this many new requests on, sorting again is cheaper than inserting each."""
_SPENT_DEADLINES = 256
"""From this many more deadlines than twice the requests on, those of requests that have gone are dropped."""


class QueueIndex:
    """Waiting requests by the time when they are due, by how long they have waited, by size and by deadline.

    A change costs no more than moving the pointers behind it; reading the first requests does not go through the rest.
    """

    def __init__(self, order: QueueOrder):
        self.order = order
        self._requests: dict[str, WaitingRequest] = {}
        self._by_due: list[tuple[Any, ...]] = []
        self._by_since: list[tuple[float, float, str]] = []
        """Requests within their client's share: those that have waited longest first."""
        self._by_size: list[tuple[int, str]] = []
        self._urgent: list[tuple[Any, ...]] = []
        """Requests with a priority below 0."""
        self._deadlines: list[tuple[float, str]] = []
        self._seen: tuple[object, int] = (None, -1)

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, queue: Collection[WaitingRequest]) -> None:
        """Take over the queue of a snapshot."""
        changes = None
        if isinstance(queue, QueueSnapshot):
            source, version = self._seen
            if source is queue.source:
                changes = queue.changes_since(version)
            self._seen = queue.source, queue.version
        if changes is None:
            new = {request.request_id: request for request in queue}
            changes = [(name, None) for name in self._requests if name not in new]
            changes += [(name, r) for name, r in new.items() if self._requests.get(name) is not r]
        latest = dict(changes)
        for name in latest:
            if (known := self._requests.pop(name, None)) is not None:
                self._remove(known)
        self._add([request for request in latest.values() if request is not None])
        if len(self._deadlines) > 2 * len(self._requests) + _SPENT_DEADLINES:
            self._deadlines = [
                (r.deadline_s, r.request_id) for r in self._requests.values() if r.deadline_s is not None
            ]
            heapq.heapify(self._deadlines)

    def _entries(self, request: WaitingRequest) -> tuple[tuple[list[Any], Any], ...]:
        """The lists that have a request, and its entry in each."""
        name = request.request_id
        entries: list[tuple[list[Any], Any]] = [
            (self._by_due, self.order.due_key(request)),
            (self._by_size, (request.max_total_tokens, name)),
        ]
        if request.priority < 0:
            entries.append((self._urgent, self.order.due_key(request)))
        if not request.beyond_share:
            entries.append((self._by_since, (request.since_s, request.arrival_s, name)))
        return tuple(entries)

    def _remove(self, request: WaitingRequest) -> None:
        for entries, entry in self._entries(request):
            del entries[bisect_left(entries, entry)]

    def _add(self, requests: list[WaitingRequest]) -> None:
        for request in requests:
            self._requests[request.request_id] = request
            for entries, entry in self._entries(request):
                if len(requests) < _FEW:
                    insort(entries, entry)
                else:
                    entries.append(entry)
            if request.deadline_s is not None:
                heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
        if len(requests) >= _FEW:
            for entries in (self._by_due, self._by_since, self._by_size, self._urgent):
                entries.sort()

    def ordered(self, now_s: float) -> Iterator[WaitingRequest]:
        """Requests as they are served: those that starve by the time that they have waited, then all by when they are
        due. To be read before the next `update`."""
        starving = 0
        if self.order.starving_s is not None:
            starving = bisect_right(self._by_since, (now_s - self.order.starving_s, float("inf"), ""))
            for _, _, name in islice(self._by_since, starving):
                yield self._requests[name]
        for *_, name in self._by_due:
            request = self._requests[name]
            if not starving or not self.order.starves(request, now_s):
                yield request

    def urgent(self, most: int) -> list[WaitingRequest]:
        """The first requests with a priority below 0, by when they are due; at most that many."""
        return [self._requests[name] for *_, name in self._urgent[:most]]

    def expired(self, now_s: float) -> list[WaitingRequest]:
        """Requests whose deadline has passed. They are told again until they are gone."""
        names, again = [], []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, name = entry = heapq.heappop(self._deadlines)
            request = self._requests.get(name)
            if request is not None and request.deadline_s == deadline_s and name not in names:
                names.append(name)
                again.append(entry)
        for entry in again:
            heapq.heappush(self._deadlines, entry)
        return [self._requests[name] for name in names]

    def larger_than(self, num_tokens: int) -> list[WaitingRequest]:
        """Requests that may grow beyond that many tokens, the smallest first."""
        first = bisect_right(self._by_size, (num_tokens, "\U0010ffff"))
        return [self._requests[name] for _, name in self._by_size[first:]]

    def largest(self, num_tokens: int) -> int:
        """Most tokens of the largest request that may not grow beyond that many; 0 if there is none."""
        place = bisect_right(self._by_size, (num_tokens, "\U0010ffff"))
        return self._by_size[place - 1][0] if place else 0
