"""Preemption of running requests for a waiting request with a higher priority (a lower `WaitingRequest.rank`)."""

from bisect import bisect_left
from functools import cached_property
from itertools import accumulate

from serving.scheduler.actions import Preempt
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest

_MOST_SEARCHES = 4
"""Maximum number of waiting requests for which one decision searches all instances."""


class Preemptions:
    """Search for running requests to preempt, during one decision of a policy."""

    def __init__(self, view: ClusterView, room: Room, order: QueueOrder):
        self._view, self._room, self._order = view, room, order
        self._num_searches = 0
        self._failed: list[tuple[tuple[bool, int], int, int]] = []
        """Rank, needed tokens and maximum length of each request for which the search found nothing."""

    def find(self, request: WaitingRequest) -> tuple[InstanceView, list[Preempt]] | None:
        """Return `(instance, preemptions)`: the instance on which the fewest preemptions make room for `request`.

        Return None if no instance can make room, or if this decision has already made `_MOST_SEARCHES` searches.

        A running request can be preempted if it has a higher rank (a lower priority) than the waiting request, comes
        after it in the queue order, and does not starve (`QueueOrder.starves`).
        """
        rank, need, most = request.rank, self._room.need(request), request.max_total_tokens
        if rank >= self._highest_rank or self._num_searches >= _MOST_SEARCHES:
            return None
        if any(other[0] <= rank and other[1] <= need and other[2] <= most for other in self._failed):
            return None  # an easier search has failed
        self._num_searches += 1
        options = [(i, found) for i in self._room.open if (found := self._victims(i, request, need))]
        if not options:
            self._failed.append((rank, need, most))
            return None
        instance, victims = min(options, key=lambda option: len(option[1]))
        return instance, [Preempt(victim.request_id, reason=_reason(request, victim)) for victim in victims]

    @cached_property
    def _highest_rank(self) -> tuple[bool, int]:
        return max((r.rank for i in self._view.instances for r in i.running), default=(False, -(2**31)))

    def _victims(self, instance: InstanceView, request: WaitingRequest, need: int) -> list[RunningRequest]:
        """Return the fewest running requests of an instance whose preemption makes room for a request.

        If preemption cannot make room, return an empty list. Requests at the end of the queue order are preempted
        first. `need` is the number of tokens that the waiting request needs.
        """
        if instance.capacity_tokens < request.max_total_tokens:
            return []
        room, order, now_s = self._room, self._order, self._view.now_s
        lower = [r for r in instance.running if r.rank > request.rank and not order.starves(r, now_s)]
        lower.sort(key=order.due_key, reverse=True)
        freed = list(accumulate(room.freed_by(running) for running in lower))
        count = bisect_left(freed, max(need - room.free(instance), 1)) + 1
        if count > len(lower) or order.due_key(lower[count - 1]) <= order.key(request, now_s):
            return []
        return lower[:count]


def _reason(request: WaitingRequest, victim: RunningRequest) -> str:
    if victim.beyond_share and not request.beyond_share:
        return f"it is beyond its client's share, and {request.request_id} of another client is not"
    return f"priority {request.priority} of {request.request_id} is ahead of its own, {victim.priority}"
