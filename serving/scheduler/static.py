"""Fixed degrees."""

from serving.scheduler.actions import Action, Dispatch
from serving.scheduler.admission import Admission
from serving.scheduler.room import KeptRoom
from serving.scheduler.view import ClusterView


class StaticPolicy:
    """Gives each request to the least-loaded instance with room, and never changes a degree. A request that no present
    instance could hold is turned away. No one overtakes: a request that finds no room keeps one instance for itself.
    """

    name = "static"

    def __init__(self, admission: Admission | None = None, reserved_growth: float = 0.0):
        self._admission, self._room = admission or Admission(), KeptRoom(reserved_growth)
        self._index = self._admission.index()

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        if not view.instances:
            return []
        largest = max(view.instances, key=lambda i: i.capacity_tokens)
        holder = f"the largest instance, TP{largest.degree},"
        self._index.update(view.queue)
        rejects = self._admission.turn_away(view, self._index, largest.capacity_tokens, holder)
        gone = {reject.request_id for reject in rejects}
        actions: list[Action] = [*rejects]
        room = self._room.of(view)
        for request in self._index.ordered(view.now_s):
            if request.request_id in gone:
                continue
            if not room.any_open:
                break
            if options := room.with_room(request):
                instance = min(options, key=lambda i: (room.load(i), i.id))
                reason = f"least loaded of {len(options)} with room: load {room.load(instance):.2f}"
                room.give(instance, request)
                actions.append(Dispatch(request.request_id, instance.id, reason))
            else:
                room.keep_for(request)
        return actions
