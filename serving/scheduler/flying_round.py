"""One decision of the policy `flying` about all waiting requests."""

from functools import cache

from serving.scheduler import estimates
from serving.scheduler.actions import Action, Dispatch, Preempt, RunningRequests, ScaleUp
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.flying_groups import FlyingGroups
from serving.scheduler.pausing import PauseBudget, paused_victims
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

_RUNNING: dict[str, RunningRequests] = {"hard": "pause", "soft": "migrate", "sequential": "wait"}
"""Value of `ScaleUp.running` for a merge for an urgent request, by `FlyingConfig.preemption`."""


class FlyingRound:
    """One decision of the policy `flying` about all waiting requests.

    It assigns free tokens and slots to the requests, one request after another.

    Attributes:
        groups: groups of instances that may merge.
        settled: ids of requests that need no further action in this decision: dispatched requests, and urgent requests
            for which a merge or a preemption makes room.
        moved: devices of each group that merges for an urgent request and whose running requests are not paused.
        num_unplaced: number of requests that found no room.
        split_at_s: earliest time at which merged instances should split for a short request without room. None: every
            short request has room, or a merge or split in progress may still make room.
    """

    def __init__(self, view: ClusterView, room: Room, config: FlyingConfig, budget: PauseBudget):
        self.view, self.room, self.config = view, room, config
        self.groups = FlyingGroups(view, room, config, budget)
        self.settled: set[str] = set()
        self.moved: set[tuple[int, ...]] = set()
        self.num_unplaced = 0
        self.split_at_s: float | None = None
        self._long_waits = False
        """Whether a long request waits for an instance that can hold it. If so, the next long requests wait too."""

    # Urgent requests

    def place_urgent(self, request: WaitingRequest) -> list[Action]:
        """Return the actions that dispatch an urgent request or make room for it. The list may be empty.

        If the request needs no further action, its id is added to `settled`. If its id is not added, the caller must
        also call `place`. For a long request, this method does nothing.
        """
        view, room = self.view, self.room
        if view.is_long(request.max_total_tokens):
            return []
        options = room.with_room(request)
        if groups := [i for i in options if i.degree > view.base_degree]:
            instance = min(groups, key=lambda i: (-i.degree, room.load(i), i.id))
            return [self._dispatch(instance, request, "urgent: a group is there")]
        for instance in room.by_load(options):
            before = instance.uncomputed_tokens + room.new_prompt_tokens(instance)
            if estimates.meets_own_slos(view, instance, request, before):
                return [self._dispatch(instance, request, "urgent: within its SLOs without a group")]
        for instance in [i for i in room.merged if i.paused_degree is not None and room.is_open(i)]:
            if room.has_slot(instance) and (victims := paused_victims(view, instance, request, room.need(request))):
                room.close(instance)
                self.settled.add(request.request_id)
                reason = f"{request.request_id} is urgent and lacks its pages"
                return [Preempt(paused.request_id, reason=reason) for paused in victims]
        joined = room.joinable(request)
        if joined is not None and (joined.transition_to or 0) > view.base_degree:
            self.settled.add(request.request_id)
            return [Dispatch(request.request_id, joined.id, f"urgent: {room.join(joined, request)}")]
        if self.groups.reserve_coming(request):
            self.settled.add(request.request_id)
            room.reserve_in_transition(request)
            return []
        return self._merge_for_urgent(request)

    def _merge_for_urgent(self, request: WaitingRequest) -> list[Action]:
        running = _RUNNING[self.config.preemption]
        found = self.groups.for_urgent(pause=running == "pause")
        if found is None and running == "pause":  # urgent requests run on all groups: move them
            running, found = "migrate", self.groups.for_urgent(pause=False)
        if found is None:
            return []
        degree, devices, members = found
        num_running = sum(len(i.running) for i in members)
        what = {"pause": "pause", "migrate": "go on there", "wait": "are waited for"}[running]
        reason = f"{request.request_id} is urgent; {num_running} requests {what}"
        scale_up = ScaleUp(devices, degree, reason, release_weights=False, running=running)
        actions: list[Action] = []
        if running == "migrate":
            options = [i for i in members if self.room.has_room(i, request)]
            if options:
                instance = min(options, key=lambda i: (self.room.load(i), i.id))
                actions.append(self._dispatch(instance, request, "urgent: until its group is there"))
        self.groups.close(members)
        if running != "pause":
            self.moved.add(devices)
        self.settled.add(request.request_id)
        kept = sum(i.capacity_tokens for i in members)
        free_slots = self.view.limits[degree].max_requests - num_running - 1
        self.groups.coming.append((kept - self.room.need(request), free_slots))
        return [*actions, scale_up]

    # Other requests

    def place(self, request: WaitingRequest) -> list[Action]:
        """Return the actions for a waiting request. The list is empty if the request must wait."""
        long = self.view.is_long(request.max_total_tokens)
        actions = self._place_long(request) if long else self._place_short(request)
        self.num_unplaced += not any(isinstance(action, Dispatch) for action in actions)
        return actions

    def _place_short(self, request: WaitingRequest) -> list[Action]:
        """Return the action that starts a short request on an instance. The list is empty if the request must wait.

        If several instances have room, the best one is chosen by these criteria, in this order: it runs no urgent
        request, its steps meet the TPOT SLO, it runs no long request, and its load is the lowest.

        If no instance has room, dispatch the request to an instance that is merging or splitting. If that is also
        impossible, reserve an instance for the request, and update `split_at_s`.
        """
        config, room = self.config, self.room
        if options := room.by_load(room.with_room(request)):
            instance = min(options, key=lambda i: (i.runs_urgent, estimates.is_slow(i, request, config.tpot_slo_s)))
            why = "least loaded with room" + (", beside urgent requests" if instance.runs_urgent else "")
            return [self._dispatch(instance, request, why)]
        if (joined := room.joinable(request)) is not None:
            why = room.join(joined, request)
            return [Dispatch(request.request_id, joined.id, f"{why}, and no other has room")]
        room.reserve_for(request)
        if not room.unsteady:  # a transformation under way may make room
            degree = max((i.degree for i in room.merged), default=self.view.base_degree)
            at_s = estimates.split_time_s(self.view, request, degree, config.burst_wait_s, config.ttft_slo_s)
            self.split_at_s = at_s if self.split_at_s is None else min(self.split_at_s, at_s)
        return []

    def _place_long(self, request: WaitingRequest) -> list[Action]:
        """Return the actions for a long request.

        - If instances have room now, dispatch the request to the one with the lowest tensor-parallel degree.
        - If an instance is large enough but has no room now, let the request wait. If the request would miss its TTFT
          SLO by waiting, merge one more group of instances instead (`_second_merge`).
        - If no instance is large enough, merge a group of instances. If no group can merge, split a merged instance
          that has released no weights. Its devices can then merge again with more KV cache.
        """
        room, size = self.room, request.max_total_tokens
        if options := room.with_room(request):
            instance = min(options, key=lambda i: (i.degree, room.load(i), i.id))
            return [self._dispatch(instance, request, "the least degree with room for a long request")]
        holding = [
            i for i in room.merged if room.is_steady(i) and i.paused_degree is None and i.capacity_tokens >= size
        ]
        coming = any(tokens >= size for tokens, _ in self.groups.coming)
        if not coming and not holding:
            merge = self.groups.merge(request, close=True)
            return self.groups.split_to_release(request) if merge is None else merge
        merge = None if coming or self._long_waits else self._second_merge(request, holding)
        if merge is None:
            self._long_waits = True
            room.reserve_for(request)
            room.reserve_in_transition(request)
        return merge or []

    def _second_merge(self, request: WaitingRequest, holding: list[InstanceView]) -> list[Action] | None:
        """Return the actions that merge one more group for a request, or None if the request must wait.

        The group merges if the request would miss its TTFT SLO by waiting for the instances `holding`, and if the merge
        gives the first token earlier. If a short request lacks room, the group does not merge.
        """
        view = self.view
        slo_s = self.config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        if slo_s is None or self.split_at_s is not None:
            return None
        wait_s = cache(lambda: estimates.first_token_s(view, self.room, holding, request))
        return self.groups.merge(
            request, pays=lambda merge_s: estimates.merge_pays(view, request, wait_s(), merge_s, slo_s)
        )

    def _dispatch(self, instance: InstanceView, request: WaitingRequest, why: str) -> Dispatch:
        load = self.room.load(instance)
        self.room.assign(instance, request)
        self.settled.add(request.request_id)
        return Dispatch(request.request_id, instance.id, f"{why}: TP{instance.degree}, load {load:.2f}")
