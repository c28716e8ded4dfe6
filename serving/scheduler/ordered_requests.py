"""Waiting requests in the order in which they are served."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from serving.scheduler.queue_order import Key, QueueOrder
from serving.scheduler.view import WaitingRequest

FEW = 64
"""From this many new entries of a list on, sorting it again is cheaper than inserting each."""


class OrderedRequests:
    """A queue that costs no more to change than moving the pointers behind the change, and to read than what is read.

    Args:
        order: who is served first. Which requests starve depends on the time, so that it is asked for.
    """

    def __init__(self, order: QueueOrder):
        self._order = order
        self._requests: dict[str, WaitingRequest] = {}
        self._by_due: list[Key] = []
        self._by_since: list[tuple[float, float, str]] = []
        """Requests within their client's share: those that have waited longest first."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[WaitingRequest]:
        return iter(self._requests.values())

    def get(self, request_id: str) -> WaitingRequest | None:
        """The request of that id; None if there is none."""
        return self._requests.get(request_id)

    def add(self, requests: Sequence[WaitingRequest]) -> None:
        """Add requests that are not there."""
        many = len(requests) >= FEW
        put = list.append if many else insort
        for request in requests:
            self._requests[request.request_id] = request
            put(self._by_due, self._order.due_key(request))
            if not request.beyond_share:
                put(self._by_since, _since(request))
        if many:
            self._by_due.sort()
            self._by_since.sort()

    def remove(self, request_id: str) -> WaitingRequest | None:
        """Take a request out. Returns it; None if it is not there."""
        if (request := self._requests.pop(request_id, None)) is None:
            return None
        del self._by_due[bisect_left(self._by_due, self._order.due_key(request))]
        if not request.beyond_share:
            del self._by_since[bisect_left(self._by_since, _since(request))]
        return request

    def began_to_starve(self, before_s: float, now_s: float) -> list[str]:
        """Ids of requests that starve now, and did not at the time before."""
        return [name for _, _, name in self._by_since[self._num_starving(before_s) : self._num_starving(now_s)]]

    def _starving_since(self, now_s: float) -> float:
        """Requests starve that have waited since then, or for longer."""
        starving_s = self._order.starving_s
        return float("-inf") if starving_s is None else now_s - starving_s

    def _num_starving(self, now_s: float) -> int:
        return bisect_right(self._by_since, (self._starving_since(now_s), float("inf"), "\U0010ffff"))

    def ordered(self, now_s: float) -> Iterator[WaitingRequest]:
        """Requests as they are served: those that starve by the time that they have waited, then all by when they are
        due. To be read before the next change."""
        since_s, starving = self._starving_since(now_s), self._num_starving(now_s)
        for _, _, name in islice(self._by_since, starving):
            yield self._requests[name]
        for *_, name in self._by_due:
            request = self._requests[name]
            if not starving or request.beyond_share or request.since_s > since_s:
                yield request


def _since(request: WaitingRequest) -> tuple[float, float, str]:
    return request.since_s, request.arrival_s, request.request_id
