"""One decision of the policy `amoeba` about all waiting requests."""

from functools import cached_property

from serving.scheduler import estimates
from serving.scheduler.actions import Action, Dispatch, Preempt, ScaleDown, ScaleUp
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.preemption import Preemptions
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.reserve import Reserve
from serving.scheduler.room import MergeGroup, Room
from serving.scheduler.split_rule import split_to_release
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


class Round:
    """One decision of the policy `amoeba` about all waiting requests.

    It assigns free tokens and slots to the requests, one request after another.

    Args:
        was_pressed: whether a short request found no room in the last decision.

    Attributes:
        busy: ids of instances that must not merge in this decision. An instance is busy if it is merging, splitting or
            draining, or if this decision already merges it, closes it for a merge, splits it or preempts its requests.
        pressed: whether a short request found no room in this decision.
        num_unplaced: number of requests that found no room.
    """

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
        self.busy = {instance.id for instance in room.unsteady}
        self._merged_capacities: list[int] = []
        """Capacity of each merged instance that this decision creates or prepares.

        These are groups that merge now, and groups that are closed so that they can merge later.
        """
        self._reserved: set[int] = set()
        """Ids of merged instances where a waiting long request has reserved tokens."""
        self._taken_s: dict[int, float] = {}
        """Estimated seconds until an instance has finished the request for which it reserves tokens, by instance id."""

    @cached_property
    def _candidates(self) -> list[InstanceView]:
        """Instances that may hold long requests, now or after their transformation."""
        room, base = self.room, self.view.base_degree
        return [*room.merged, *(i for i in room.unsteady if i.degree <= base)]

    @cached_property
    def _largest_present(self) -> int:
        return max([self.view.final_capacity(i) for i in self._candidates if not i.draining], default=-1)

    def place(self, request: WaitingRequest) -> list[Action]:
        """Return the actions for a request. The list is empty if the request must wait."""
        long = self.view.is_long(request.max_total_tokens)
        actions = self._place_long(request) if long else self._place_short(request)
        self.num_unplaced += not [action for action in actions if isinstance(action, Dispatch)]
        return actions

    def _place_short(self, request: WaitingRequest) -> list[Action]:
        options = self.room.with_room(request)
        if options:
            kept = self.reserve.kept_from(self.room.need(request))
            instance = self._preferred(options, request, kept)
            why = f"least loaded of {len(options)} with room"
            if kept and kept.isdisjoint(instance.devices):
                why += "; others keep it for a scale-up"
            return [self._dispatch(instance, request, why)]
        if (instance := self.room.joinable(request)) is not None:
            why = self.room.join(instance, request)
            return [Dispatch(request.request_id, instance.id, f"{why}, and no other has room")]
        self.pressed = True
        preempts = self._preempt(request)
        if not preempts:
            self.room.reserve_for(request)
        return [*preempts]

    def _preferred(self, options: list[InstanceView], request: WaitingRequest, kept: frozenset[int]) -> InstanceView:
        """Return the best of several instances for a short request.

        The best instance is chosen by these criteria, in this order: it uses no device in `kept`, it runs no long
        request, its steps meet the TPOT SLO, and its load is the lowest. `kept` has the devices to keep free for a long
        request.
        """
        view, slo_s = self.view, self.config.tpot_slo_s
        return min(
            options,
            key=lambda i: (
                not kept.isdisjoint(i.devices),
                view.has_long(i),
                estimates.is_slow(i, request, slo_s),
                self.room.load(i),
                i.id,
            ),
        )

    def _place_long(self, request: WaitingRequest) -> list[Action]:
        """Return the actions for a long request.

        - If instances have room now, dispatch the request to the one with the highest tensor-parallel degree.
        - If an instance is large enough but has no room now, preempt other requests. If no request can be preempted,
          merge one more group of instances (`_second_merge`), or let the request wait.
        - If no instance is large enough, merge a group of instances. If all groups lack room, close the best group to
          new requests, so that it can merge later.
        - If no group can merge, split a merged instance that has released no weights. Its devices can then merge again
          with more KV cache.
        """
        if options := self.room.with_room(request):
            instance = min(options, key=lambda i: (-i.degree, self.room.load(i), i.id))
            return [self._dispatch(instance, request, "the highest degree with room for a long request")]
        if max([self._largest_present, *self._merged_capacities]) >= request.max_total_tokens:
            if preempts := self._preempt(request):
                return [*preempts]
            if (merge := self._second_merge(request)) is not None:
                return [merge]
            self._wait(request)
            return []
        if (group := self._group_with_room(request)) is not None:
            return [self._merge(group, request)]
        groups = self._groups(request)
        if groups:  # none has room yet: reserve the best one
            self._close(groups[0], self.view.limits[self._degree_for(request)].capacity_tokens)
            return []
        split = self._split_to_release(request)
        return [] if split is None else [split]

    def _second_merge(self, request: WaitingRequest) -> ScaleUp | None:
        """Return the action that merges one more group for a long request, or None if the request should wait.

        The group merges if one of two reasons holds:

        - The request has waited `merge_again_after_s` seconds.
        - The request would miss its TTFT SLO by waiting, and a merge gives the first token earlier. This reason is
          ignored if a short request lacks room, or if another merge of this decision can hold the request.
        """
        waited_s, patience_s = self.view.now_s - request.arrival_s, self.config.merge_again_after_s
        group = self._group_with_room(request)
        if group is None:
            return None
        if patience_s is not None and waited_s >= patience_s:
            return self._merge(group, request)
        slo_s = self.config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        coming = any(capacity >= request.max_total_tokens for capacity in self._merged_capacities)
        if slo_s is None or self.was_pressed or self.pressed or coming:
            return None
        merge_s = estimates.merge_s(self.view, group.members, self._degree_for(request), request)
        wait_s = estimates.first_token_s(self.view, self.room, self._candidates, request, self._taken_s)
        if not estimates.merge_pays(self.view, request, wait_s, merge_s, slo_s):
            return None
        why = f"; its first token would come after {wait_s:.1f} s, and here after {merge_s:.1f} s"
        return self._merge(group, request, why)

    def _split_to_release(self, request: WaitingRequest) -> ScaleDown | None:
        view = self.view
        options = [
            i
            for i in self.room.merged
            if i.id not in self.busy and i.capacity_tokens < request.max_total_tokens and view.keeps_weights(i)
        ]
        if not options:
            return None
        instance = min(options, key=lambda i: (i.used_tokens, i.id))
        self.busy.add(instance.id)
        return split_to_release(view, self.room, instance, request)

    def _dispatch(self, instance: InstanceView, request: WaitingRequest, why: str) -> Dispatch:
        load = self.room.load(instance)
        self.room.assign(instance, request)
        return Dispatch(request.request_id, instance.id, f"{why}: TP{instance.degree}, load {load:.2f}")

    def _preempt(self, request: WaitingRequest) -> list[Preempt]:
        if (found := self.preemptions.find(request)) is None:
            return []
        instance, preempts = found
        self.room.close(instance)
        self.busy.add(instance.id)
        return preempts

    def _wait(self, request: WaitingRequest) -> None:
        """Reserve room for a long request that must wait.

        The room is on the merged instance that will have the most free tokens when its long requests have ended. If no
        merged instance can hold the request, the room is on an instance that is still merging or splitting.
        """
        room = self.room
        options = [
            i
            for i in room.merged
            if i.id not in self._reserved and room.is_open(i) and i.capacity_tokens >= request.max_total_tokens
        ]
        if not options:
            room.reserve_in_transition(request)
            return
        instance = min(options, key=lambda i: (-room.free(i) - room.freed_by_long(i), i.id))
        self._reserved.add(instance.id)
        wait_s = estimates.wait_s(self.view, room, instance, room.need(request))
        run_s = estimates.run_s(self.view, instance.degree, request)
        if wait_s is not None and run_s is not None:
            self._taken_s[instance.id] = wait_s + run_s
        room.reserve_after(instance, request, room.freed_by_long(instance))

    def _groups(self, request: WaitingRequest) -> list[MergeGroup]:
        """Return the groups of instances that may merge for a request, best first."""
        degree = self._degree_for(request)
        return [
            group
            for group in self.room.merge_groups(degree)
            if self.busy.isdisjoint([i.id for i in group.members]) and (group.devices, degree) not in self.view.refused
        ]

    def _group_with_room(self, request: WaitingRequest) -> MergeGroup | None:
        """Return the best group of instances that will have room for a request right after the merge, or None."""
        need = self.room.need(request)
        return next((group for group in self._groups(request) if group.minus_free <= -need), None)

    def _merge(self, group: MergeGroup, request: WaitingRequest, why: str = "") -> ScaleUp:
        degree = self._degree_for(request)
        capacity = self.view.limits[degree].capacity_tokens
        self._close(group, capacity)
        reason = (
            f"{request.request_id} may grow to {request.max_total_tokens} tokens, which fit at TP{degree} "
            f"first; of its {capacity} tokens {-group.minus_free} will be free{why}"
        )
        return ScaleUp(group.devices, degree, reason)

    def _close(self, group: MergeGroup, capacity: int) -> None:
        for instance in group.members:
            self.room.close(instance)
            self.busy.add(instance.id)
        self._merged_capacities.append(capacity)

    def _degree_for(self, request: WaitingRequest) -> int:
        degree = self.view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree are rejected"
        return degree
