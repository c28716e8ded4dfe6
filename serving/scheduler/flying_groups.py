"""Groups that the policy `flying` makes: which instances may merge, for whom, and what will be there."""

from collections.abc import Container, Iterator

from serving.scheduler import estimates
from serving.scheduler.actions import Action, ScaleDown, ScaleUp
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.pausing import PauseBudget
from serving.scheduler.room import Room, fits_split
from serving.scheduler.view import ClusterView, DegreeLimits, InstanceView, RunningRequest, WaitingRequest


def is_urgent(request: WaitingRequest | RunningRequest) -> bool:
    """It has a group of its own, or shares one with other urgent requests."""
    return request.priority < 0


class FlyingGroups:
    """The groups of one call of `decide`.

    Attributes:
        busy: devices that no merge may take.
        coming: tokens and slots of instances that will be there, above the base degree.
    """

    def __init__(self, view: ClusterView, room: Room, config: FlyingConfig, budget: PauseBudget):
        self.view, self.room, self.config, self._budget = view, room, config, budget
        self.busy = {device for instance in room.unsteady.values() for device in instance.devices}
        self.coming = [
            (self._kept(i), view.limits[i.transition_to].max_requests)
            for i in room.unsteady.values()
            if i.transition_to is not None and i.transition_to > view.base_degree and not i.draining
        ]

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

    def claim(self, members: tuple[InstanceView, ...]) -> None:
        """Keep requests and other merges away from instances that merge."""
        for instance in members:
            self.room.close(instance)
            self.busy.update(instance.devices)

    def comes(self, request: WaitingRequest) -> bool:
        """A group that is being made will hold it."""
        for place, (tokens, slots) in enumerate(self.coming):
            if tokens >= self.room.need(request) and slots > 0:
                self.coming[place] = tokens - self.room.need(request), slots - 1
                return True
        return False

    def for_urgent(self, pause: bool) -> tuple[int, tuple[int, ...], tuple[InstanceView, ...]] | None:
        """Degree, devices and members of a group for an urgent request: of the highest degree that there can be, where
        the fewest requests run, none of which is urgent where they are to pause. None where there is no such group."""
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

    def merge(
        self, request: WaitingRequest, claim: bool = False, sooner_than_s: float | None = None
    ) -> list[Action] | None:
        """Merge a group of the least degree that holds a request; nothing where it waits for a group to be empty, None
        where there is none.

        Args:
            claim: keep others from a group that has to be emptied first.
            sooner_than_s: only if the request has its first token in less time than that.
        """
        view, room, size = self.view, self.room, request.max_total_tokens
        for limits, kept in self._holding(size):
            capacity = view.kept_tokens(limits.degree) if kept else limits.capacity_tokens
            groups = sorted(self._groups(limits.degree), key=lambda it: it[0])
            for _, devices, members in groups:
                free = capacity - sum(i.capacity_tokens - room.free(i) for i in members)
                running = sum(len(i.running) for i in members)
                if sooner_than_s is not None:
                    merge_s = estimates.merge_s(view, members, limits.degree, request)
                    if merge_s is None or merge_s >= sooner_than_s:
                        continue
                if free >= room.need(request) and running < limits.max_requests:
                    self.claim(members)
                    self.coming.append((capacity, limits.max_requests))
                    how = "with weights kept" if kept else "with weights released"
                    reason = f"{request.request_id} may grow to {size} tokens, which TP{limits.degree} holds {how}"
                    return [ScaleUp(devices, limits.degree, reason, release_weights=not kept)]
            if groups and claim:  # it has to be emptied first
                self.claim(groups[0][2])
                self.coming.append((capacity, limits.max_requests))
                return []
        return None

    def _holding(self, size: int) -> Iterator[tuple[DegreeLimits, bool]]:
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

    def split_kept(self, request: WaitingRequest, given: Container[int]) -> list[Action]:
        """Split a group that keeps its weights and holds too little for that, so that a merge can release them.
        Instances of `given` have requests that the snapshot does not show."""
        view, room = self.view, self.room
        options = [
            i
            for i in room.merged.values()
            if room.takes(i)
            and i.id not in given
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
