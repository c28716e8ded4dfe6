"""Flying Serving's policy: instances merge under light load, and merged instances split under heavy load.

Instances also merge for urgent requests and for long requests.
"""

from serving.scheduler.actions import Action, Preempt, ScaleDown, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.flying_round import FlyingRound
from serving.scheduler.load_watch import LoadWatch
from serving.scheduler.pausing import PauseBudget, misfits
from serving.scheduler.room import Room
from serving.scheduler.split_rule import fits_split
from serving.scheduler.view import ClusterView, InstanceView


class FlyingPolicy:
    """Policy `flying` (docs/scheduling.md): merges instances under light load, and splits them under heavy load.

    It also merges instances for long requests, and for urgent requests (priority below 0). Between decisions, it
    remembers:

    - the average load
    - how long requests were paused on each device (`PauseBudget`)
    - which instances were merged because of light load, and which for urgent requests
    - the time at which merged instances should split for short requests
    """

    name = "flying"
    pauses = True
    """Whether the policy resumes paused requests itself (see `Scheduler`)."""

    def __init__(self, config: FlyingConfig | None = None, admission: Admission | None = None):
        self.config = config or FlyingConfig()
        self.admission = admission or Admission()
        self.load = LoadWatch(self.config)
        self._budget = PauseBudget(self.config.max_pause_s)
        self._for_load: set[tuple[int, ...]] = set()
        """Devices of groups that were merged because of light load."""
        self._for_urgent: set[tuple[int, ...]] = set()
        """Devices of groups that were merged for urgent requests without pausing: see `FlyingRound.moved`."""
        self._split_at_s: float | None = None
        """Value of `FlyingRound.split_at_s` in the last decision."""

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution (`Policy.decide`)."""
        longest = view.longest
        rejects, queue = self.admission.screen(view, longest.capacity_tokens, f"a TP{longest.degree} instance")
        room = Room(view, self.config.reserved_growth)
        paused = [instance for instance in room.merged if instance.paused_degree is not None]
        self._budget.update(view.now_s, (device for instance in paused for device in instance.devices))
        self._update_load(view)
        self._forget_groups(room)
        urgent = [r for r in queue if r.priority < 0 and not r.beyond_share][: self.config.lookahead]
        round_ = FlyingRound(view, room, self.config, self._budget)
        actions: list[Action] = [*rejects]
        # Under light load only groups with paused requests split.
        for instance in paused if self.load.bound else room.merged:
            if room.is_open(instance):
                actions += self._split(view, room, instance, bool(urgent))
        for request in urgent:
            actions += round_.place_urgent(request)
        self._for_urgent |= round_.moved
        for instance in paused:
            room.close(instance)  # only urgent requests run there
        for request in queue:
            if request.request_id in round_.settled:
                continue
            actions += round_.place(request)
            if round_.num_unplaced >= self.config.lookahead:
                break
        self._split_at_s = round_.split_at_s
        if self.load.bound:
            actions += self._merge_all(view, round_)
        return actions

    def _update_load(self, view: ClusterView) -> None:
        late = self._split_at_s is not None and view.now_s >= self._split_at_s
        present = sum(len(i.running) + sum(map(len, i.paused)) for i in view.instances)
        self.load.update(view, present + len(view.queue), late)

    def _forget_groups(self, room: Room) -> None:
        """Forget groups that have split: remove their devices from `_for_load` and `_for_urgent`."""
        present = {instance.devices for instance in room.merged}
        self._for_load &= present
        changing = {device for instance in room.unsteady for device in instance.devices}
        self._for_urgent = {it for it in self._for_urgent if it in present or not changing.isdisjoint(it)}

    # Splits

    def _split(self, view: ClusterView, room: Room, instance: InstanceView, urgent: bool) -> list[Action]:
        """Return the actions that split a merged instance. The list is empty if the instance stays merged.

        The instance stays merged if it serves urgent requests (`_serves_urgent`), if its requests do not fit the new
        instances, or if the split was refused recently.

        If a long request runs on the instance or waits for it, the instance splits to the lowest degree that holds this
        request with all weights resident. If there is no long request, the instance splits to the base degree. If the
        instance has paused requests, these rules do not apply, and `_resume` decides.

        Args:
            urgent: whether urgent requests wait.
        """
        if instance.paused_degree is not None:
            return self._resume(view, room, instance, instance.paused_degree, urgent)
        if self._serves_urgent(instance, urgent):
            return []
        size = max(instance.largest, view.largest_waiting(instance.capacity_tokens))
        long = view.is_long(size)
        degree = min(view.kept_degree_for(size) or instance.degree, instance.degree) if long else view.base_degree
        if degree >= instance.degree or not fits_split(view, instance, degree):
            return []
        if (instance.devices, degree) in view.refused:
            return []
        room.close(instance)
        if long:
            why = f"TP{degree} holds its long requests"
        else:
            why = f"{self.load.mean:.1f} requests a device: more replicas serve them sooner"
        return [ScaleDown(instance.devices, degree, why)]

    def _serves_urgent(self, instance: InstanceView, urgent_waits: bool) -> bool:
        """Return whether a merged instance stays merged for urgent requests that run on it or wait in the queue.

        Without urgent requests, the result is False. With urgent requests, the reason for the merge decides:

        - Light load: False.
        - An urgent request, with no other request paused (`_for_urgent`): True.
        - Any other reason: True if the load is not heavy, or if all requests on the instance are urgent.
        """
        if instance.devices in self._for_load or not (urgent_waits or instance.runs_urgent):
            return False
        mixed = any(request.priority >= 0 for request in instance.running)
        return instance.devices in self._for_urgent or not (mixed and self.load.busy)

    def _resume(self, view: ClusterView, room: Room, instance: InstanceView, degree: int, urgent: bool) -> list[Action]:
        """Return the actions that split a merged instance, so that its paused requests resume.

        The list is empty if requests run on the instance, or if urgent requests wait. When the pause has reached its
        time limit, these two conditions are ignored. The list is also empty if the split was refused recently.

        If some running requests would not fit beside the paused requests, the actions only preempt these running
        requests. A later decision then splits the instance.
        """
        used_up = self._budget.used_up(instance.devices)
        if (instance.running or urgent) and not used_up:
            return []
        room.close(instance)
        if (instance.devices, degree) in view.refused:
            return []
        if left := misfits(view, instance):
            reason = (
                f"requests have paused for max_pause_s={self.config.max_pause_s:g}, and it does not fit beside them"
            )
            return [Preempt(request.request_id, reason=reason) for request in left]
        why = f"have paused for max_pause_s={self.config.max_pause_s:g}" if used_up else "go on: no urgent one is left"
        return [ScaleDown(instance.devices, degree, f"requests {why}")]

    # Merges under light load

    def _merge_all(self, view: ClusterView, round_: FlyingRound) -> list[Action]:
        """Return actions that merge all instances to the highest degree whose programs are compiled.

        All weights stay resident. If the running requests of a group of instances exceed the slots of the merged
        instance, this group does not merge.
        """
        actions: list[Action] = []
        degree = max((limits.degree for limits in view.degrees if limits.ready), default=view.base_degree)
        if degree <= view.base_degree:
            return []
        for devices, members in round_.groups.mergeable(degree):
            if sum(len(i.running) for i in members) > view.limits[degree].max_requests:
                continue
            round_.groups.close(members)
            reason = f"{self.load.mean:.1f} requests a device: each is served sooner at TP{degree}"
            actions.append(ScaleUp(devices, degree, reason, release_weights=False))
            self._for_load.add(devices)
        return actions
