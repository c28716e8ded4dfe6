"""Paused requests: how long they may pause, and when they can resume.

A merge may pause the running requests of the merged instances (`ScaleUp.running`). The requests resume when the merged
instance splits.
"""

from collections.abc import Iterable
from dataclasses import replace

from serving.scheduler.actions import ScaleDown
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest


class PauseBudget:
    """Limit on how long the requests of a device pause.

    Each device has a counter in seconds. The counter goes up while requests of the device are paused, and down at other
    times. When the counter has reached `max_pause_s`, requests of the device must not pause until the counter is back
    at 0.
    """

    def __init__(self, max_pause_s: float):
        self._max_pause_s = max_pause_s
        self._debt_s: dict[int, float] = {}
        self._paused: frozenset[int] = frozenset()
        self._resting: set[int] = set()
        self._at_s = 0.0

    def update(self, now_s: float, paused: Iterable[int]) -> None:
        """Update the counters with the seconds since the last call.

        `paused` are the devices whose requests are paused from now on.
        """
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
        """Return whether the requests of at least one of these devices must not be paused now."""
        return not self._resting.isdisjoint(devices)


def misfits(view: ClusterView, instance: InstanceView) -> list[RunningRequest]:
    """Return the running requests of a merged instance that would find no room after a split to `paused_degree`.

    The instance must have paused requests, and the paused requests keep their room. The running requests are
    distributed as in the engine: the longest request first, each to the new instance with the most free tokens.
    """
    assert instance.paused_degree is not None, "some requests are paused"
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


def paused_victims(
    view: ClusterView, instance: InstanceView, request: WaitingRequest, need: int
) -> list[RunningRequest]:
    """Return the paused requests to preempt so that a waiting request finds `need` free tokens on a merged instance.

    Only paused requests with a higher `rank` (a lower priority) than the waiting request are preempted. The highest
    rank is preempted first, and among equal ranks the latest arrival. The instances before the merge must each get
    room for an equal share of the waiting and running requests. If this is impossible, the list is empty.
    """
    parts = len(instance.paused)
    used = sum(view.whole_pages(r.num_tokens) for r in instance.running)
    capacity = instance.capacity_tokens // parts
    victims: list[RunningRequest] = []
    for part in instance.paused:
        lacking = -(-(need + used) // parts) - capacity + sum(view.whole_pages(r.num_tokens) for r in part)
        for paused in sorted(part, key=lambda r: (r.rank, r.arrival_s), reverse=True):
            if lacking <= 0:
                break
            if paused.rank <= request.rank:
                return []
            victims.append(paused)
            lacking -= view.whole_pages(paused.num_tokens)
        if lacking > 0:
            return []
    return victims


def resumptions(view: ClusterView) -> list[ScaleDown]:
    """Return the actions that split merged instances so that their paused requests resume.

    The scheduler calls this for a policy that does not pause requests itself. An instance does not split if it is
    changing its degree, if its running requests do not fit beside its paused requests, or if the split was refused
    recently.
    """
    return [
        ScaleDown(i.devices, i.paused_degree, "requests are paused there, and this policy does not pause requests")
        for i in view.instances
        if i.paused_degree is not None
        and i.transition_to is None
        and (i.devices, i.paused_degree) not in view.refused
        and not misfits(view, i)
    ]


def without_paused(view: ClusterView) -> ClusterView:
    """Return a snapshot that marks instances with paused requests as draining, so that a policy avoids them."""
    if all(i.paused_degree is None for i in view.instances):
        return view
    instances = tuple(i if i.paused_degree is None else replace(i, draining=True) for i in view.instances)
    return replace(view, instances=instances)
