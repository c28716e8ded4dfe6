"""Room that is kept so that a scale-up, when the next long request asks for one, finds a place for that request."""

from dataclasses import dataclass

from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView


@dataclass(frozen=True)
class Reserve:
    """One group of devices, merged already or yet to be, that could hold a request of some size.

    It is a preference: a short request that finds room nowhere else takes it.
    """

    view: ClusterView
    num_tokens: int
    """Size of the request; 0 keeps nothing."""
    degree: int

    @classmethod
    def for_size(cls, view: ClusterView, num_tokens: int) -> "Reserve":
        """Room for a long request of so many tokens, or for none."""
        degree = view.degree_for(num_tokens) if num_tokens else None
        return cls(view, num_tokens if degree else 0, degree or view.base_degree)

    def broken_by(self, room: Room, instance: InstanceView, num_tokens: int) -> bool:
        """Giving so many tokens of an instance away would leave no group with room for the reserved request."""
        if not self.num_tokens:
            return False
        frees = self._frees(room)
        enough = [devices for devices, free in frees.items() if free >= self.num_tokens]
        if len(enough) != 1 or set(enough[0]).isdisjoint(instance.devices):
            return False
        return frees[enough[0]] - num_tokens < self.num_tokens

    def _frees(self, room: Room) -> dict[tuple[int, ...], int]:
        """Free tokens of the groups that the request could go to: instances that hold it, once their long requests are
        done, or else instances to be merged."""
        view = self.view
        steady = [i for i in view.instances if i.transition_to is None and not i.draining]
        merged = [i for i in steady if i.capacity_tokens >= self.num_tokens]
        if merged:
            return {i.devices: room.free(i) + self._freed_by_long(room, i) for i in merged}
        frees = {}
        for devices in view.groups(self.degree):
            members = view.instances_on(devices)
            if all(i in steady for i in members) and sum(i.degree for i in members) == self.degree:
                frees[devices] = room.merged_free(members, self.degree)
        return frees

    def _freed_by_long(self, room: Room, instance: InstanceView) -> int:
        return sum(room.freed_by(r) for r in instance.running if self.view.is_long(r.max_total_tokens))
