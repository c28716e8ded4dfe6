"""AMOEBA's policy as its paper describes it (section 3.3), for comparison with the policy `amoeba`.

Details that the paper omits come from the Gyges paper (section 5, Algorithms 1 and 2). docs/scheduling.md lists the
differences from `amoeba`.
"""

from dataclasses import dataclass

from serving.scheduler.actions import Action, Dispatch, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.reserve import RecentLargest, Reserve
from serving.scheduler.room import Room
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

_TOKENS_PER_S = {1: 448.0, 2: 670.0, 4: 767.0}
"""Tokens per second of one full instance, by degree (Gyges, Table 1). Used until steps of a degree are measured."""


@dataclass(frozen=True)
class PaperConfig:
    """Settings of the policy `amoeba_paper`. The AMOEBA paper gives no values for them."""

    scale_up_under_load: bool = True
    """Whether instances also merge for a request that fits an empty instance but finds no room now.

    The paper names "input length and current load" as reasons to merge.
    """
    reserve_memory_s: float = 600.0
    """Seconds for which room is kept for a long request as large as the largest recent one."""
    reserved_growth: float = 0.0
    """Setting `reserved_growth` of `AmoebaConfig`."""
    lookahead: int = 32
    """Setting `lookahead` of `AmoebaConfig`."""


