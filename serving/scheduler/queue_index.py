"""The queue in the order in which it is served, kept up to date by what changes."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from serving.scheduler.ordered_requests import FEW, OrderedRequests
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.view import WaitingRequest
from serving.scheduler.waiting_queue import QueueSnapshot

_SPENT_DEADLINES = 256
"""From this many more deadlines than twice the requests on, those of requests that have gone are dropped."""


class QueueIndex:
    """Waiting requests by the time when they are due, by how long they have waited, by size and by deadline.

    A change costs no more than moving the pointers behind it; reading the first requests does not go through the rest.
    """

    def __init__(self, order: QueueOrder):
        self.order = order
        self._requests = OrderedRequests(order)
        self._by_size: list[tuple[int, str]] = []
        self._urgent: list[tuple[Any, ...]] = []
        """Requests with a priority below 0."""
        self._deadlines: list[tuple[float, str]] = []
        self._seen: tuple[object, int] = (None, -1)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> WaitingRequest:
        """A request of the queue."""
        request = self._requests.get(request_id)
        assert request is not None, "it waits"
        return request

    def update(self, queue: Collection[WaitingRequest]) -> Mapping[str, WaitingRequest | None]:
        """Take over the queue of a snapshot. Returns what has changed by the requests' ids: those that are new or
        others than before, and None for those that have gone."""
        changes = None
        if isinstance(queue, QueueSnapshot):
            source, version = self._seen
            if source is queue.source:
                changes = queue.changes_since(version)
        if changes is None:
            new = {request.request_id: request for request in queue}
            changes = [(r.request_id, None) for r in self._requests if r.request_id not in new]
            changes += [(name, r) for name, r in new.items() if self._requests.get(name) is not r]
        self._seen = (None, -1)  # until all is taken over
        latest = dict(changes)
        for name in latest:
            if (known := self._requests.remove(name)) is not None:
                self._unlist(known)
        requests = [request for request in latest.values() if request is not None]
        self._requests.add(requests)
        self._list(requests)
        if len(self._deadlines) > 2 * len(self._requests) + _SPENT_DEADLINES:
            self._deadlines = [(r.deadline_s, r.request_id) for r in self._requests if r.deadline_s is not None]
            heapq.heapify(self._deadlines)
        if isinstance(queue, QueueSnapshot):
            self._seen = queue.source, queue.version
        return latest

    def _unlist(self, request: WaitingRequest) -> None:
        del self._by_size[bisect_left(self._by_size, (request.max_total_tokens, request.request_id))]
        if request.priority < 0:
            del self._urgent[bisect_left(self._urgent, self.order.due_key(request))]

    def _list(self, requests: list[WaitingRequest]) -> None:
        many = len(requests) >= FEW
        put = list.append if many else insort
        for request in requests:
            put(self._by_size, (request.max_total_tokens, request.request_id))
            if request.priority < 0:
                put(self._urgent, self.order.due_key(request))
            if request.deadline_s is not None:
                heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
        if many:
            self._by_size.sort()
            self._urgent.sort()

    def ordered(self, now_s: float) -> Iterator[WaitingRequest]:
        """Requests as they are served. To be read before the next `update`."""
        return self._requests.ordered(now_s)

    def began_to_starve(self, before_s: float, now_s: float) -> list[str]:
        """Ids of requests that starve now, and did not at the time before."""
        return self._requests.began_to_starve(before_s, now_s)

    def urgent(self, most: int) -> list[WaitingRequest]:
        """The first requests with a priority below 0, by when they are due; at most that many."""
        return [self.get(name) for *_, name in self._urgent[:most]]

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
        return [self.get(name) for name in names]

    def larger_than(self, num_tokens: int) -> list[WaitingRequest]:
        """Requests that may grow beyond that many tokens, the smallest first."""
        return [self.get(name) for _, name in self._by_size[self.count(num_tokens) :]]

    def count(self, num_tokens: int) -> int:
        """How many requests may not grow beyond that many tokens."""
        return bisect_right(self._by_size, (num_tokens, "\U0010ffff"))

    def largest(self, num_tokens: int) -> int:
        """Most tokens of the largest request that may not grow beyond that many; 0 if there is none."""
        place = self.count(num_tokens)
        return self._by_size[place - 1][0] if place else 0
