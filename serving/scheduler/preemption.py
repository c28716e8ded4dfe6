"""Making room for a request of a lower rank: of higher priority, or within its client's share."""

from bisect import bisect_left

from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest

_ENOUGH = 16
"""Instances that would do, of which the one is taken where the fewest must go."""


def preempt_for(
    request: WaitingRequest, view: ClusterView, room: Room, order: QueueOrder
) -> tuple[InstanceView, list[RunningRequest]] | None:
    """The instance where the fewest running requests must go so that `request` fits, and those; None if nowhere.

    They rank behind it, and wait behind it afterwards, so that they don't take back what they gave up.
    """
    key, need = order.key(request, view.now_s), room.need(request)
    found: tuple[InstanceView, list[RunningRequest]] | None = None
    seen = 0
    for instance in room.open:
        if instance.capacity_tokens < request.max_total_tokens or instance.last_rank <= request.rank:
            continue
        keys, freed, requests = room.victims(instance, request.rank, order)
        count = bisect_left(freed, max(need - room.free(instance), 1)) + 1
        if count > len(keys) or keys[count - 1] <= key:
            continue
        seen += 1
        if found is None or count < len(found[1]):
            found = instance, requests[:count]
        if count == 1 or seen == _ENOUGH:
            break  # there are none with fewer, or looking further takes too long
    return found


def reason_to_preempt(request: WaitingRequest, victim: RunningRequest) -> str:
    """Why `victim` makes room for `request`."""
    if victim.beyond_share and not request.beyond_share:
        return f"it is beyond its client's share, and {request.request_id} of another client is not"
    return f"priority {request.priority} of {request.request_id} is ahead of its own, {victim.priority}"
