"""AMOEBA's policy: merge for what fits nowhere, send the next long requests there too, split when they are done."""

import dataclasses
from dataclasses import dataclass

from serving.scheduler.actions import Action, Dispatch, Preempt, ScaleDown, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.preemption import preempt_for, rank
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.reserve import Reserve, freed_by_long
from serving.scheduler.room import Room, fits_split
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


@dataclass(frozen=True)
class AmoebaConfig:
    """What can be tuned."""

    split_free_share: float = 0.5
    """A merged instance whose long requests are done splits once this share of its KV cache is free. Less splits
    earlier and moves more pages; the pages in use must fit the lower degree in any case."""
    linger_s: float = 60.0
    """A merged instance goes on for this long after its last long request, so that the next one finds it: long requests
    with shorter gaps between them are one burst, with one merge and one split. Short requests are served faster by what
    it splits into, so it does not wait when one finds no room, or when they leave less than `split_free_share` of the
    instance free. 0 is the paper's rule."""
    partial_splits: bool = True
    """A merged instance splits to the least degree that its long requests need, and need not wait for their end."""
    merge_again_after_s: float | None = None
    """A long request that has waited this long for a merged instance may have another merged for it. None: it waits,
    and consecutive long requests never cause a second merge."""
    merge_to: int = 1
    """Merges go to this degree at least: long requests are served faster, and fewer instances are left for short ones.
    1: to the least degree that holds the request."""
    reserve_memory_s: float = 600.0
    """Room is kept for a long request as large as the largest that came within this time."""
    reserved_growth: float = 0.0
    """Share kept free of what running requests may still grow by. 0 admits as vLLM does, and the engine preempts when
    pages run out; with 1 that never happens, and the cache is less full."""

    @property
    def splits(self) -> SplitConfig:
        """When instances split."""
        return SplitConfig(self.split_free_share, self.linger_s, self.partial_splits)


class AmoebaPolicy:
    """See docs/scheduling.md. Besides what `SplitRule` remembers it knows how large long requests were recently;
    everything else is decided from the snapshot alone."""

    name = "amoeba"

    def __init__(
        self, config: AmoebaConfig | None = None, admission: Admission | None = None, order: QueueOrder | None = None
    ):
        self.config = config or AmoebaConfig()
        self.admission = admission or Admission(order or QueueOrder())
        self._splits = SplitRule(self.config.splits)
        self._largest = (0.0, 0)
        """The largest recent long request: when it was last seen, and its tokens."""
        self._pressed = False
        """A short request found no room when decisions were last made."""

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        view = dataclasses.replace(view, merge_to=self.config.merge_to)
        longest = view.longest
        rejects, queue = self.admission.screen(view, longest.capacity_tokens, f"a TP{longest.degree} instance")
        round_ = _Round(view, self.config, self.admission.order)
        sizes = [r.max_total_tokens for r in queue if view.is_long(r.max_total_tokens)]
        leaving = self._splits.leaving(view, sizes, self._pressed)
        splits = self._splits.split(view, round_.room, leaving)
        round_.busy.update(action.devices[0] for action in splits)
        actions: list[Action] = [*rejects, *splits]
        round_.reserve = Reserve.for_size(view, self._largest_long(view, queue))
        for request in queue:
            if view.is_long(request.max_total_tokens):
                actions += round_.place_long(request)
            else:
                actions += round_.place_short(request)
        self._pressed = round_.pressed
        return actions

    def _largest_long(self, view: ClusterView, queue: list[WaitingRequest]) -> int:
        """Tokens of the largest recent long request; 0 if there was none."""
        requests = [*queue, *(request for instance in view.instances for request in instance.running)]
        size = max((r.max_total_tokens for r in requests if view.is_long(r.max_total_tokens)), default=0)
        seen_s, largest = self._largest
        if size >= largest or view.now_s - seen_s > self.config.reserve_memory_s:
            self._largest = (view.now_s, size)
        return self._largest[1]


