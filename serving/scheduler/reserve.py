"""Reservation of room for the next long request."""

from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView


class RecentLargest:
    """Size of the largest long request in the last `memory_s` seconds.

    Args:
        memory_s: seconds for which a size is remembered.
    """

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._seen_s, self._tokens = 0.0, 0

    def update(self, view: ClusterView) -> int:
        """Record the long requests of a snapshot. Return the size of the largest recent long request in tokens.

        The result is 0 if there was no long request.
        """
        running = [i.largest for i in view.instances if i.degree > view.base_degree and view.has_long(i)]
        waiting = view.largest_waiting(view.longest.capacity_tokens)
        tokens = max([waiting if view.is_long(waiting) else 0, *running])
        if tokens >= self._tokens or view.now_s - self._seen_s > self._memory_s:
            self._seen_s, self._tokens = view.now_s, tokens
        return self._tokens


class Reserve:
    """Room that a policy keeps free for a long request of `num_tokens` tokens.

    The room is on one merged instance that can hold the request, or on a group of instances that could merge for it.

    Args:
        num_tokens: size of the long request. 0: nothing is reserved.
    """

    def __init__(self, view: ClusterView, room: Room, num_tokens: int):
        degree = view.degree_for(num_tokens) if num_tokens else None
        self._room, self._num_tokens = room, num_tokens
        self._degree = degree or view.base_degree
        self._groups = self._candidates(view) if degree else []

    def kept_from(self, num_tokens: int) -> frozenset[int]:
        """Return the devices that another request should not use, because the long request needs them.

        `num_tokens` is the number of tokens that the other request needs. If only one group of instances has room for
        the long request, and the other request would take this room, return the devices of the group. In all other
        cases, the result is empty.
        """
        if not self._groups:
            return frozenset()
        enough = [group for group in self._groups if self._free(group) >= self._num_tokens]
        if len(enough) != 1 or self._free(enough[0]) - num_tokens >= self._num_tokens:
            return frozenset()
        return frozenset(device for instance in enough[0] for device in instance.devices)

    def _candidates(self, view: ClusterView) -> list[tuple[InstanceView, ...]]:
        """Return the groups of instances that could hold the long request.

        If merged instances can hold the request, each of these instances is a group of its own. If no merged instance
        can hold it, the groups are instances that must merge first.
        """
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
        """Return the number of tokens that a group of instances will have free for the long request.

        For a merged instance that can hold the request, these are the free tokens after its running long requests have
        ended. For any other group, these are the free tokens after the merge.
        """
        if len(group) == 1 and group[0].capacity_tokens >= self._num_tokens:
            return self._room.free(group[0]) + self._room.freed_by_long(group[0])
        return self._room.merged_free(group, self._degree)
