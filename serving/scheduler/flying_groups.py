"""Groups that the policy `flying` makes: which instances may merge, for whom, and what will be there."""

from collections.abc import Callable, Container, Iterable, Iterator

from serving.scheduler import estimates
from serving.scheduler.actions import Action, ScaleDown, ScaleUp
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.instance_facts import fits_split
from serving.scheduler.pausing import PauseBudget
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, DegreeLimits, InstanceView, RunningRequest, WaitingRequest


def is_urgent(request: WaitingRequest | RunningRequest) -> bool:
    """It has a group of its own, or shares one with other urgent requests."""
    return request.priority < 0


def runs_urgent(instance: InstanceView) -> bool:
    """Some of its requests are urgent."""
    return instance.first_priority < 0


class FlyingGroups:
    """The groups of one call of `decide`.

    Attributes:
        busy: devices that no merge may take.
        coming: tokens and slots of instances that will be there, above the base degree.
    """

    def __init__(self, view: ClusterView, room: Room, config: FlyingConfig, budget: PauseBudget):
        self.view, self.room, self.config, self._budget = view, room, config, budget
        self.busy = {device for instance in room.unsteady.values() for device in instance.devices}
        groups = {
            (i.transition_to, i.id // i.transition_to): i
            for i in room.unsteady.values()
            if i.transition_to is not None and i.transition_to > view.base_degree and not i.draining
        }
        self.coming = [(view.capacity_to_come(i), view.limits[to].max_requests) for (to, _), i in groups.items()]
        self._candidates: dict[tuple[int, bool], list[tuple[int, ...]]] = {}
        """Groups for urgent requests that were not looked at yet, by degree and whether requests are to pause."""
        self._mergeable: dict[int, list[tuple[tuple[int, ...], tuple[InstanceView, ...]]]] = {}
        """Groups of a degree that might merge when urgent requests first asked for one: devices and members."""

    def members(self, devices: tuple[int, ...], degree: int) -> tuple[InstanceView, ...] | None:
        """Instances that may merge into one of `degree`; None where some are not there, or have paused requests."""
        if not self.busy.isdisjoint(devices) or (devices, degree) in self.view.refused:
            return None
        members = self.room.parts(devices)
        if members is None or not all(self.room.takes(i) and i.paused_degree is None for i in members):
            return None
        return members

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
        for limits in reversed(self.view.degrees):
            above = self.config.urgent_degree is not None and limits.degree > self.config.urgent_degree
            if above or limits.degree <= self.view.base_degree or not limits.ready:
                continue
            key = limits.degree, pause
            if key not in self._candidates:
                self._candidates[key] = self._find_candidates(limits, pause)
            candidates = self._candidates[key]
            while candidates:
                if (members := self.members(devices := candidates.pop(), limits.degree)) is not None:
                    return limits.degree, devices, members
        return None

    def _find_candidates(self, limits: DegreeLimits, pause: bool) -> list[tuple[int, ...]]:
        """Groups for urgent requests, that with the fewest requests and tokens last."""
        if limits.degree not in self._mergeable:
            free = self.view.free_groups(limits.degree)
            groups = ((devices, self.members(devices, limits.degree)) for devices in free)
            self._mergeable[limits.degree] = [(devices, members) for devices, members in groups if members is not None]
        found = []
        for devices, members in self._mergeable[limits.degree]:
            if self._budget.used_up(devices) or (pause and not self._may_pause(members)):
                continue
            running = sum(len(i.running) for i in members)
            if pause or running < limits.max_requests:
                found.append((running, sum(i.used_tokens for i in members), devices))
        return [devices for _, _, devices in sorted(found, reverse=True)]

    def _may_pause(self, members: tuple[InstanceView, ...]) -> bool:
        """None of their requests is urgent, and all have one degree."""
        return len({i.degree for i in members}) == 1 and not any(map(runs_urgent, members))

    def merge(
        self, request: WaitingRequest, claim: bool = False, pays: Callable[[float | None], bool] | None = None
    ) -> list[Action] | None:
        """Merge a group of the least degree that holds a request; nothing where it waits for a group to be empty, None
        where there is none.

        Args:
            claim: keep others from a group that has to be emptied first.
            pays: whether to merge where the request has its first token that many seconds later; None: not known.
        """
        view, room, size = self.view, self.room, request.max_total_tokens
        for limits, kept in self._holding(size):
            capacity = view.kept_tokens(limits.degree) if kept else limits.capacity_tokens
            groups = sorted(self._groups(limits, with_slot=not claim), key=lambda it: it[0])
            for _, devices, members in groups:
                free = capacity - sum(i.capacity_tokens - room.free(i) for i in members)
                running = sum(len(i.running) for i in members)
                if free >= room.need(request) and running < limits.max_requests:
                    if pays is not None and not pays(estimates.merge_s(view, members, limits.degree, request)):
                        continue
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

    def _groups(
        self, limits: DegreeLimits, with_slot: bool
    ) -> Iterator[tuple[int, tuple[int, ...], tuple[InstanceView, ...]]]:
        """Groups that may merge to a degree, with the tokens that they have in use.

        Args:
            with_slot: leave out those none of whose instances can run one more request, where the instance that they
                would make could not either.
        """
        view, degree = self.view, limits.degree
        groups: Iterable[tuple[int, ...]] = view.groups(degree)
        base = view.limits[view.base_degree]
        if with_slot and limits.max_requests * base.degree <= base.max_requests * degree:
            starts = {instance.id - instance.id % degree for instance in self.room.by_load()}
            groups = (tuple(range(start, start + degree)) for start in sorted(starts))
        for devices in groups:
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
