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
        coming: (free tokens, free slots) of each instance that a running or requested merge will create.
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
        """Return the instances on `devices` if they may merge to `degree` in this decision. If not, return None.

        There must be at least two instances, and they must cover exactly these devices. Each instance must accept new
        requests (`Room`) and have no paused requests. The merge must not have been refused recently.
        """
        if (devices, degree) in self.view.refused:
            return None
        members = self.room.parts(devices)
        if members is None or not all(self.room.is_open(i) and i.paused_degree is None for i in members):
            return None
        return members

    def mergeable(self, degree: int) -> list[tuple[tuple[int, ...], Members]]:
        """Return `(devices, instances)` of each group of instances that may merge to `degree`.

        The method `members` has the conditions.
        """
        groups = ((devices, self.members(devices, degree)) for devices in self.view.groups(degree))
        return [(devices, members) for devices, members in groups if members is not None]

    def close(self, members: Members) -> None:
        """Close instances: in this decision, they get no more requests and do not merge a second time."""
        for instance in members:
            self.room.close(instance)

    def reserve_coming(self, request: WaitingRequest) -> bool:
        """Reserve room for a request on an instance that a merge will create (`coming`).

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

        Return None if no group is suitable. The degree is the highest degree that has compiled programs and a suitable
        group, at most `FlyingConfig.urgent_degree`. Of several suitable groups, choose the group with the fewest
        running requests, and then the group with the fewest used tokens. A group is not suitable if requests of one of
        its devices have paused too long (`PauseBudget`).

        Args:
            pause: whether the running requests of the group will pause. If True, the instances of a suitable group have
                the same degree and run no urgent request. If False, a suitable group runs fewer requests than the
                merged instance has slots.
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
        """Return the action that merges a group of instances for a long request. Close the group to other requests.

        Return None if no group can merge. The group has the lowest degree at which a merged instance can hold the
        request (`_holding`), and at which a group has room and a free slot. Of several such groups, choose the group
        with the fewest used tokens.

        Args:
            close: whether to stop at the first degree that has groups but no group with room. If True, the group with
                the fewest used tokens is then closed, so that it can merge later, and the result is an empty list.
            pays: further condition for the merge. Its argument is the estimated time from now to the first token after
                the merge, in seconds. None: the time is unknown.
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
        """Yield each degree whose merged instances can hold a request of `size` tokens, as `(limits, kept)`.

        The lowest degree comes first. `kept` tells whether the merged instance keeps all weights. If not, some weights
        become KV cache. Degrees without all weights are yielded only if no degree can hold the request with all
        weights.
        """
        view = self.view
        above = [limits for limits in view.degrees if limits.degree > view.base_degree and limits.ready]
        keeping = [limits for limits in above if view.kept_tokens(limits.degree) >= size]
        yield from ((limits, True) for limits in keeping)
        if not keeping:
            yield from ((limits, False) for limits in above if limits.capacity_tokens >= size)

    def split_to_release(self, request: WaitingRequest) -> list[Action]:
        """Return the action that splits a merged instance so that its devices can merge again with more KV cache.

        The instance kept all its weights. The second merge can turn weights into KV cache, so that `request` fits. Of
        several such instances, choose the one with the fewest used tokens, and close it to other requests. Return an
        empty list if there is no such instance, or if the chosen instance cannot split now.
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
