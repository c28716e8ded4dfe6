"""Room that is free for a while: until a long request, which needs more, has its own."""

from serving.scheduler import estimates
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


class IdleRoom:
    """The room of one decision on instances where long requests wait for others to end. A request that will have ended
    by then itself may have it (backfilling)."""

    def __init__(self, view: ClusterView, room: Room):
        self._view, self._room = view, room
        self._idle: dict[int, tuple[InstanceView, float, int]] = {}
        self._most = 0
        """No instance here has more tokens: they only become fewer."""

    def add(self, instance: InstanceView, wait_s: float, set_aside: int) -> None:
        """That many tokens are set aside for a request that begins in that many seconds."""
        self._idle[instance.id] = instance, wait_s, set_aside
        self._most = max(self._most, self._room.free(instance) + set_aside)

    def find(self, request: WaitingRequest) -> tuple[InstanceView, str] | None:
        """An instance where a request ends in time, by what was measured, and why."""
        room, need = self._room, self._room.need(request)
        if need > self._most:
            return None
        times: dict[int, float | None] = {}  # by degree
        for instance, wait_s, set_aside in self._idle.values():
            if room.free(instance) + set_aside < need or instance.capacity_tokens < request.max_total_tokens:
                continue
            if (degree := instance.degree) not in times:
                times[degree] = estimates.run_s(self._view, degree, request)
            run_s = times[degree]
            if run_s is not None and run_s <= wait_s and room.takes(instance) and room.has_slot(instance):
                return instance, f"a long request waits there for {wait_s:.1f} s more, and it ends in {run_s:.1f} s"
        return None
