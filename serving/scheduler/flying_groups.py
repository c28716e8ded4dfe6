"""Choice of the instances that the policy `flying` merges."""

from collections.abc import Callable, Iterator

from serving.scheduler import estimates
from serving.scheduler.actions import Action, ScaleUp
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.pausing import PauseBudget
from serving.scheduler.room import Room
from serving.scheduler.split_rule import split_to_release
from serving.scheduler.view import ClusterView, DegreeLimits, InstanceView, WaitingRequest

Members = tuple[InstanceView, ...]


class FlyingGroups:
    """Groups of instances that may merge in one decision of the policy `flying`.

    Attributes:
        coming: `(free tokens, free slots)` of each merged instance that will exist soon. Its merge is in progress, or
            this decision requests or prepares its merge.
    """

    def __init__(self, view: ClusterView, room: Room, config: FlyingConfig, budget: PauseBudget):
        self.view, self.room, self.config, self._budget = view, room, config, budget
        groups = {
            (i.transition_to, i.id // i.transition_to): i
            for i in room.unsteady
            if i.transition_to is not None and i.transition_to > view.base_degree and not i.draining
        }
        self.coming = [(view.final_capacity(i), view.limits[to].max_requests) for (to, _), i in groups.items()]

    def members(self, devices: tuple[int, ...], degree: int) -> Members | None:
        """Return the instances on `devices` if they may merge to `degree` in this decision, or None if they may not.

        There must be at least two instances, and they must cover exactly these devices. Each instance must accept new
        requests (`Room.is_open`) and have no paused requests. The merge must not have been refused recently.
        """
        if (devices, degree) in self.view.refused:
            return None
        members = self.room.parts(devices)
        if members is None or not all(self.room.is_open(i) and i.paused_degree is None for i in members):
            return None
        return members

    def mergeable(self, degree: int) -> list[tuple[tuple[int, ...], Members]]:
        """Return `(devices, instances)` of each group that may merge to `degree` by the conditions of `members`."""
        groups = ((devices, self.members(devices, degree)) for devices in self.view.groups(degree))
        return [(devices, members) for devices, members in groups if members is not None]

    def close(self, members: Members) -> None:
        """Close instances: they get no more requests and no second merge in this decision."""
        for instance in members:
            self.room.close(instance)

    def reserve_coming(self, request: WaitingRequest) -> bool:
        """Reserve room for a request on a merged instance that will exist soon (`coming`).

        Return False if none of these instances has enough room.
        """
        need = self.room.need(request)
        for place, (tokens, slots) in enumerate(self.coming):
            if tokens >= need and slots > 0:
                self.coming[place] = tokens - need, slots - 1
                return True
        return False

    def for_urgent(self, pause: bool) -> tuple[int, tuple[int, ...], Members] | None:
        """Return `(degree, devices, members)` of the group of instances to merge for an urgent request.

        A group is suitable if the programs of the degree are compiled, no device of the group has used up its
        `PauseBudget`, and the condition of `pause` holds. The highest degree with a suitable group is chosen, at most
        `FlyingConfig.urgent_degree`. At this degree, the group with the fewest running requests is chosen, and among
        equal groups the group with the fewest used tokens. The result is None if no group is suitable.

        Args:
            pause: whether to pause the running requests of the group. If True, the instances of the group must have
                equal degrees and run no urgent request. If False, the merged instance must have slots for all running
                requests and for the urgent request.
        """
        for limits in reversed(self.view.degrees):
            above = self.config.urgent_degree is not None and limits.degree > self.config.urgent_degree
            if above or limits.degree <= self.view.base_degree or not limits.ready:
                continue
            options = []
            for devices, members in self.mergeable(limits.degree):
                running = sum(len(i.running) for i in members)
                if self._budget.used_up(devices) or (pause and not _can_pause(members)):
                    continue
                if pause or running < limits.max_requests:
                    options.append((running, sum(i.used_tokens for i in members), devices, members))
            if options:
                _, _, devices, members = min(options, key=lambda option: option[:3])
                return limits.degree, devices, members
        return None

    def merge(
        self, request: WaitingRequest, close: bool = False, pays: Callable[[float | None], bool] | None = None
    ) -> list[Action] | None:
        """Return the action that merges a group of instances for a long request, or None if no group can merge.

        The degrees at which a merged instance can hold the request (`_holding`) are tried in order. At each degree,
        groups with fewer used tokens are tried first. The first group with room and a free slot merges, and is closed
        to other requests.

        Args:
            close: whether to prepare a later merge if no group has room. If True, only the lowest degree with groups is
                tried. If none of its groups has room, the group with the fewest used tokens is closed, so that it can
                merge later. The result is then an empty list.
            pays: function that accepts or refuses a merge. Its argument is the estimated seconds from now to the first
                token after the merge, or None if unknown.
        """
        view, room, size = self.view, self.room, request.max_total_tokens
        for limits, kept in self._holding(size):
            capacity = view.kept_tokens(limits.degree) if kept else limits.capacity_tokens
            groups = [
                (sum(i.capacity_tokens - room.free(i) for i in members), devices, members)
                for devices, members in self.mergeable(limits.degree)
            ]
            groups.sort(key=lambda group: group[0])
            for used, devices, members in groups:
                running = sum(len(i.running) for i in members)
                if capacity - used < room.need(request) or running >= limits.max_requests:
                    continue
                if pays is not None and not pays(estimates.merge_s(view, members, limits.degree, request)):
                    continue
                self.close(members)
                self.coming.append((capacity, limits.max_requests))
                how = "with weights kept" if kept else "with weights released"
                reason = f"{request.request_id} may grow to {size} tokens, which TP{limits.degree} holds {how}"
                return [ScaleUp(devices, limits.degree, reason, release_weights=not kept)]
            if groups and close:
                self.close(groups[0][2])
                self.coming.append((capacity, limits.max_requests))
                return []
        return None

    def _holding(self, size: int) -> Iterator[tuple[DegreeLimits, bool]]:
        """Yield `(limits, kept)` for each degree at which an instance can hold `size` tokens, lowest degree first.

        If some degrees can hold the tokens with all weights resident, yield these degrees, with `kept` True. If there
        is no such degree, yield the degrees that can hold the tokens with released weights, with `kept` False.
        """
        view = self.view
        above = [limits for limits in view.degrees if limits.degree > view.base_degree and limits.ready]
        keeping = [limits for limits in above if view.kept_tokens(limits.degree) >= size]
        yield from ((limits, True) for limits in keeping)
        if not keeping:
            yield from ((limits, False) for limits in above if limits.capacity_tokens >= size)

    def split_to_release(self, request: WaitingRequest) -> list[Action]:
        """Return the action that splits a merged instance so that its devices can merge again with more KV cache.

        The instance must have released no weights. In the second merge, weights become KV cache, so that `request`
        fits. If several instances qualify, the instance with the fewest used tokens is chosen. It is closed to other
        requests. The list is empty if no instance qualifies, or if the chosen instance cannot split now.
        """
        view, room = self.view, self.room
        options = [
            i
            for i in room.merged
            if room.is_open(i)
            and not room.new_prompt_tokens(i)
            and i.paused_degree is None
            and view.keeps_weights(i)
            and view.limits[i.degree].capacity_tokens >= request.max_total_tokens
        ]
        if not options:
            return []
        instance = min(options, key=lambda i: (i.used_tokens, i.id))
        split = split_to_release(view, room, instance, request)
        return [] if split is None else [split]


def _can_pause(members: Members) -> bool:
    """Return whether the running requests of a group of instances may pause.

    All instances must have the same degree, and no running request may be urgent.
    """
    return len({i.degree for i in members}) == 1 and not any(i.runs_urgent for i in members)
