"""Flying Serving's policy: groups of a high degree while few requests are there, for urgent and for long ones;
instances of the base degree for bursts."""

import functools

from serving.scheduler.actions import Action, Preempt, ScaleDown, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.flying_groups import is_urgent, runs_urgent
from serving.scheduler.flying_round import FlyingRound
from serving.scheduler.load_watch import LoadWatch
from serving.scheduler.pausing import PauseBudget, misfits
from serving.scheduler.room import KeptRoom, Room
from serving.scheduler.view import ClusterView, InstanceView


class FlyingPolicy:
    """See docs/scheduling.md. It remembers the load, and for how long requests have paused on each device."""

    name = "flying"
    pauses = True
    """It lets paused requests go on itself: see `Scheduler`."""

    def __init__(self, config: FlyingConfig | None = None, admission: Admission | None = None):
        self.config = config or FlyingConfig()
        self.admission = admission or Admission()
        self.load = LoadWatch(self.config)
        self._index = self.admission.index()
        self._budget = PauseBudget(self.config.max_pause_s)
        self._room = KeptRoom(self.config.reserved_growth)
        self._for_load: set[tuple[int, ...]] = set()
        """Devices of groups that were made as there were few requests."""
        self._for_urgent: set[tuple[int, ...]] = set()
        """Devices of groups that were made for urgent requests, and that others have moved to."""
        self._split_at_s: float | None = None
        """When groups are to split for short requests that found no room when decisions were last made."""

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        index, longest = self._index, view.longest
        index.update(view.queue)
        rejects = self.admission.turn_away(view, index, longest.capacity_tokens, f"a TP{longest.degree} instance")
        gone = {reject.request_id for reject in rejects}
        room = self._room.of(view)
        paused = [instance for instance in room.merged.values() if instance.paused_degree is not None]
        self._budget.update(view.now_s, (device for instance in paused for device in instance.devices))
        late = self._split_at_s is not None and view.now_s >= self._split_at_s
        self.load.update(view, room.num_requests + len(index), late)
        urgent = [r for r in index.urgent(self.config.lookahead) if r.request_id not in gone and not r.beyond_share]
        round_ = FlyingRound(view, room, self.config, self._budget)
        actions: list[Action] = [*rejects]
        present = {instance.devices for instance in room.merged.values()}
        self._for_load &= present
        changing = {device for instance in room.unsteady.values() for device in instance.devices}
        self._for_urgent = {it for it in self._for_urgent if it in present or not changing.isdisjoint(it)}
        largest = functools.cache(view.with_hidden(index.largest))
        # While groups are to be there, none splits but those above paused requests.
        for instance in paused if self.load.bound else list(room.merged.values()):
            waiting = largest(instance.capacity_tokens)
            if not room.facts.is_settled(instance, waiting) and room.takes(instance):
                actions += self._released(view, room, round_, instance, bool(urgent), waiting)
        for request in urgent:
            actions += round_.place_urgent(request)
        self._for_urgent |= round_.moved
        for instance in paused:
            room.close(instance)  # it is for urgent requests alone
        for request in index.ordered(view.now_s):
            if request.request_id in gone or request.request_id in round_.settled:
                continue
            actions += round_.place(request)
            if round_.num_unplaced >= self.config.lookahead:
                break
        self._split_at_s = round_.split_at_s
        if self.load.bound:
            actions += self._bound(view, room, round_)
        return actions

    # Groups split

    def _released(
        self, view: ClusterView, room: Room, round_: FlyingRound, instance: InstanceView, urgent: bool, waiting: int
    ) -> list[Action]:
        """Split a group that is not needed any more, or whose paused requests have their turn.

        Args:
            urgent: urgent requests wait.
            waiting: tokens of the largest request that waits and that the group could hold.
        """
        if instance.paused_degree is not None:
            return self._resumed(view, room, instance, urgent)
        if self._serves_urgent(instance, urgent):
            return []
        long = view.is_long(size := max(instance.largest, waiting))
        degree = min(view.kept_degree_for(size) or instance.degree, instance.degree) if long else view.base_degree
        if degree >= instance.degree or not room.facts.fits_split(instance, degree):
            if degree == view.base_degree and not instance.running:
                room.close(instance)
            else:
                room.facts.settle(instance, waiting)
            return []
        if (instance.devices, degree) in view.refused:
            return []
        room.close(instance)
        round_.groups.busy.update(instance.devices)
        if long:
            why = f"TP{degree} holds its long requests"
        else:
            why = f"{self.load.mean:.1f} requests a device: more replicas serve them sooner"
        return [ScaleDown(instance.devices, degree, why)]

    def _serves_urgent(self, instance: InstanceView, waiting: bool) -> bool:
        """A group is kept for urgent requests: not one that was made for a light load, and none that others were given
        to, while there are many: they would pause for the next urgent one."""
        if instance.devices in self._for_load or not (waiting or runs_urgent(instance)):
            return False
        mixed = not all(map(is_urgent, instance.running))
        return instance.devices in self._for_urgent or not (mixed and self.load.busy)

    def _resumed(self, view: ClusterView, room: Room, instance: InstanceView, urgent: bool) -> list[Action]:
        assert instance.paused_degree is not None, "the caller has looked"
        used_up = self._budget.used_up(instance.devices)
        if (instance.running or urgent) and not used_up:
            return []
        room.close(instance)
        if (instance.devices, instance.paused_degree) in view.refused:
            return []
        if left := misfits(view, instance):
            reason = (
                f"requests have paused for max_pause_s={self.config.max_pause_s:g}, and it does not fit beside them"
            )
            return [Preempt(request.request_id, reason=reason) for request in left]
        why = f"have paused for max_pause_s={self.config.max_pause_s:g}" if used_up else "go on: no urgent one is left"
        return [ScaleDown(instance.devices, instance.paused_degree, f"requests {why}")]

    # Groups bind

    def _bound(self, view: ClusterView, room: Room, round_: FlyingRound) -> list[Action]:
        """Merge whatever is below the highest degree that is ready, with weights kept."""
        actions: list[Action] = []
        degree = max((limits.degree for limits in view.degrees if limits.ready), default=view.base_degree)
        if degree <= view.base_degree:
            return []
        for devices in view.groups(degree):
            members = round_.groups.members(devices, degree)
            if members is None or sum(len(i.running) for i in members) > view.limits[degree].max_requests:
                continue
            for instance in members:
                room.close(instance)
            reason = f"{self.load.mean:.1f} requests a device: each is served sooner at TP{degree}"
            actions.append(ScaleUp(devices, degree, reason, release_weights=False))
            self._for_load.add(devices)
        return actions
