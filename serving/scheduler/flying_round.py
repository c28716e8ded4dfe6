"""One decision of the policy `flying`: which request goes where."""

from functools import cache, cached_property
from itertools import islice

from serving.scheduler import request_slos
from serving.scheduler.actions import Action, Dispatch, Preempt, RunningRequests, ScaleUp
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.flying_groups import FlyingGroups, runs_urgent
from serving.scheduler.pausing import PauseBudget, in_the_way
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

_RUNNING: dict[str, RunningRequests] = {"hard": "pause", "soft": "migrate", "sequential": "wait"}
"""What becomes of requests where a group is made for an urgent one, by `FlyingConfig.preemption`."""


_MOST_TRIED = 8
"""Instances, the least loaded first, of which a decision estimates whether they keep the SLOs of an urgent request."""


class FlyingRound:
    """One call of `decide`: the room that is left, and what waits for it.

    Attributes:
        settled: urgent requests that have a place, or wait for a group that is being made.
        moved: devices of groups for urgent requests to which others move as well.
        groups: those that are there, and that are made.
        num_unplaced: requests that found no place.
        split_at_s: when groups are to split for the short requests that found no room; None where all did.
    """

    def __init__(self, view: ClusterView, room: Room, config: FlyingConfig, budget: PauseBudget):
        self.view, self.room, self.config = view, room, config
        self.groups = FlyingGroups(view, room, config, budget)
        self.settled: set[str] = set()
        self.moved: set[tuple[int, ...]] = set()
        self.num_unplaced = 0
        self.split_at_s: float | None = None
        self._given: dict[int, int] = {}
        """Prompt tokens of requests that were given to instances, and that the snapshot does not show there."""
        self._long_waits = False
        self._in_vain = False
        """No group can be made for an urgent request: none can for another."""

    @cached_property
    def _highest_degree(self) -> int:
        return max((instance.degree for instance in self.room.merged.values()), default=self.view.base_degree)

    @cached_property
    def _above_paused(self) -> list[InstanceView]:
        """Instances beside whose requests others pause."""
        return [instance for instance in self.room.merged.values() if instance.paused_degree is not None]

    @cached_property
    def _steady_merged(self) -> list[InstanceView]:
        """Instances above the base degree that will take requests when they have room."""
        room = self.room
        return [i for i in room.merged.values() if i.id not in room.unsteady and i.paused_degree is None]

    # Urgent requests

    def place_urgent(self, request: WaitingRequest) -> list[Action]:
        """On a group that is there, or on one that is made for it. Where there can be none now, it is placed as any
        other."""
        view, room = self.view, self.room
        if view.is_long(request.max_total_tokens):
            return []
        groups = [i for i in room.with_room(request) if i.degree > view.base_degree]
        if groups:
            instance = min(groups, key=lambda i: (-i.degree, room.load(i), i.id))
            return [self._dispatch(instance, request, "urgent: a group is there")]
        if request.ttft_slo_s is not None or request.tpot_slo_s is not None:
            for instance in islice(room.by_load(), _MOST_TRIED):
                if self._has_room(instance, request) and self._keeps_own(instance, request):
                    return [self._dispatch(instance, request, "urgent: within its SLOs without a group")]
        for instance in [i for i in self._above_paused if room.takes(i)]:
            if room.has_slot(instance) and (going := in_the_way(view, instance, request, room.need(request))):
                room.close(instance)
                self.settled.add(request.request_id)
                reason = f"{request.request_id} is urgent and lacks its pages"
                return [Preempt(paused.request_id, reason=reason) for paused in going]
        joined = room.joinable(request)
        if joined is not None and (joined.transition_to or 0) > view.base_degree:
            self.settled.add(request.request_id)
            return [Dispatch(request.request_id, joined.id, f"urgent: {room.join(joined, request)}")]
        if self.groups.comes(request):
            self.settled.add(request.request_id)
            room.keep_coming(request)
            return []
        return self._bind(request)

    def _has_room(self, instance: InstanceView, request: WaitingRequest) -> bool:
        return instance.capacity_tokens >= request.max_total_tokens and self.room.free(instance) >= self.room.need(
            request
        )

    def _keeps_own(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """It serves a request within SLOs of its own."""
        before = instance.uncomputed_tokens + self._given.get(instance.id, 0)
        return request_slos.keeps_own(self.view, instance, request, before)

    def _bind(self, request: WaitingRequest) -> list[Action]:
        """Make a group: of the highest degree that there can be, where the fewest requests run."""
        how = _RUNNING[self.config.preemption]
        found = None if self._in_vain else self.groups.for_urgent(pause=how == "pause")
        if found is None and how == "pause" and not self._in_vain:  # other urgent requests run there: they move
            how, found = "migrate", self.groups.for_urgent(pause=False)
        if found is None:
            self._in_vain = True
            return []
        degree, devices, members = found
        running = sum(len(i.running) for i in members)
        what = {"pause": "pause", "migrate": "go on there", "wait": "are waited for"}[how]
        scale_up = ScaleUp(
            devices,
            degree,
            f"{request.request_id} is urgent; {running} requests {what}",
            release_weights=False,
            running=how,
        )
        actions: list[Action] = []
        if how == "migrate":
            options = [i for i in members if i in self.room.with_room(request)]
            if options:  # it begins at once, and goes on in the group
                instance = min(options, key=lambda i: (self.room.load(i), i.id))
                actions.append(self._dispatch(instance, request, "urgent: until its group is there"))
        self.groups.claim(members)
        if how != "pause":
            self.moved.add(devices)
        self.settled.add(request.request_id)
        limits = self.view.limits[degree]
        kept = sum(i.capacity_tokens for i in members)
        self.groups.coming.append((kept - self.room.need(request), limits.max_requests - running - 1))
        return [*actions, scale_up]

    # Others

    def place(self, request: WaitingRequest) -> list[Action]:
        """What becomes of a request: nothing, where it waits."""
        long = self.view.is_long(request.max_total_tokens)
        actions = self._place_long(request) if long else self._place_short(request)
        self.num_unplaced += not any(isinstance(action, Dispatch) for action in actions)
        return actions

    def _place_short(self, request: WaitingRequest) -> list[Action]:
        """On the least-loaded instance with room; on one that runs urgent requests, or whose steps are longer than the
        request's SLO, only if there is no other."""
        config, room, best = self.config, self.room, None
        for instance in room.by_load():
            if not self._has_room(instance, request):
                continue
            beside = runs_urgent(instance)
            rank = beside, request_slos.is_slow(instance, request, config.tpot_slo_s)
            if best is None or rank < best[0]:
                best = rank, instance
            if not any(rank):
                break
        if best is not None:
            (beside, _), instance = best
            why = "least loaded with room" + (", beside urgent requests" if beside else "")
            return [self._dispatch(instance, request, why)]
        if (joined := room.joinable(request)) is not None:
            why = room.join(joined, request)
            return [Dispatch(request.request_id, joined.id, f"{why}, and no other has room")]
        room.keep_for(request)
        if not room.unsteady:  # else there may be room once it has ended
            at_s = request_slos.group_splits_at_s(
                self.view, request, self._highest_degree, config.burst_wait_s, config.ttft_slo_s
            )
            self.split_at_s = at_s if self.split_at_s is None else min(self.split_at_s, at_s)
        return []

    def _place_long(self, request: WaitingRequest) -> list[Action]:
        """On an instance of the least degree that has room; else wait for one that will have, unless that breaks its
        SLO and a merge would be sooner; else merge."""
        room = self.room
        if options := room.with_room(request):
            instance = min(options, key=lambda i: (i.degree, room.load(i), i.id))
            return [self._dispatch(instance, request, "the least degree with room for a long request")]
        size = request.max_total_tokens
        there = [instance for instance in self._steady_merged if instance.capacity_tokens >= size]
        if (comes := any(tokens >= size for tokens, _ in self.groups.coming)) or there:
            merge = None if comes or self._long_waits else self._merge_again(request, there)
            if merge is None:
                self._long_waits = True
                room.keep_for(request)
                room.keep_coming(request)
            return merge or []
        merge = self.groups.merge(request, claim=True)
        return self.groups.split_kept(request, self._given) if merge is None else merge

    def _merge_again(self, request: WaitingRequest, there: list[InstanceView]) -> list[Action] | None:
        """Merge a group for a request that would have its first token after its SLO on the instances that hold it, and
        sooner on the group, while no short request lacks room."""
        view, config = self.view, self.config
        slo_s = config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        if slo_s is None or self.split_at_s is not None:
            return None
        allowed_s = slo_s - (view.now_s - request.arrival_s)

        @cache
        def wait_s() -> float | None:
            return request_slos.first_token_s(view, self.room, there, request)

        def pays(merge_s: float | None) -> bool:
            waits_s = wait_s()
            return waits_s is not None and waits_s > allowed_s and merge_s is not None and merge_s < waits_s

        return self.groups.merge(request, pays=pays)

    def _dispatch(self, instance: InstanceView, request: WaitingRequest, why: str) -> Dispatch:
        load = self.room.load(instance)
        self.room.give(instance, request)
        self._given[instance.id] = self._given.get(instance.id, 0) + request.prompt_tokens
        self.settled.add(request.request_id)
        return Dispatch(request.request_id, instance.id, f"{why}: TP{instance.degree}, load {load:.2f}")
