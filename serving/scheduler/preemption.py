"""Making room for a request of a lower rank: of higher priority, or within its client's share."""

from serving.scheduler.actions import Preempt
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest


def rank(request: WaitingRequest | RunningRequest) -> tuple[bool, int]:
    """Requests may be preempted for those of a lower rank."""
    return request.beyond_share, request.priority


def preempt_for(
    request: WaitingRequest, view: ClusterView, room: Room, order: QueueOrder
) -> tuple[InstanceView, list[Preempt]] | None:
    """The instance where the fewest running requests must go so that `request` fits, and those; None if nowhere.

    They rank behind it, and wait behind it afterwards, so that they don't take back what they gave up.
    """
    key = order.key(request, view.now_s)
    found: list[tuple[int, int, InstanceView, list[Preempt]]] = []
    for instance in room.open:
        if instance.capacity_tokens < request.max_total_tokens:
            continue
        free, victims = room.free(instance), []
        lower = [r for r in instance.running if rank(r) > rank(request) and order.key(r, view.now_s) > key]
        for running in sorted(lower, key=lambda r: order.key(r, view.now_s), reverse=True):
            if victims and free >= room.need(request):
                break
            free += room.freed_by(running)
            victims.append(running)
        if victims and free >= room.need(request):
            preempts = [Preempt(v.request_id, reason=_reason(request, v)) for v in victims]
            found.append((len(victims), instance.id, instance, preempts))
    if not found:
        return None
    _, _, instance, preempts = min(found, key=lambda item: item[:2])
    return instance, preempts


def _reason(request: WaitingRequest, victim: RunningRequest) -> str:
    if victim.beyond_share and not request.beyond_share:
        return f"it is beyond its client's share, and {request.request_id} of another client is not"
    return f"priority {request.priority} of {request.request_id} is ahead of its own, {victim.priority}"
