"""Paused requests: for how long, and what must go before they go on."""

from collections.abc import Iterable
from dataclasses import replace

from serving.scheduler.actions import ScaleDown
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest


class PauseBudget:
    """Seconds for which the requests of each device have paused, less those for which they have not since.

    A device whose budget is used up rests until the difference is nothing: its requests have at least an equal share of
    the time beyond `max_pause_s`.
    """

    def __init__(self, max_pause_s: float):
        self._max_pause_s = max_pause_s
        self._debt_s: dict[int, float] = {}
        self._paused: frozenset[int] = frozenset()
        self._resting: set[int] = set()
        self._at_s = 0.0

    def update(self, now_s: float, paused: Iterable[int]) -> None:
        """Take in the devices that have paused requests now."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        for device in [*self._debt_s.keys() | self._paused]:
            debt_s = self._debt_s.get(device, 0.0) + (passed_s if device in self._paused else -passed_s)
            self._debt_s[device] = debt_s
            if debt_s >= self._max_pause_s:
                self._resting.add(device)
            if debt_s <= 0:
                del self._debt_s[device]
                self._resting.discard(device)
        self._paused = frozenset(paused)

    def used_up(self, devices: Iterable[int]) -> bool:
        """The requests of some of these devices must not pause now."""
        return not self._resting.isdisjoint(devices)


def misfits(view: ClusterView, instance: InstanceView) -> list[RunningRequest]:
    """Requests of an instance that find no room beside those that are paused on its devices, when these go on; dealt as
    the engine does, longest first to where most is free."""
    assert instance.paused_degree is not None, "some are paused"
    limits, parts = view.limits[instance.paused_degree], instance.paused
    capacity = instance.capacity_tokens // len(parts)
    free = [capacity - sum(view.whole_pages(r.num_tokens) for r in part) for part in parts]
    slots = [limits.max_requests - len(part) for part in parts]
    found = []
    for request in sorted(instance.running, key=lambda r: (-r.num_tokens, r.request_id)):
        place = max(range(len(parts)), key=lambda index: (slots[index] > 0, free[index], -index))
        needed = view.whole_pages(min(request.num_tokens + view.page_size, request.max_total_tokens))
        if request.max_total_tokens > capacity or slots[place] <= 0 or free[place] < needed:
            found.append(request)
            continue
        free[place] -= needed
        slots[place] -= 1
    return found


def in_the_way(view: ClusterView, instance: InstanceView, request: WaitingRequest, need: int) -> list[RunningRequest]:
    """Paused requests behind one that needs that many tokens of their instance, which would have room without them: of
    each device the last ones. None where that would not do."""
    parts = len(instance.paused)
    used = sum(view.whole_pages(r.num_tokens) for r in instance.running)
    capacity = instance.capacity_tokens // parts
    going: list[RunningRequest] = []
    for part in instance.paused:
        lacking = -(-(need + used) // parts) - capacity + sum(view.whole_pages(r.num_tokens) for r in part)
        for paused in sorted(part, key=lambda r: (r.rank, r.arrival_s), reverse=True):
            if lacking <= 0:
                break
            if paused.rank <= request.rank:
                return []
            going.append(paused)
            lacking -= view.whole_pages(paused.num_tokens)
        if lacking > 0:
            return []
    return going


def resumptions(view: ClusterView) -> list[ScaleDown]:
    """For a policy that has no use for pauses: let requests go on that another one, or an operator, had pause."""
    return [
        ScaleDown(i.devices, i.paused_degree, "requests are paused there, and this policy has none pause")
        for i in view.instances
        if i.paused_degree is not None
        and i.transition_to is None
        and (i.devices, i.paused_degree) not in view.refused
        and not misfits(view, i)
    ]


def without_paused(view: ClusterView) -> ClusterView:
    """The same, with groups that have paused requests draining."""
    if not [i for i in view.instances if i.paused_degree is not None]:  # a list is faster than `any`, for a thousand
        return view
    instances = tuple(i if i.paused_degree is None else replace(i, draining=True) for i in view.instances)
    return replace(view, instances=instances)