class AmoebaPaperPolicy:
    """Policy `amoeba_paper`: AMOEBA's policy as published (docs/scheduling.md).

    Between decisions, the policy remembers which devices merge for each waiting request, and the size of the largest
    recent long request.
    """

    name = "amoeba_paper"

    def __init__(self, config: PaperConfig | None = None, admission: Admission | None = None):
        self.config, self.admission = config or PaperConfig(), admission or Admission()
        self._splits = SplitRule(SplitConfig(free_share=0.5, linger_s=0.0, partial=False))
        self._largest = RecentLargest(self.config.reserve_memory_s)
        self._scaling: dict[str, tuple[int, ...]] = {}
        """Devices that are being merged for a waiting request, by request id. Each merge doubles their degree."""

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution (`Policy.decide`)."""
        longest = view.longest
        rejects, queue = self.admission.screen(view, longest.capacity_tokens, f"a TP{longest.degree} instance")
        room = Room(view, self.config.reserved_growth)
        present = {request.request_id for request in queue}
        self._scaling = {name: devices for name, devices in self._scaling.items() if name in present}
        scaling_devices = {device for devices in self._scaling.values() for device in devices}
        leaving = self._splits.leaving(view, room, pressed=False)
        splits = self._splits.split(view, room, [it for it in leaving if scaling_devices.isdisjoint(it[0].devices)])
        actions: list[Action] = [*rejects, *splits]
        reserve = Reserve(view, room, self._largest.update(view))
        started, num_unplaced = set(self._scaling), 0
        for request in queue:
            # Beyond the lookahead, only merges that have started continue.
            if num_unplaced >= self.config.lookahead and request.request_id not in started:
                continue
            placed = self._place(view, room, reserve, request)
            actions += placed
            num_unplaced += not any(isinstance(action, Dispatch) for action in placed)
        return actions

    def _place(self, view: ClusterView, room: Room, reserve: Reserve, request: WaitingRequest) -> list[Action]:
        """Return the actions for a waiting request.

        - If an instance has room, dispatch the request.
        - If no instance has room, merge instances. If `scale_up_under_load` is off, do this for long requests only, and
          reserve an instance for a short request.
        """
        if (chosen := self._candidate(view, room, reserve, request)) is not None:
            self._scaling.pop(request.request_id, None)
            reason = f"the least loaded that has room: TP{chosen.degree}, load {room.load(chosen):.2f}"
            room.assign(chosen, request)
            return [Dispatch(request.request_id, chosen.id, reason)]
        if self.config.scale_up_under_load or view.is_long(request.max_total_tokens):
            return [*self._scale_up(view, room, request)]
        room.reserve_for(request)
        return []

    def _candidate(
        self, view: ClusterView, room: Room, reserve: Reserve, request: WaitingRequest
    ) -> InstanceView | None:
        """Return the best instance with room for a request, or None if no instance has room.

        A short request gets the least-loaded instance that is not reserved for a long request. A long request gets the
        least-loaded instance of the highest tensor-parallel degree.
        """
        options, long = room.with_room(request), view.is_long(request.max_total_tokens)
        if options and not long:
            kept = reserve.kept_from(room.need(request))
            options = [i for i in options if view.has_long(i) or kept.isdisjoint(i.devices)]
        return min(options, key=lambda i: (-i.degree if long else 0, room.load(i), i.id), default=None)

    def _scale_up(self, view: ClusterView, room: Room, request: WaitingRequest) -> list[ScaleUp]:
        """Return the next actions that merge a group of instances for a request.

        The group becomes one instance in several decisions. Each decision doubles the lowest tensor-parallel degree in
        the group: four TP1 instances become two TP2 instances, and then one TP4 instance.

        If no group can merge, the list is empty. If a group can merge, it is closed to new requests, so that running
        requests end and free tokens. The list stays empty until the merged group would have room for the request. The
        list is also empty while a merge of the group is in progress.
        """
        devices = self._scaling.get(request.request_id)
        if devices is None or (merged := _whole_group(room, devices)) is None:
            self._scaling.pop(request.request_id, None)
            if (devices := self._best_group(view, room, request)) is None:
                return []
            self._scaling[request.request_id] = devices
            merged = room.members(devices)
        free = room.merged_free(merged, len(devices))
        for instance in merged:
            room.close(instance)
        changing = any(i.transition_to is not None for i in merged)
        if len(merged) == 1 or changing or free < room.need(request):
            return []
        lowest = min([i.degree for i in merged])
        pairs = [tuple(range(first, first + 2 * lowest)) for first in range(devices[0], devices[-1] + 1, 2 * lowest)]
        pairs = [pair for pair in pairs if (pair, 2 * lowest) not in view.refused]
        pairs = [pair for pair in pairs if all(i.degree == lowest for i in room.members(pair))]
        if not pairs:
            return []
        gain = _relative_performance(view, merged, len(devices))
        reason = (
            f"no available instance can serve {request.request_id} with {request.prompt_tokens} tokens; {gain:.0%} of "
            f"the group's tokens/s are expected at TP{len(devices)}"
        )
        return [ScaleUp(pair, 2 * lowest, reason) for pair in pairs]

    def _best_group(self, view: ClusterView, room: Room, request: WaitingRequest) -> tuple[int, ...] | None:
        """Return the devices of the best group to merge for a request, or None if no group can merge.

        The best group has room for the request, at the lowest possible tensor-parallel degree. If no group has room,
        the best group lacks the fewest tokens. Among equal groups, the group with the highest expected speed after the
        merge is best, and then the group with the lowest load.
        """
        taken = {device for devices in self._scaling.values() for device in devices}
        need = room.need(request)
        best: tuple[int, float, float, tuple[int, ...]] | None = None
        for limits in view.degrees:
            if limits.degree <= view.base_degree or limits.capacity_tokens < request.max_total_tokens:
                continue
            for devices in view.groups(limits.degree):
                members = room.parts(devices)
                if members is None or not taken.isdisjoint(devices):
                    continue
                if not all(room.is_open(i) and (devices, 2 * i.degree) not in view.refused for i in members):
                    continue
                lacks = max(need - room.merged_free(members, limits.degree), 0)
                load = sum([room.load(i) for i in members]) / len(members)
                rank = lacks, -_relative_performance(view, members, limits.degree), load, devices
                if best is None or rank < best:
                    best = rank
            if best is not None and best[0] == 0:
                break
        return None if best is None else best[3]


def _whole_group(room: Room, devices: tuple[int, ...]) -> tuple[InstanceView, ...] | None:
    """Return the instances on `devices`.

    Return None if the instances do not cover exactly these devices, or if an instance is draining.
    """
    members = room.members(devices)
    whole = sum([len(i.devices) for i in members]) == len(devices)
    return members if whole and not any(i.draining for i in members) else None


def _relative_performance(view: ClusterView, members: tuple[InstanceView, ...], degree: int) -> float:
    """Estimate the factor by which the tokens per second of a group change if it merges to `degree`.

    If no request runs, the result is 1. The estimate uses measured decode steps. For degrees that were not measured, it
    uses Table 1 of the Gyges paper (section 5).
    """
    counts = [len(i.running) for i in members]
    if not any(counts):
        return 1.0  # nothing runs that could become slower
    now_s = [step_s for i in members if (step_s := view.timing.step_s(i.degree))]
    then_s = view.timing.step_s(degree)
    if not then_s or len(now_s) < len(members):
        return _TOKENS_PER_S.get(degree, 1.0) / sum([_TOKENS_PER_S.get(i.degree, 1.0) for i in members])
    if len(set(now_s)) == 1:  # exact, so that groups with different loads compare equal
        return now_s[0] / then_s
    return sum(counts) / then_s / sum(count / step_s for count, step_s in zip(counts, now_s, strict=True))
