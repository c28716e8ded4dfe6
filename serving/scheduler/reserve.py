"""Capacity that stays free for the next long request."""

from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView


class RecentLargest:
    """Size of the largest recent long request.

    Args:
        memory_s: seconds for which a size is remembered.
    """

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._seen_s, self._tokens = 0.0, 0

    def update(self, view: ClusterView) -> int:
        """Include the long requests of a snapshot. Return the largest recent size in tokens; 0 if there was none."""
        running = [i.largest for i in view.instances if i.degree > view.base_degree and view.has_long(i)]
        waiting = view.largest_waiting(view.longest.capacity_tokens)
        tokens = max([waiting if view.is_long(waiting) else 0, *running])
        if tokens >= self._tokens or view.now_s - self._seen_s > self._memory_s:
            self._seen_s, self._tokens = view.now_s, tokens
        return self._tokens


class Reserve:
    """Groups of devices that could hold a long request of some size, as one instance now or after a merge.

    Args:
        num_tokens: size of the long request. 0: there is nothing to reserve.
    """

    def __init__(self, view: ClusterView, room: Room, num_tokens: int):
        degree = view.degree_for(num_tokens) if num_tokens else None
        self._room, self._num_tokens = room, num_tokens
        self._degree = degree or view.base_degree
        self._groups = self._candidates(view) if degree else []

    def kept_from(self, num_tokens: int) -> frozenset[int]:
        """Return the devices on which no other request of `num_tokens` should start; often empty.

        If only one group has room for the long request, and the other request would take this room, these are the
        devices of that group.
        """
        enough = [group for group in self._groups if self._free(group) >= self._num_tokens]
        if len(enough) != 1 or self._free(enough[0]) - num_tokens >= self._num_tokens:
            return frozenset()
        return frozenset(device for instance in enough[0] for device in instance.devices)

    def _candidates(self, view: ClusterView) -> list[tuple[InstanceView, ...]]:
        """Return the instances that can hold the long request. If there is none, return the groups that could hold it
        after a merge."""
        room = self._room
        holding = [i for i in room.merged if room.is_steady(i) and i.capacity_tokens >= self._num_tokens]
        if holding:
            return [(instance,) for instance in holding]
        groups = [room.members(devices) for devices in view.groups(self._degree)]
        return [
            members
            for members in groups
            if sum(i.degree for i in members) == self._degree and all(room.is_steady(i) for i in members)
        ]

    def _free(self, group: tuple[InstanceView, ...]) -> int:
        """Return the future free tokens of a group: of a large enough instance after its long requests have ended, of
        several instances after their merge."""
        if len(group) == 1 and group[0].capacity_tokens >= self._num_tokens:
            return self._room.free(group[0]) + self._room.freed_by_long(group[0])
        return self._room.merged_free(group, self._degree)
