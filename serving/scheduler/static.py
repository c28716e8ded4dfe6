"""Policy that never merges or splits instances."""

from serving.scheduler.actions import Action, Dispatch
from serving.scheduler.admission import Admission
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView


class StaticPolicy:
    """Policy `static`: each request goes to the least-loaded instance with room, and instances never merge or split.

    A request that is too large for every instance is rejected. If a request finds no room, one instance is closed to
    later requests, so that they do not take the free tokens for which the request waits.
    """

    name = "static"

    def __init__(self, admission: Admission | None = None, reserved_growth: float = 0.0):
        self._admission, self._growth = admission or Admission(), reserved_growth

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution (`Policy.decide`)."""
        if not view.instances:
            return []
        largest = max(view.instances, key=lambda i: i.capacity_tokens)
        rejects, queue = self._admission.screen(
            view, largest.capacity_tokens, f"the largest instance, TP{largest.degree},"
        )
        actions: list[Action] = [*rejects]
        room = Room(view, self._growth)
        for request in queue:
            if not any(room.has_slot(instance) for instance in room.open):
                break
            if options := room.with_room(request):
                instance = min(options, key=lambda i: (room.load(i), i.id))
                reason = f"least loaded of {len(options)} with room: load {room.load(instance):.2f}"
                room.assign(instance, request)
                actions.append(Dispatch(request.request_id, instance.id, reason))
            else:
                room.reserve_for(request)
        return actions
