"""One decision of the policy `flying`: which request goes where."""

from collections.abc import Iterator

from serving.scheduler.actions import Action, Dispatch, Preempt, RunningRequests, ScaleDown, ScaleUp
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.pausing import PauseBudget, in_the_way
from serving.scheduler.room import Room, fits_split
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest

_RUNNING: dict[str, RunningRequests] = {"hard": "pause", "soft": "migrate", "sequential": "wait"}
"""What becomes of requests where a group is made for an urgent one, by `FlyingConfig.preemption`."""


def is_urgent(request: WaitingRequest | RunningRequest) -> bool:
    """It has a group of its own, or shares one with other urgent requests."""
    return request.priority < 0


class FlyingRound:
    """One call of `decide`: the room that is left, and what waits for it.

    Attributes:
        settled: urgent requests that have a place, or wait for a group that is being made.
        moved: devices of groups for urgent requests to which others move as well.
        busy: devices that no merge may take.
        num_unplaced: requests that found no place.
        crowded_s: since when the first short request waits that found no room; None where all did.
    """

    def __init__(self, view: ClusterView, room: Room, config: FlyingConfig, budget: PauseBudget):
        self.view, self.room, self.config, self._budget = view, room, config, budget
        self.settled: set[str] = set()
        self.moved: set[tuple[int, ...]] = set()
        self.busy = {device for instance in room.unsteady.values() for device in instance.devices}
        self.num_unplaced = 0
        self.crowded_s: float | None = None
        self._given: set[int] = set()
        """Instances that requests were given to, which the snapshot does not show there."""
        self._in_vain = False
        """No group can be made for an urgent request: none can for another."""
        self._coming = [
            (self._kept(i), view.limits[i.transition_to].max_requests)
            for i in room.unsteady.values()
            if i.transition_to is not None and i.transition_to > view.base_degree and not i.draining
        ]
        """Tokens and slots of instances that will be there, above the base degree."""

    def _kept(self, instance: InstanceView) -> int:
        """Tokens at least that an instance in transition will hold."""
        degree = instance.transition_to or instance.degree
        return max(self.view.kept_tokens(degree), instance.capacity_tokens if degree == instance.degree else 0)

    def members(self, devices: tuple[int, ...], degree: int) -> tuple[InstanceView, ...] | None:
        """Instances that may merge into one of `degree`; None where some are not there, or have paused requests."""
        members = self.room.members(devices)
        if len(members) < 2 or sum(i.degree for i in members) != degree or not self.busy.isdisjoint(devices):
            return None
        fine = all(self.room.takes(i) and i.paused_degree is None for i in members)
        return members if fine and (devices, degree) not in self.view.refused else None

    def _claim(self, members: tuple[InstanceView, ...]) -> None:
        for instance in members:
            self.room.close(instance)
            self.busy.update(instance.devices)

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
        for instance in [i for i in room.merged.values() if i.paused_degree is not None and room.takes(i)]:
            if room.has_slot(instance) and (going := in_the_way(view, instance, request, room.need(request))):
                room.close(instance)
                self.settled.add(request.request_id)
                reason = f"{request.request_id} is urgent and lacks its pages"
                return [Preempt(paused.request_id, reason=reason) for paused in going]
        if self._comes(request):
            self.settled.add(request.request_id)
            return []
        return self._bind(request)

    def _comes(self, request: WaitingRequest) -> bool:
        """A group that is being made will hold it."""
        for place, (tokens, slots) in enumerate(self._coming):
            if tokens >= self.room.need(request) and slots > 0:
                self._coming[place] = tokens - self.room.need(request), slots - 1
                return True
        return False

    def _bind(self, request: WaitingRequest) -> list[Action]:
        """Make a group: of the highest degree that there can be, where the fewest requests run."""
        how = _RUNNING[self.config.preemption]
        found = None if self._in_vain else self._group_for_urgent(pause=how == "pause")
        if found is None and how == "pause" and not self._in_vain:  # other urgent requests run there: they move
            how, found = "migrate", self._group_for_urgent(pause=False)
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
        self._claim(members)
        if how != "pause":
            self.moved.add(devices)
        self.settled.add(request.request_id)
        limits = self.view.limits[degree]
        kept = sum(i.capacity_tokens for i in members)
        self._coming.append((kept - self.room.need(request), limits.max_requests - running - 1))
        return [*actions, scale_up]

    def _group_for_urgent(self, pause: bool) -> tuple[int, tuple[int, ...], tuple[InstanceView, ...]] | None:
        view = self.view
        for limits in reversed(view.degrees):
            above = self.config.urgent_degree is not None and limits.degree > self.config.urgent_degree
            if above or limits.degree <= view.base_degree or not limits.ready:
                continue
            found = []
            for devices in view.groups(limits.degree):
                members = self.members(devices, limits.degree)
                if members is None or self._budget.used_up(devices) or (pause and not self._may_pause(members)):
                    continue
                running = sum(len(i.running) for i in members)
                if pause or running < limits.max_requests:
                    found.append((running, sum(i.used_tokens for i in members), devices, members))
            if found:
                _, _, devices, members = min(found, key=lambda it: it[:3])
                return limits.degree, devices, members
        return None

    def _may_pause(self, members: tuple[InstanceView, ...]) -> bool:
        """None of their requests is urgent, and all have one degree."""
        if len({i.degree for i in members}) > 1:
            return False
        return not any(is_urgent(request) for i in members for request in i.running)

    # Others

    def place(self, request: WaitingRequest) -> list[Action]:
        """What becomes of a request: nothing, where it waits."""
        long = self.view.is_long(request.max_total_tokens)
        actions = self._place_long(request) if long else self._place_short(request)
        self.num_unplaced += not any(isinstance(action, Dispatch) for action in actions)
        return actions

    def _place_short(self, request: WaitingRequest) -> list[Action]:
        """On the least-loaded instance with room; on one that runs urgent requests only if there is no other."""
        room, need, found = self.room, self.room.need(request), None
        for instance in room.by_load():
            if instance.capacity_tokens < request.max_total_tokens or room.free(instance) < need:
                continue
            if not any(is_urgent(other) for other in instance.running):
                return [self._dispatch(instance, request, "least loaded with room")]
            found = found or instance
        if found is not None:
            return [self._dispatch(found, request, "least loaded with room, beside urgent requests")]
        room.keep_for(request)
        if not room.unsteady:  # else there may be room once it has ended
            self.crowded_s = request.since_s if self.crowded_s is None else min(self.crowded_s, request.since_s)
        return []

    def _place_long(self, request: WaitingRequest) -> list[Action]:
        """On an instance of the least degree that has room; else wait for one that will have; else merge."""
        view, room = self.view, self.room
        if options := room.with_room(request):
            instance = min(options, key=lambda i: (i.degree, room.load(i), i.id))
            return [self._dispatch(instance, request, "the least degree with room for a long request")]
        size = request.max_total_tokens
        there = (i for i in room.merged.values() if not i.draining and i.transition_to is None)
        if any(tokens >= size for tokens, _ in self._coming) or any(
            i.capacity_tokens >= size and i.paused_degree is None for i in there
        ):
            room.keep_for(request)
            return []
        for limits, kept in self._holding(size):
            capacity = view.kept_tokens(limits.degree) if kept else limits.capacity_tokens
            groups = sorted(self._groups(limits.degree), key=lambda it: it[0])
            for _, devices, members in groups:
                free = capacity - sum(i.capacity_tokens - room.free(i) for i in members)
                running = sum(len(i.running) for i in members)
                if free >= room.need(request) and running < limits.max_requests:
                    self._claim(members)
                    self._coming.append((capacity, limits.max_requests))
                    how = "with weights kept" if kept else "with weights released"
                    reason = f"{request.request_id} may grow to {size} tokens, which TP{limits.degree} holds {how}"
                    return [ScaleUp(devices, limits.degree, reason, release_weights=not kept)]
            if groups:  # it has to be emptied first
                self._claim(groups[0][2])
                self._coming.append((capacity, limits.max_requests))
                return []
        return self._split_kept(request)

    def _holding(self, size: int):
        """Degrees that hold a request, and whether they keep weights for it: first those that do, the least first."""
        view = self.view
        above = [limits for limits in view.degrees if limits.degree > view.base_degree and limits.ready]
        yield from ((limits, True) for limits in above if view.kept_tokens(limits.degree) >= size)
        if not any(view.kept_tokens(limits.degree) >= size for limits in above):
            yield from ((limits, False) for limits in above if limits.capacity_tokens >= size)

    def _groups(self, degree: int) -> Iterator[tuple[int, tuple[int, ...], tuple[InstanceView, ...]]]:
        """Groups that may merge to a degree, with the tokens that they have in use."""
        for devices in self.view.groups(degree):
            if (members := self.members(devices, degree)) is not None:
                yield sum(i.capacity_tokens - self.room.free(i) for i in members), devices, members

    def _split_kept(self, request: WaitingRequest) -> list[Action]:
        """Split a group that keeps its weights and holds too little for that, so that a merge can release them."""
        view, room = self.view, self.room
        options = [
            i
            for i in room.merged.values()
            if room.takes(i)
            and i.id not in self._given
            and i.paused_degree is None
            and view.keeps_weights(i)
            and view.limits[i.degree].capacity_tokens >= request.max_total_tokens
        ]
        for instance in sorted(options, key=lambda i: (i.used_tokens, i.id)):
            room.close(instance)
            self.busy.update(instance.devices)
            if (
                fits_split(view, instance, view.base_degree)
                and (instance.devices, view.base_degree) not in view.refused
            ):
                reason = (
                    f"{request.request_id} may grow to {request.max_total_tokens} tokens: weights are to be released"
                )
                return [ScaleDown(instance.devices, view.base_degree, reason)]
            return []
        return []

    def _dispatch(self, instance: InstanceView, request: WaitingRequest, why: str) -> Dispatch:
        load = self.room.load(instance)
        self.room.give(instance, request)
        self._given.add(instance.id)
        self.settled.add(request.request_id)
        return Dispatch(request.request_id, instance.id, f"{why}: TP{instance.degree}, load {load:.2f}")
