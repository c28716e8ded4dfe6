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
        """Room for a long request of that many tokens, or for none."""
        degree = view.degree_for(num_tokens) if num_tokens else None
        return cls(view, num_tokens if degree else 0, degree or view.base_degree)

    def kept_from(self, room: Room, num_tokens: int) -> frozenset[int]:
        """Devices of which that many tokens should not be given away: no group would have room for the request then."""
        if not self.num_tokens:
            return frozenset()
        enough = [(devices, free) for devices, free in self._frees(room).items() if free >= self.num_tokens]
        if len(enough) != 1 or enough[0][1] - num_tokens >= self.num_tokens:
            return frozenset()
        return frozenset(enough[0][0])

    def _frees(self, room: Room) -> dict[tuple[int, ...], int]:
        """Free tokens of the groups that the request could go to: instances that hold it, once their long requests are
        done, or else instances to be merged."""
        view = self.view
        steady = [i for i in view.instances if i.transition_to is None and not i.draining]
        merged = [i for i in steady if i.capacity_tokens >= self.num_tokens]
        if merged:
            return {i.devices: room.free(i) + freed_by_long(view, room, i) for i in merged}
        frees = {}
        for devices in view.groups(self.degree):
            members = view.instances_on(devices)
            if all(i in steady for i in members) and sum(i.degree for i in members) == self.degree:
                frees[devices] = room.merged_free(members, self.degree)
        return frees


def freed_by_long(view: ClusterView, room: Room, instance: InstanceView) -> int:
    """Tokens that an instance has more once its long requests are done."""
    return sum(room.freed_by(r) for r in instance.running if view.is_long(r.max_total_tokens))
