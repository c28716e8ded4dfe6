"""One decision of the policy `amoeba`: which request goes where, by the room that is left."""

from collections.abc import Iterator
from functools import cached_property

from serving.scheduler import estimates
from serving.scheduler.actions import Action, Dispatch, Preempt, ScaleDown, ScaleUp
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.idle_room import IdleRoom
from serving.scheduler.instance_facts import fits_split
from serving.scheduler.merge_groups import MergeGroup
from serving.scheduler.preemption import Preemptions
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.reserve import Reserve
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


class Round:
    """One call of `decide`: the room that is left, and what waits for it."""

    def __init__(
        self,
        view: ClusterView,
        room: Room,
        reserve: Reserve,
        config: AmoebaConfig,
        order: QueueOrder,
        was_pressed: bool,
    ):
        self.view, self.room, self.reserve, self.config = view, room, reserve, config
        self.preemptions = Preemptions(view, room, order)
        self.was_pressed, self.pressed, self.num_unplaced = was_pressed, False, 0
        self.busy = set(room.unsteady)
        """Instances that no merge may take: they split or merge, or make room for someone."""
        self.special = {**room.merged, **room.unsteady}
        """Instances that may hold long requests, now or when their transition has ended."""
        self._too_much: dict[int, int] = {}
        """Free tokens that no group which may merge to a degree has: none will, as tokens only become fewer."""
        self._roomiest: list[InstanceView] | None = None
        """Merged instances where no room is set aside yet for a long request that waits; most room first."""
        self.to_come: list[int] = []
        """Capacities of instances that merges of this round will make, or that a group was claimed for."""
        self.taken_s: dict[int, float] = {}
        """Seconds until the last request that waits for an instance's room has ended, where room is set aside."""
        self.idle = IdleRoom(view, room)

    def place(self, request: WaitingRequest) -> list[Action]:
        """What becomes of a request: nothing, where it waits."""
        long = self.view.is_long(request.max_total_tokens)
        actions = self.place_long(request) if long else self.place_short(request)
        self.num_unplaced += not any(isinstance(action, Dispatch) for action in actions)
        return actions

    def place_short(self, request: WaitingRequest) -> list[Action]:
        """On the least-loaded instance with room. Only if there is no other: where a scale-up needs that room, where
        long requests run, whose prompts take most of each step, and last where layers are changing."""
        if count := self.room.num_with_room(request):
            kept = self.reserve.kept_from(self.room.need(request))
            if (instance := self._least_loaded(request, kept)) is not None:
                other = kept and kept.isdisjoint(instance.devices)
                why = f"least loaded of {count} with room" + ("; others keep it for a scale-up" if other else "")
                return [self._dispatch(instance, request, why)]
        if (instance := self.room.joinable(request)) is not None:
            why = self.room.join(instance, request)
            return [Dispatch(request.request_id, instance.id, f"{why}, and no other has room")]
        if (found := self.idle.find(request)) is not None:
            return [self._dispatch(found[0], request, found[1])]
        self.pressed = True
        preempts = self._preempt(request)
        if not preempts:
            self.room.keep_for(request)
        return [*preempts]

    def _least_loaded(self, request: WaitingRequest, kept: frozenset[int]) -> InstanceView | None:
        """Choose among instances with room, in this order: such as keep none for a scale-up, run no long request, have
        steps within the SLO, and have the smallest load."""
        slo_s = self.config.tpot_slo_s if request.tpot_slo_s is None else request.tpot_slo_s
        room, view, need, best = self.room, self.view, self.room.need(request), None
        for instance in room.by_load():
            if instance.capacity_tokens < request.max_total_tokens or room.free(instance) < need:
                continue
            is_slow = slo_s is not None and instance.step_s is not None and instance.step_s > slo_s
            rank = (not kept.isdisjoint(instance.devices), view.has_long(instance), is_slow)
            if best is None or rank < best[0]:
                best = rank, instance
            if not any(rank) or (not kept and rank[1] and not is_slow):
                break  # those that follow are no better
        return None if best is None else best[1]

    def place_long(self, request: WaitingRequest) -> list[Action]:
        """On an instance of the highest degree that has room; else wait for one that will have; else merge."""
        if options := self.room.with_room(request):
            instance = min(options, key=lambda i: (-i.degree, self.room.load(i), i.id))
            return [self._dispatch(instance, request, "the highest degree with room for a long request")]
        if max([self._largest_present, *self.to_come]) >= request.max_total_tokens:
            if preempts := self._preempt(request):
                return [*preempts]
            if (merge := self._merge_again(request)) is not None:
                return [merge]
            self._set_aside(request)
            return []
        if (merge := self._merge(request)) is not None:
            return [merge]
        if next(self._groups(request), None) is None and (split := self._release(request)) is not None:
            return [split]
        self._claim_group(request)
        return []

    def _merge_again(self, request: WaitingRequest) -> ScaleUp | None:
        """Merge a second group for a request that a present instance will have room for, but too late."""
        waited_s, patience_s = self.view.now_s - request.arrival_s, self.config.merge_again_after_s
        if patience_s is not None and waited_s >= patience_s:
            return self._merge(request)
        slo_s = self.config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        coming = any(capacity >= request.max_total_tokens for capacity in self.to_come)
        if slo_s is None or self.was_pressed or self.pressed or coming:
            return None
        if (group := self._group_with_room(request)) is None:
            return None
        merge_s = estimates.merge_s(self.view, group.members, self._degree_for(request), request)
        if merge_s is None:
            return None
        instances, later_than_s = self.special.values(), max(merge_s, slo_s - waited_s)
        wait_s = estimates.first_token_s(self.view, self.room, instances, request, self.taken_s, later_than_s)
        if wait_s is None:
            return None
        why = f"; its first token would come after {wait_s:.1f} s, and here after {merge_s:.1f} s"
        return self._merge(request, why)

    def _release(self, request: WaitingRequest) -> ScaleDown | None:
        """Split an instance that was merged without releasing weights, so that a merge can release them."""
        view = self.view
        options = [
            i
            for i in self.room.merged.values()
            if i.id not in self.busy and i.capacity_tokens < request.max_total_tokens and view.keeps_weights(i)
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

    @cached_property
    def _largest_present(self) -> int:
        """The largest capacity of present instances for long requests, now or when they have changed; -1: of none."""
        return max((self.view.capacity_to_come(i) for i in self.special.values() if not i.draining), default=-1)

    def _dispatch(self, instance: InstanceView, request: WaitingRequest, why: str) -> Dispatch:
        load = self.room.load(instance)
        self.room.give(instance, request)
        reason = f"{why}: TP{instance.degree}, load {load:.2f}"
        return Dispatch(request.request_id, instance.id, reason)

    def _preempt(self, request: WaitingRequest) -> list[Preempt]:
        """Make room for a request that fits nowhere now, if requests run that rank behind it."""
        if (found := self.preemptions.find(request)) is None:
            return []
        instance, preempts = found
        self.room.close(instance)
        self.busy.add(instance.id)
        return preempts

    def _set_aside(self, request: WaitingRequest) -> None:
        """Keep room for a long request that waits until those before it on a merged instance are done."""
        room = self.room
        if self._roomiest is None:
            self._roomiest = room.roomiest()
        options = (i for i in self._roomiest if room.takes(i) and i.capacity_tokens >= request.max_total_tokens)
        if (instance := next(options, None)) is not None:
            self._roomiest.remove(instance)
            before, free = room.free(instance), room.free(instance) + room.facts.freed_by_long(instance)
            wait_s = estimates.wait_s(self.view, self.room, instance, self.room.need(request))
            run_s = estimates.run_s(self.view, instance.degree, request)
            if wait_s is not None and run_s is not None:
                self.taken_s[instance.id] = wait_s + run_s
            self.room.set_aside(instance, request, free - before)
            if wait_s is not None:
                self.idle.add(instance, wait_s, before - room.free(instance))
        else:
            self.room.keep_coming(request)

    def _groups(self, request: WaitingRequest) -> Iterator[MergeGroup]:
        """Groups of instances that may merge into one that holds a request: those of one degree first, then by room."""
        degree, refused = self._degree_for(request), self.view.refused
        return (
            group
            for group in self.room.merge_groups(degree)
            if self.busy.isdisjoint([i.id for i in group.members]) and (group.devices, degree) not in refused
        )

    def _group_with_room(self, request: WaitingRequest) -> MergeGroup | None:
        """The least-loaded group that would make an instance with room for a request at once."""
        degree, need = self._degree_for(request), self.room.need(request)
        if need >= self._too_much.get(degree, need + 1):
            return None
        found = next((group for group in self._groups(request) if group.minus_free <= -need), None)
        if found is None:
            self._too_much[degree] = need
        return found

    def _merge(self, request: WaitingRequest, why: str = "") -> ScaleUp | None:
        """Merge the least-loaded group, if the instance that it makes has room for the request at once."""
        if (group := self._group_with_room(request)) is None:
            return None
        degree = self._degree_for(request)
        capacity, free = self.view.limits[degree].capacity_tokens, -group.minus_free
        self._claim(group, capacity)
        reason = (
            f"{request.request_id} may grow to {request.max_total_tokens} tokens, which fit at TP{degree} "
            f"first; of its {capacity} tokens {free} will be free{why}"
        )
        return ScaleUp(group.devices, degree, reason)

    def _claim_group(self, request: WaitingRequest) -> None:
        """No group has room, even merged: keep others from the one that has most, until it has enough."""
        if (group := next(self._groups(request), None)) is not None:
            self._claim(group, self.view.limits[self._degree_for(request)].capacity_tokens)

    def _claim(self, group: MergeGroup, capacity: int) -> None:
        for instance in group.members:
            self.room.close(instance)
            self.busy.add(instance.id)
        self.to_come.append(capacity)

    def _degree_for(self, request: WaitingRequest) -> int:
        degree = self.view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree were turned away"
        return degree
