"""Making room for a request of a lower rank: of higher priority, or within its client's share."""

from bisect import bisect_left
from functools import cached_property
from operator import attrgetter

from serving.scheduler.actions import Preempt
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest

_ENOUGH = 16
"""Instances that would do, of which the one is taken where the fewest must go."""
_MOST_TRIED = 4
"""Requests for which a decision looks for others to preempt: each goes through the instances."""


class Preemptions:
    """Who makes room for whom, in one decision."""

    def __init__(self, view: ClusterView, room: Room, order: QueueOrder):
        self._view, self._room, self._order = view, room, order
        self._tried = 0
        self._in_vain: list[tuple[tuple[bool, int], int, int]] = []
        """Rank, tokens now and at most of requests for which no others could be preempted."""

    def find(self, request: WaitingRequest) -> tuple[InstanceView, list[Preempt]] | None:
        """The instance where the fewest running requests must go so that `request` fits, and those; None if nowhere.

        They rank behind it, and wait behind it afterwards, so that they don't take back what they gave up.
        """
        rank, need, most = request.rank, self._room.need(request), request.max_total_tokens
        if rank >= self._last_rank or self._tried >= _MOST_TRIED:
            return None
        if any(other[0] <= rank and other[1] <= need and other[2] <= most for other in self._in_vain):
            return None  # one before it, for which less was to be found, found nothing
        self._tried += 1
        if (found := self._search(request, need)) is None:
            self._in_vain.append((rank, need, most))
            return None
        instance, victims = found
        return instance, [Preempt(victim.request_id, reason=_reason(request, victim)) for victim in victims]

    @cached_property
    def _last_rank(self) -> tuple[bool, int]:
        """The highest rank of all requests that run, which are preempted first."""
        return max(map(attrgetter("last_rank"), self._view.instances), default=(False, 0))

    def _search(self, request: WaitingRequest, need: int) -> tuple[InstanceView, list[RunningRequest]] | None:
        room, order, key = self._room, self._order, self._order.key(request, self._view.now_s)
        found: tuple[InstanceView, list[RunningRequest]] | None = None
        seen = 0
        for instance in room.open:
            if instance.capacity_tokens < request.max_total_tokens or instance.last_rank <= request.rank:
                continue
            keys, freed, requests = room.facts.victims(instance, request.rank, order)
            count = bisect_left(freed, max(need - room.free(instance), 1)) + 1
            if count > len(keys) or keys[count - 1] <= key:
                continue
            seen += 1
            if found is None or count < len(found[1]):
                found = instance, requests[:count]
            if count == 1 or seen == _ENOUGH:
                break  # there are none with fewer, or looking further takes too long
        return found


def _reason(request: WaitingRequest, victim: RunningRequest) -> str:
    if victim.beyond_share and not request.beyond_share:
        return f"it is beyond its client's share, and {request.request_id} of another client is not"
    return f"priority {request.priority} of {request.request_id} is ahead of its own, {victim.priority}"
