"""Merges for room in the KV cache: where requests wait for that, and not for devices."""

from collections.abc import Iterable

from serving.scheduler.actions import ScaleUp
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView

_MIN_GAIN = 0.1
"""Share of throughput that a merge has to gain by the estimate."""
_FULL = 0.7
"""Share of the cache in use from which on an instance is full; below it, what runs fits the base degree again."""
_LEFT_ALONE_S = 600.0
"""No merge is made for this long to a degree that has proved slower, and for twice as long each further time."""


class CacheRule:
    """Remembers since when requests have lacked room while instances had slots, and what was merged for that.

    Devices of a higher degree have fewer copies of the weights, so that more requests run at once. Where steps take as
    long, these are more tokens a second. Whether they do is seen once such an instance runs: one that is slower, for
    each of its devices, than instances of the base degree is split again, and the last group does not merge before one
    has proved to be as fast. None does where instances tell no times.

    Args:
        after_s: how long requests have to lack room before instances merge; None: no matter how long.
        linger_s: merged instances stay for this long after the last time.
    """

    def __init__(self, after_s: float | None, linger_s: float):
        self._after_s, self._linger_s = after_s, linger_s
        self._since_s: float | None = None
        self._lacked_s = float("-inf")
        self._made: set[tuple[int, ...]] = set()
        """Devices that were merged."""
        self._base_rate = 0.0
        """That of the base degree when a group last merged."""
        self._slower_until_s: dict[int, float] = {}
        self._left_alone_s: dict[int, float] = {}
        """For how long degrees are left alone the next time that they prove slower."""
        self._proved: set[int] = set()
        """Degrees that were seen to generate as much on each device as the base degree."""

    def update(self, view: ClusterView, lacks_room: bool) -> None:
        """Take note of a snapshot. `lacks_room`: a short request found no room when decisions were last made, although
        most instances have slots."""
        if self._after_s is None:
            return
        if lacks_room:
            self._since_s = view.now_s if self._since_s is None else self._since_s
            self._lacked_s = view.now_s
        else:
            self._since_s = None
        if self._made:
            steady = [i for i in view.instances if i.transition_to is None]
            present = {i.devices for i in steady}
            changing = {device for i in view.instances if i.transition_to is not None for device in i.devices}
            self._made = {it for it in self._made if it in present or not changing.isdisjoint(it)}
            self._compare(view, steady)

    @staticmethod
    def _rates(view: ClusterView, instances: Iterable[InstanceView], *, full: bool = True) -> dict[int, list[float]]:
        """Requests by seconds of a step, for each device, by degree: of instances that are full and have no long
        requests, which are as fast as they can be, or of all."""
        rates: dict[int, list[float]] = {}
        for instance in instances:
            is_full = instance.used_tokens >= _FULL * instance.capacity_tokens or not instance.free_slots
            if instance.step_s and (not full or (is_full and not view.has_long(instance))):
                rate = len(instance.running) / instance.step_s / instance.degree
                rates.setdefault(instance.degree, []).append(rate)
        return rates

    def _compare(self, view: ClusterView, steady: list[InstanceView]) -> None:
        """See which degrees are slower than the base degree, while requests lack room. Where all have merged, that is
        as fast as it was when they did."""
        if self._since_s is None:
            return
        rates = self._rates(view, steady)
        base = rates.pop(view.base_degree, [])
        base_rate = sum(base) / len(base) if base else self._base_rate
        for degree, found in self._rates(view, steady, full=False).items():
            if degree > view.base_degree and max(found) >= base_rate:
                self._proved.add(degree)
        for degree, measured in rates.items():
            if max(measured) < base_rate and not self._is_slower(view, degree):
                left_alone_s = self._left_alone_s.get(degree, _LEFT_ALONE_S)
                self._slower_until_s[degree] = view.now_s + left_alone_s
                self._left_alone_s[degree] = 2 * left_alone_s
                self._proved.discard(degree)

    def keeps(self, view: ClusterView, instance: InstanceView) -> bool:
        """An instance that was merged for its room stays: without it there would be too little."""
        if instance.devices not in self._made or self._is_slower(view, instance.degree):
            return False
        if view.now_s - self._lacked_s < self._linger_s:
            return True
        room = view.limits[view.base_degree].capacity_tokens * (view.num_devices // view.base_degree)
        return sum(i.used_tokens for i in view.instances) > _FULL * room

    def _is_slower(self, view: ClusterView, degree: int) -> bool:
        return view.now_s < self._slower_until_s.get(degree, float("-inf"))

    def merge(self, view: ClusterView, room: Room, busy: set[int]) -> ScaleUp | None:
        """Merge a group once requests have lacked room for long enough, one at a time. Closes its instances.

        Args:
            busy: instances that no merge may take.
        """
        if self._since_s is None or self._after_s is None or view.now_s - self._since_s < self._after_s:
            return None
        if room.unsteady or (degree := self._best(view)) is None:
            return None
        if (base := self._rates(view, view.instances).get(view.base_degree)) is None:
            return None
        groups = []
        for devices in view.groups(degree):
            members = room.members(devices)
            fresh = all(i.degree == view.base_degree and i.id not in busy for i in members)
            if fresh and len(members) > 1 and (devices, degree) not in view.refused:
                groups.append((-room.merged_free(members, degree), devices, members))
        on_trial = self._made and degree not in self._proved
        if len(groups) < (2 if on_trial else 1):
            return None
        _, devices, members = min(groups, key=lambda group: group[:2])
        for instance in members:
            room.close(instance)
        self._made.add(devices)
        self._base_rate = sum(base) / len(base)
        waited_s, self._since_s = view.now_s - self._since_s, view.now_s
        return ScaleUp(devices, degree, f"requests have lacked room in the KV cache for {waited_s:.1f} s, not slots")

    def _best(self, view: ClusterView) -> int | None:
        """The degree with most throughput by the requests that it has room for; None where it is the base degree."""
        running = sum(len(i.running) for i in view.instances)
        if not running:
            return None
        size = max(sum(i.used_tokens for i in view.instances) / running, 1.0)
        base = view.limits[view.base_degree]

        def requests_per_device(capacity_tokens: int, max_requests: int, degree: int) -> float:
            return min(max_requests, capacity_tokens / size) / degree

        least = (1 + _MIN_GAIN) * requests_per_device(base.capacity_tokens, base.max_requests, base.degree)
        gains = [
            (gain, -limits.degree)
            for limits in view.degrees
            if limits.degree > base.degree
            and limits.ready
            and not self._is_slower(view, limits.degree)
            and (gain := requests_per_device(limits.capacity_tokens, limits.max_requests, limits.degree)) > least
        ]
        return -max(gains)[1] if gains else None
