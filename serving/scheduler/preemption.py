"""Making room for a request of higher priority."""

from serving.scheduler.actions import Preempt
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


def preempt_for(
    request: WaitingRequest, view: ClusterView, room: Room, order: QueueOrder
) -> tuple[InstanceView, list[Preempt]] | None:
    """The instance where the fewest running requests must go so that `request` fits, and those; None if nowhere.

    They have a lower priority, and wait behind it afterwards, so that they don't take back what they gave up.
    """
    key = order.key(request, view.now_s)
    found: list[tuple[int, int, InstanceView, list[Preempt]]] = []
    for instance in room.open:
        if instance.capacity_tokens < request.max_total_tokens:
            continue
        free, victims = room.free(instance), []
        lower = [r for r in instance.running if r.priority > request.priority and order.key(r, view.now_s) > key]
        for running in sorted(lower, key=lambda r: order.key(r, view.now_s), reverse=True):
            if victims and free >= room.need(request):
                break
            free += room.freed_by(running)
            victims.append(running)
        if victims and free >= room.need(request):
            why = f"priority {request.priority} of {request.request_id} is ahead of its own"
            preempts = [Preempt(v.request_id, reason=f"{why}, {v.priority}") for v in victims]
            found.append((len(victims), instance.id, instance, preempts))
    if not found:
        return None
    _, _, instance, preempts = min(found, key=lambda item: item[:2])
    return instance, preempts
