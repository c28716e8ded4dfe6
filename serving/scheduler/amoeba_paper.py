"""AMOEBA's policy as its paper has it (3.3), with the details that only Gyges (5, Algorithms 1 and 2) gives.

A yardstick for `amoeba`, which departs from it where docs/scheduling.md says so.
"""

from dataclasses import dataclass

from serving.scheduler.actions import Action, Dispatch, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.reserve import Reserve
from serving.scheduler.room import KeptRoom, Room
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

_TOKENS_PER_S = {1: 448.0, 2: 670.0, 4: 767.0}
"""Tokens a second of one full instance, by degree (Gyges, Table 1). Their ratios stand in for unmeasured steps."""


@dataclass(frozen=True)
class PaperConfig:
    """What the paper leaves open, and how far a decision goes."""

    scale_up_under_load: bool = True
    """A request for which no instance has room scales up, as the text says ("input length and current load"). False:
    only one that no instance could hold were it empty."""
    reserve_memory_s: float = 600.0
    """Room is reserved for a long request as large as the largest that came within this time."""
    reserved_growth: float = 0.0
    """See `AmoebaConfig`."""
    lookahead: int = 32
    """See `AmoebaConfig`."""


class AmoebaPaperPolicy:
    """See docs/scheduling.md. It remembers which devices scale up for which request, and the largest long request."""

    name = "amoeba_paper"

    def __init__(self, config: PaperConfig | None = None, admission: Admission | None = None):
        self.config, self.admission = config or PaperConfig(), admission or Admission()
        self._index, self._room = self.admission.index(), KeptRoom(self.config.reserved_growth)
        self._splits = SplitRule(SplitConfig(free_share=0.5, linger_s=0.0, partial=False))
        self._scaling: dict[str, tuple[int, ...]] = {}
        """Devices that become one instance for a waiting request, in steps of two."""
        self._largest = (0.0, 0)
        self._fits_nowhere: int | None = None
        """Most tokens of the smallest request that no group was left for since groups were last given up in this
        decision: none is for larger ones."""

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        index, room, longest = self._index, self._room.of(view), view.longest
        index.update(view.queue)
        rejects = self.admission.turn_away(view, index, longest.capacity_tokens, f"a TP{longest.degree} instance")
        gone = {reject.request_id for reject in rejects}
        self._scaling = {n: devices for n, devices in self._scaling.items() if n in index and n not in gone}
        between = {device for devices in self._scaling.values() for device in devices}
        leaving = self._splits.leaving(view, room.merged.values(), view.with_hidden(index.largest), pressed=False)
        actions: list[Action] = [*rejects]
        actions += self._splits.split(view, room, [it for it in leaving if between.isdisjoint(it[0].devices)])
        reserve = Reserve(view, room, self._largest_long(view, room))
        self._fits_nowhere = None
        num_unplaced, behind = 0, dict.fromkeys(self._scaling)
        for request in index.ordered(view.now_s):
            if request.request_id in gone:
                continue
            behind.pop(request.request_id, None)
            placed = self._place(view, room, reserve, request)
            actions += placed
            num_unplaced += not any(isinstance(action, Dispatch) for action in placed)
            if num_unplaced >= self.config.lookahead:
                break
        for name in behind:  # what was begun for them goes on
            actions += self._place(view, room, reserve, index.get(name))
        return actions

    def _place(self, view: ClusterView, room: Room, reserve: Reserve, request: WaitingRequest) -> list[Action]:
        """Dispatch a request, or have a group scale up for it, or keep room for it."""
        if (chosen := self._candidate(view, room, reserve, request)) is not None:
            self._drop_group(request)
            reason = f"the least loaded that has room: TP{chosen.degree}, load {room.load(chosen):.2f}"
            room.give(chosen, request)
            return [Dispatch(request.request_id, chosen.id, reason)]
        if self.config.scale_up_under_load or view.is_long(request.max_total_tokens):
            return [*self._scale_up(view, room, request)]
        room.keep_for(request)
        return []

    def _drop_group(self, request: WaitingRequest) -> None:
        """Let others have the group that was to serve a request, if there was one."""
        if self._scaling.pop(request.request_id, None) is not None:
            self._fits_nowhere = None

    def _largest_long(self, view: ClusterView, room: Room) -> int:
        """Tokens of the largest recent long request, whose transformation room is reserved for (Gyges 5)."""
        running = [i.largest for i in room.merged.values() if view.has_long(i)]
        waiting = self._index.largest(view.longest.capacity_tokens)
        size = max([waiting if view.is_long(waiting) else 0, *running])
        seen_s, largest = self._largest
        if size >= largest or view.now_s - seen_s > self.config.reserve_memory_s:
            self._largest = (view.now_s, size)
        return self._largest[1]

    def _candidate(
        self, view: ClusterView, room: Room, reserve: Reserve, request: WaitingRequest
    ) -> InstanceView | None:
        """The least-loaded available instance that can serve a request by its input length and the load. Short requests
        skip reserved instances; long ones prefer those of a higher degree."""
        options, long = room.with_room(request), view.is_long(request.max_total_tokens)
        if options and not long:
            kept = reserve.kept_from(room.need(request))
            options = [i for i in options if view.has_long(i) or kept.isdisjoint(i.devices)]
        return min(options, key=lambda i: (-i.degree if long else 0, room.load(i), i.id), default=None)

    def _scale_up(self, view: ClusterView, room: Room, request: WaitingRequest) -> list[ScaleUp]:
        """Begin or continue to double the degree of the group that is to serve a request. Its instances take nothing
        else; it begins once the group, merged, has room for the request."""
        devices = self._scaling.get(request.request_id)
        if devices is None or (merged := self._members(room, devices)) is None:
            self._drop_group(request)
            if (devices := self._best_group(view, room, request)) is None:
                return []
            self._scaling[request.request_id] = devices
            merged = room.members(devices)
        free = room.merged_free(merged, len(devices))
        for instance in merged:
            room.close(instance)
        steady = [i for i in merged if i.transition_to is None]
        if len(merged) == 1 or len(steady) < len(merged) or free < room.need(request):
            return []
        lowest = min([i.degree for i in merged])
        pairs = [tuple(range(first, first + 2 * lowest)) for first in range(devices[0], devices[-1] + 1, 2 * lowest)]
        pairs = [pair for pair in pairs if (pair, 2 * lowest) not in view.refused]
        pairs = [pair for pair in pairs if all(i.degree == lowest for i in room.members(pair))]
        if not pairs:
            return []
        gain = self._performance(view, merged, len(devices))
        reason = (
            f"no available instance can serve {request.request_id} with {request.prompt_tokens} tokens; {gain:.0%} of "
            f"the group's tokens/s are expected at TP{len(devices)}"
        )
        return [ScaleUp(pair, 2 * lowest, reason) for pair in pairs]

    @staticmethod
    def _members(room: Room, devices: tuple[int, ...]) -> tuple[InstanceView, ...] | None:
        """Instances that make up a group; None where there is no such group any more."""
        members = room.members(devices)
        whole = sum([len(i.devices) for i in members]) == len(devices)  # groups are aligned: none has devices of others
        return members if whole and not any(i.draining for i in members) else None

    def _best_group(self, view: ClusterView, room: Room, request: WaitingRequest) -> tuple[int, ...] | None:
        """The group with the best expected performance after scaling up, then the least load, among available
        instances: at the least degree that holds the request with what runs there, or, where none does now, would."""
        if self._fits_nowhere is not None and request.max_total_tokens >= self._fits_nowhere:
            return None
        taken = {device for devices in self._scaling.values() for device in devices}
        need = room.need(request)
        best: tuple[int, float, float, tuple[int, ...]] | None = None
        for limits in view.degrees:
            if limits.degree <= view.base_degree or limits.capacity_tokens < request.max_total_tokens:
                continue
            fit: set[int | None] = set()
            for load, devices, free, kind, members in room.groups_by_load(limits.degree):
                lacks = need - free if free < need else 0
                if kind in fit or (best is not None and lacks > best[0]) or not taken.isdisjoint(devices):
                    continue
                if not all(room.takes(i) and (devices, 2 * i.degree) not in view.refused for i in members):
                    continue
                rank = lacks, -self._performance(view, members, limits.degree), load, devices
                if best is None or rank < best:
                    best = rank
                if lacks == 0 and kind is not None:
                    fit.add(kind)  # others of this kind have more load
            if best is not None and best[0] == 0:
                break
        if best is None:
            self._fits_nowhere = request.max_total_tokens
            return None
        return best[3]

    @staticmethod
    def _performance(view: ClusterView, members: tuple[InstanceView, ...], degree: int) -> float:
        """Expected tokens/s of a group after scaling up, as a share of what it has now (Gyges 5): by measured decode
        steps where both degrees have some, else by Gyges' Table 1."""
        counts = [len(i.running) for i in members]
        if not any(counts):
            return 1.0  # nothing runs that could become slower
        now_s = [step_s for i in members if (step_s := view.timing.step_s(i.degree))]
        then_s = view.timing.step_s(degree)
        if not then_s or len(now_s) < len(members):
            return _TOKENS_PER_S.get(degree, 1.0) / sum([_TOKENS_PER_S.get(i.degree, 1.0) for i in members])
        if len(set(now_s)) == 1:  # groups that differ in their load alone are equal in this
            return now_s[0] / then_s
        return sum(counts) / then_s / sum(count / step_s for count, step_s in zip(counts, now_s, strict=True))
