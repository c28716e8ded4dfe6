"""Room that is kept so that a scale-up, when the next long request asks for one, finds a place for that request."""

from collections.abc import Iterator

from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView


class Reserve:
    """One group of devices, merged already or yet to be, that could hold a request of some size.

    For one decision: free tokens only become fewer, so that groups are looked at until two are found that have enough.

    Args:
        num_tokens: size of the request; 0 keeps nothing.
    """

    def __init__(self, view: ClusterView, room: Room, num_tokens: int):
        degree = view.degree_for(num_tokens) if num_tokens else None
        self._view, self._room = view, room
        self._num_tokens, self._degree = num_tokens if degree else 0, degree or view.base_degree
        self._left = self._candidates()
        self._enough: list[tuple[InstanceView, ...]] = []

    def kept_from(self, num_tokens: int) -> frozenset[int]:
        """Devices of which that many tokens should not be given away: no group would have room for the request then."""
        if not self._num_tokens:
            return frozenset()
        self._enough = [group for group in self._enough if self._free(group) >= self._num_tokens]
        while len(self._enough) < 2 and (group := next(self._left, None)) is not None:
            if self._free(group) >= self._num_tokens:
                self._enough.append(group)
        if len(self._enough) != 1 or self._free(self._enough[0]) - num_tokens >= self._num_tokens:
            return frozenset()
        return frozenset(device for instance in self._enough[0] for device in instance.devices)

    def _candidates(self) -> Iterator[tuple[InstanceView, ...]]:
        """Instances that hold the request; where there is none, groups that would when merged."""
        view, room = self._view, self._room
        merged = [i for i in room.merged.values() if i.id not in room.unsteady]
        holding = [i for i in merged if i.capacity_tokens >= self._num_tokens]
        if holding:
            yield from ((instance,) for instance in holding)
            return
        for devices in view.groups(self._degree):
            members = room.members(devices)
            if sum(i.degree for i in members) == self._degree and not any(i.id in room.unsteady for i in members):
                yield members

    def _free(self, group: tuple[InstanceView, ...]) -> int:
        """Free tokens of a group once its long requests are done, or once it is merged."""
        if len(group) == 1 and group[0].capacity_tokens >= self._num_tokens:
            return self._room.free(group[0]) + self._room.facts.freed_by_long(group[0])
        return self._room.merged_free(group, self._degree)
