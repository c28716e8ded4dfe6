"""Merges and splits of instances on a simulated host.

The members of a merge or split are the instances on the affected devices before the merge or split.
"""

from collections.abc import Sequence

from serving.scheduler import ScaleDown, ScaleUp
from serving.simulator.host import Host, drained_s, take_in
from serving.simulator.host_config import Refusal
from serving.simulator.instance import Change, SimInstance
from serving.simulator.pauses import deal, pause, put_back, resume


class GroupChanges:
    """Merges and splits of a simulated host, from start to end.

    Attributes:
        failing: pair (end in seconds, instances) for each running merge or split that will fail (`Faults`).
        waiting: pair (merge, instances) for each merge that waits until these instances run no requests.
    """

    def __init__(self, executor: Host):
        self._executor = executor
        self.failing: list[tuple[float, list[SimInstance]]] = []
        self.waiting: list[tuple[ScaleUp, list[SimInstance]]] = []

    def _check_group(self, devices: Sequence[int], degree: int) -> list[SimInstance]:
        if degree not in self._executor.limits:
            raise Refusal(f"TP{degree} is not a degree of this host, which has {sorted(self._executor.limits)}")
        members = [i for i in self._executor.instances if not set(devices).isdisjoint(i.devices)]
        if sorted(d for i in members for d in i.devices) != sorted(devices):
            raise Refusal(f"devices {list(devices)} do not consist of whole instances")
        if any(i.change is not None or i.waits_for is not None for i in members):
            raise Refusal(f"devices {list(devices)} are being transformed")
        for member in members:
            if member.has_paused and member.paused[0].degree != degree:
                lower = member.paused[0].degree
                raise Refusal(f"requests are paused on devices {list(member.devices)}: transform them to TP{lower}")
        return members

    def scale_up(self, action: ScaleUp) -> None:
        """Start a merge. Raises `Refusal` with the reason if the merge is not possible now.

        `action.running` says what happens to running requests. With "pause", they pause until the split. With "wait",
        `proceed` starts the merge after they have ended. With "migrate", they continue during the merge.
        """
        devices, degree, host = action.devices, action.degree, self._executor
        aligned = tuple(range(devices[0], devices[0] + degree)) if devices else ()
        if devices != aligned or devices[0] % degree:
            raise Refusal(f"devices {list(devices)} are not an aligned group of {degree}")
        members = self._check_group(devices, degree)
        if len(members) < 2:
            raise Refusal(f"devices {list(devices)} are one instance already")
        if action.running == "pause" and action.release_weights:
            raise Refusal("running='pause' needs release_weights=False: paused requests keep their pages")
        if action.running == "pause" and len({i.degree for i in members}) > 1:
            raise Refusal(f"the instances on devices {list(devices)} must have equal degrees for a pause")
        if host.failing_transformations > 0:
            host.failing_transformations -= 1
            self._fail_change(action, members, min(i.degree for i in members))
        elif action.running == "pause":
            pause(host, members, devices)
        elif action.running == "wait" and any(member.runs for member in members):
            self.waiting.append((action, members))
            for member in members:
                member.waits_for = action
        else:
            self._merge(action, members)

    def proceed(self) -> bool:
        """Start the waiting merges whose instances have no running requests left. Return whether a merge started."""
        due = [entry for entry in self.waiting if not any(member.runs for member in entry[1])]
        for entry in due:
            self.waiting.remove(entry)
            for member in entry[1]:
                member.waits_for = None
            self._merge(*entry)
        return bool(due)

    def _merge(self, action: ScaleUp, members: list[SimInstance]) -> None:
        host, lower = self._executor, min(i.degree for i in members)
        tokens = sum(i.used_tokens() for i in members)
        ready_s = max(drained_s(host, i) for i in members)
        kept = None if action.release_weights else sum(i.capacity_tokens for i in members)
        merged = host.new_instance(action.devices, kept)
        for member in members:
            take_in(host, member)
            member.joining, member.prompts = [], []
            merged.take_over(member.runs, member.steps)
        for member in members:
            merged.prefixes.take_idle(member.prefixes)
        host.replace(members, [merged])
        self._begin_change(merged, action, lower, lower, action.degree, tokens, ready_s)

    def scale_down(self, action: ScaleDown) -> None:
        """Start a split of an instance. Raises `Refusal` with the reason if the split is not possible now.

        If the instance runs no requests and its devices have paused requests, the paused requests resume at once.
        """
        devices, degree, host = action.devices, action.degree, self._executor
        members = self._check_group(devices, degree)
        if len(members) != 1 or members[0].degree <= degree or members[0].degree % degree:
            raise Refusal(f"devices {list(devices)} are not one instance of a degree above {degree}")
        (instance,) = members
        if not instance.has_paused:
            instance.paused = ()
            instance.count_room()
        elif instance.runs:
            dealt = deal(list(instance.runs.values()), instance.steps, list(instance.paused), host.config.page_size)
            if any(part is None for _, part in dealt):
                raise Refusal(f"the requests on devices {list(devices)} do not fit beside the paused requests there")
        if host.failing_transformations > 0:
            host.failing_transformations -= 1
            self._fail_change(action, members, degree)
            return
        if instance.paused and not instance.runs:
            resume(host, instance)
            return
        ready_s = drained_s(host, instance)
        take_in(host, instance)
        self._begin_change(instance, action, degree, instance.degree, degree, instance.used_tokens(), ready_s)

    def _begin_change(
        self,
        instance: SimInstance,
        action: ScaleUp | ScaleDown,
        lower: int,
        from_degree: int,
        to_degree: int,
        tokens: int,
        ready_s: float,
    ) -> None:
        cost = self._executor.config.transformation
        kept = instance.capacity_tokens <= instance.degree // lower * self._executor.limits[lower].capacity_tokens
        price = cost.change(from_degree, to_degree, tokens, kept)
        self._executor.tally.kv_bytes += price.kv_bytes
        self._executor.tally.weight_bytes += price.weight_bytes
        instance.change = Change(
            action,
            self._executor.now_s,
            cost.layers,
            cost.layers,
            lower,
            price.layer_s,
            price.pause_s + ready_s - self._executor.now_s,
            self._executor.config.layers_per_step,
            from_degree=from_degree,
            lane_tokens=self._executor.limits[lower].capacity_tokens,
        )
        self._executor.begin(instance)

    def _fail_change(self, action: ScaleUp | ScaleDown, members: list[SimInstance], lower: int) -> None:
        """Start a failing merge or split of the instances `members`. `lower` is the lower of the two degrees.

        The instances accept no requests until the merge or split ends. They then continue unchanged.
        """
        cost = self._executor.config.transformation
        price = cost.change(lower, action.degree, sum(i.used_tokens() for i in members))
        for member in members:
            member.change = Change(action, self._executor.now_s, 1, 1, lower, 0.0, 0.0, 1, fails=True)
        self.failing.append((self._executor.now_s + max(price.seconds(cost.layers), 1e-3), members))

    def end_failed(self) -> bool:
        """End each failing merge or split whose end time has come. Return whether a merge or split has ended."""
        due = [entry for entry in self.failing if entry[0] <= self._executor.now_s]
        for entry in due:
            self.failing.remove(entry)
            for member in entry[1]:
                member.change = None
        return bool(due)

    def end(self, instance: SimInstance) -> None:
        """End the merge or split of an instance, after all layers have switched.

        After a split, instances of the lower degree replace the instance.
        """
        change, instance.change = instance.change, None
        assert change is not None, "a change must be running"
        to_degree, now_s = change.action.degree, self._executor.now_s
        seconds = now_s - change.start_s
        self._executor.tally.changes.append((now_s, change.from_degree, to_degree, seconds))
        self._executor.timings.add_transformation(change.from_degree, to_degree, seconds)
        if isinstance(change.action, ScaleUp):
            self._executor.begin(instance)
            return
        parts = self._split(instance, to_degree)
        for part in parts:
            self._executor.begin(part)

    def _split(self, instance: SimInstance, degree: int) -> list[SimInstance]:
        """Replace an instance by instances of the lower degree `degree`, and return these instances.

        These are the paused instances on the same devices, or new instances if no instances are paused there. They
        receive the running requests and the cached prompts. A request that fits on none of them is preempted.
        """
        host = self._executor
        if instance.paused:
            parts = put_back(host, instance)
        else:
            starts = range(instance.devices[0], instance.devices[0] + instance.degree, degree)
            parts = [host.new_instance(tuple(range(start, start + degree))) for start in starts]
        for run, part in deal(list(instance.runs.values()), instance.steps, parts, host.config.page_size):
            if part is None:
                host.preempt(instance, run)
            else:
                part.take_over({run.request.request_id: run}, instance.steps)
        instance.prefixes.deal_idle([part.prefixes for part in parts])
        host.replace([instance], parts)
        return parts