class _Round:
    """One call of `decide`: the room that is left, and what waits for it."""

    def __init__(self, view: ClusterView, config: AmoebaConfig, order: QueueOrder):
        self.view, self.config, self.order = view, config, order
        self.room = Room(view, config.reserved_growth)
        self.reserve = Reserve.for_size(view, 0)
        self.pressed = False
        self.last_rank = max((rank(r) for i in view.instances for r in i.running), default=(False, 0))
        self.busy = {i.id for i in view.instances if i.transition_to is not None or i.draining}
        """Instances that no merge may take: they split or merge, or make room for someone."""
        self.awaited: set[int] = set()
        """Merged instances where room is set aside for a long request that waits."""
        self.to_come: list[int] = []
        """Capacities of instances that merges of this round will make, or that a group was claimed for."""

    def place_short(self, request: WaitingRequest) -> list[Action]:
        """On the least-loaded instance with room. Only if there is no other: where a scale-up needs that room, and
        where long requests run, whose prompts take most of each step."""
        if options := self.room.with_room(request):
            kept, has_long = self.reserve.kept_from(self.room, self.room.need(request)), self.view.has_long
            instance = min(
                options, key=lambda i: (not kept.isdisjoint(i.devices), has_long(i), self.room.load(i), i.id)
            )
            other = kept and kept.isdisjoint(instance.devices)
            why = f"least loaded of {len(options)} with room" + ("; others keep it for a scale-up" if other else "")
            return [self._dispatch(instance, request, why)]
        self.pressed = True
        preempts = self._preempt(request)
        if not preempts:
            self.room.keep_for(request)
        return [*preempts]

    def place_long(self, request: WaitingRequest) -> list[Action]:
        """On an instance of the highest degree that has room; else wait for one that will have; else merge."""
        if options := self.room.with_room(request):
            instance = min(options, key=lambda i: (-i.degree, self.room.load(i), i.id))
            return [self._dispatch(instance, request, "the highest degree with room for a long request")]
        waits = any(capacity >= request.max_total_tokens for capacity in self._capacities())
        patience_s = self.config.merge_again_after_s
        if waits and (patience_s is None or self.view.now_s - request.arrival_s < patience_s):
            if preempts := self._preempt(request):
                return [*preempts]
            self._set_aside(request)
            return []
        if (merge := self._merge(request)) is not None:
            return [merge]
        if waits:
            return []
        if not self._groups(request) and (split := self._release(request)) is not None:
            return [split]
        self._claim_group(request)
        return []

    def _release(self, request: WaitingRequest) -> ScaleDown | None:
        """Split an instance that was merged without releasing weights, so that a merge can release them."""
        view = self.view
        options = [
            i
            for i in view.instances
            if i.id not in self.busy
            and i.degree > view.base_degree
            and i.capacity_tokens < request.max_total_tokens
            and view.keeps_weights(i)
        ]
        for instance in sorted(options, key=lambda i: (i.used_tokens, i.id)):
            self.room.close(instance)
            self.busy.add(instance.id)
            if (
                fits_split(view, instance, view.base_degree)
                and (instance.devices, view.base_degree) not in view.refused
            ):
                reason = (
                    f"it has not released its weights and holds {instance.capacity_tokens} tokens; "
                    f"{request.request_id} may grow to {request.max_total_tokens}"
                )
                return ScaleDown(instance.devices, view.base_degree, reason)
            return None  # it splits when what runs there has ended
        return None

    def _capacities(self) -> list[int]:
        """Of instances that hold long requests: present ones, and those that transformations under way will make."""
        limits = self.view.limits
        capacities = list(self.to_come)
        for instance in self.view.instances:
            if instance.draining:
                continue
            if instance.transition_to is not None:
                capacities.append(limits[instance.transition_to].capacity_tokens)
            else:
                capacities.append(instance.capacity_tokens)
        return capacities

    def _dispatch(self, instance: InstanceView, request: WaitingRequest, why: str) -> Dispatch:
        load = self.room.load(instance)
        self.room.give(instance, request)
        reason = f"{why}: TP{instance.degree}, load {load:.2f}"
        return Dispatch(request.request_id, instance.id, reason)

    def _preempt(self, request: WaitingRequest) -> list[Preempt]:
        """Make room for a request that fits nowhere now, if requests run that rank behind it."""
        if rank(request) >= self.last_rank:
            return []
        if (found := preempt_for(request, self.view, self.room, self.order)) is None:
            return []
        instance, preempts = found
        self.room.close(instance)
        self.busy.add(instance.id)
        return preempts

    def _set_aside(self, request: WaitingRequest) -> None:
        """Keep room for a long request that waits until those before it on a merged instance are done."""
        options = [
            (self.room.free(i) + freed_by_long(self.view, self.room, i), -i.id, i)
            for i in self.room.open
            if i.capacity_tokens >= request.max_total_tokens and i.id not in self.awaited
        ]
        if options:
            free, _, instance = max(options, key=lambda option: option[:2])
            self.room.set_aside(instance, request, free - self.room.free(instance))
            self.awaited.add(instance.id)

    def _groups(self, request: WaitingRequest) -> list[tuple[InstanceView, ...]]:
        """Groups of instances that may merge into one that holds a request: those of one degree first, then by load."""
        view, room = self.view, self.room
        degree = self._degree_for(request)
        candidates = []
        for devices in view.groups(degree):
            members = view.instances_on(devices)
            whole = sum(i.degree for i in members) == degree and len(members) > 1
            if whole and self.busy.isdisjoint(i.id for i in members) and (devices, degree) not in view.refused:
                mixed = len({i.degree for i in members}) > 1
                candidates.append((mixed, -room.merged_free(members, degree), devices, members))
        return [members for _, _, _, members in sorted(candidates, key=lambda c: c[:3])]

    def _merge(self, request: WaitingRequest) -> ScaleUp | None:
        """Merge the least-loaded group, if the instance that it makes has room for the request at once."""
        degree = self._degree_for(request)
        capacity = self.view.limits[degree].capacity_tokens
        for members in self._groups(request):
            if (free := self.room.merged_free(members, degree)) >= self.room.need(request):
                self._claim(members, capacity)
                reason = (
                    f"{request.request_id} may grow to {request.max_total_tokens} tokens, which fit at TP{degree} "
                    f"first; of its {capacity} tokens {free} will be free"
                )
                return ScaleUp(tuple(d for i in members for d in i.devices), degree, reason)
        return None

    def _claim_group(self, request: WaitingRequest) -> None:
        """No group has room, even merged: keep others from the one that has most, until it has enough."""
        for members in self._groups(request)[:1]:
            self._claim(members, self.view.limits[self._degree_for(request)].capacity_tokens)

    def _claim(self, members: tuple[InstanceView, ...], capacity: int) -> None:
        for instance in members:
            self.room.close(instance)
            self.busy.add(instance.id)
        self.to_come.append(capacity)

    def _degree_for(self, request: WaitingRequest) -> int:
        degree = self.view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree were turned away"
        return degree
