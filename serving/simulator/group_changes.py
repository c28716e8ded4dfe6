"""Transformations of a simulated host: groups of devices that change their degree while requests run."""

from collections.abc import Sequence
from typing import Protocol

from serving.scheduler import DegreeLimits, ScaleDown, ScaleUp
from serving.simulator.host_config import HostConfig, Refusal
from serving.simulator.instance import Change, SimInstance
from serving.simulator.run import Run
from serving.simulator.tally import Ending, Tally


class Host(Protocol):
    """What changes need of the executor that they are made for: see `SimExecutor`."""

    config: HostConfig
    limits: dict[int, DegreeLimits]
    instances: list[SimInstance]
    tally: Tally
    now_s: float
    failing_transformations: int

    def new_instance(self, devices: tuple[int, ...]) -> SimInstance:
        """Make an instance without requests."""
        ...

    def replace(self, old: list[SimInstance], new: list[SimInstance]) -> None:
        """Put instances in the place of others."""
        ...

    def begin(self, instance: SimInstance) -> None:
        """Begin an instance's next steps."""
        ...

    def finish(self, run: Run, ending: Ending) -> None:
        """Take note that a request has ended."""
        ...

    def preempt(self, instance: SimInstance, run: Run) -> None:
        """Have a request wait again."""
        ...


class GroupChanges:
    """Begins and ends transformations.

    Attributes:
        failing: transformations under way that will end without effect: when they end, and their instances.
    """

    def __init__(self, executor: Host):
        self._executor = executor
        self.failing: list[tuple[float, list[SimInstance]]] = []

    def _check_group(self, devices: Sequence[int], degree: int) -> list[SimInstance]:
        if degree not in self._executor.limits:
            raise Refusal(f"TP{degree} is no degree here: degrees are {sorted(self._executor.limits)}")
        members = [i for i in self._executor.instances if not set(devices).isdisjoint(i.devices)]
        if sorted(d for i in members for d in i.devices) != sorted(devices):
            raise Refusal(f"devices {list(devices)} cut an instance in two, or are not all there")
        if any(i.change is not None for i in members):
            raise Refusal(f"devices {list(devices)} are being transformed")
        return members

    def scale_up(self, action: ScaleUp, devices: tuple[int, ...], degree: int) -> None:
        aligned = tuple(range(devices[0], devices[0] + degree)) if devices else ()
        if devices != aligned or devices[0] % degree:
            raise Refusal(f"devices {list(devices)} are no aligned group of {degree}")
        members = self._check_group(devices, degree)
        if len(members) < 2:
            raise Refusal(f"devices {list(devices)} are one instance already")
        lower = min(i.degree for i in members)
        if self._executor.failing_transformations > 0:
            self._executor.failing_transformations -= 1
            self._fail_change(action, members, lower)
            return
        tokens = sum(i.used_tokens() for i in members)
        ready_s = max(self._drained_s(i) for i in members)
        merged = self._executor.new_instance(devices)
        for member in members:
            if member.block is not None:
                finished = member.end_block(member.block.end_s)
                member.version += 1
                for run in finished:
                    self._executor.finish(run, Ending.COMPLETED)
            member.joining, member.prompts = [], []
            merged.take_over(member.runs, member.steps)
            merged.prefixes.merge(member.prefixes)
        self._executor.replace(members, [merged])
        self._begin_change(merged, action, lower, lower, degree, tokens, ready_s)

    def _drained_s(self, instance: SimInstance) -> float:
        """End the instance's block with the step that runs, and say when that is."""
        instance.cut(self._executor.now_s)
        return self._executor.now_s if instance.block is None else max(instance.block.end_s, self._executor.now_s)

    def scale_down(self, action: ScaleDown, devices: tuple[int, ...], degree: int) -> None:
        members = self._check_group(devices, degree)
        if len(members) != 1 or members[0].degree <= degree or members[0].degree % degree:
            raise Refusal(f"devices {list(devices)} are no instance of a degree above {degree}")
        (instance,) = members
        if self._executor.failing_transformations > 0:
            self._executor.failing_transformations -= 1
            self._fail_change(action, members, degree)
            return
        ready_s = self._drained_s(instance)
        if instance.block is not None:
            finished = instance.end_block(instance.block.end_s)
            for run in finished:
                self._executor.finish(run, Ending.COMPLETED)
        # Prompts wait until the split is over.
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
        price = cost.change(from_degree, to_degree, tokens)
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
        )
        self._executor.begin(instance)

    def _fail_change(self, action: ScaleUp | ScaleDown, members: list[SimInstance], lower: int) -> None:
        """The members go on as they are, take no requests, and nothing comes of it."""
        cost = self._executor.config.transformation
        price = cost.change(lower, action.degree, sum(i.used_tokens() for i in members))
        for member in members:
            member.change = Change(action, self._executor.now_s, 1, 1, lower, 0.0, 0.0, 1, fails=True)
        self.failing.append((self._executor.now_s + max(price.seconds(cost.layers), 1e-3), members))

    def end_failed(self) -> bool:
        """End transformations that fail by now. Returns whether there was one."""
        due = [entry for entry in self.failing if entry[0] <= self._executor.now_s]
        for entry in due:
            self.failing.remove(entry)
            for member in entry[1]:
                member.change = None
        return bool(due)

    def end(self, instance: SimInstance) -> None:
        change, instance.change = instance.change, None
        assert change is not None, "its last layer has just switched"
        to_degree = change.action.degree
        self._executor.tally.changes.append(
            (self._executor.now_s, change.from_degree, to_degree, self._executor.now_s - change.start_s)
        )
        if isinstance(change.action, ScaleUp):
            self._executor.begin(instance)
            return
        parts = self._split(instance, to_degree)
        for part in parts:
            self._executor.begin(part)

    def _split(self, instance: SimInstance, degree: int) -> list[SimInstance]:
        """Deal the requests to instances of a lower degree, longest first, each to where most is free."""
        starts = range(instance.devices[0], instance.devices[0] + instance.degree, degree)
        parts = [self._executor.new_instance(tuple(range(start, start + degree))) for start in starts]
        free = [part.capacity_tokens for part in parts]
        size = self._executor.config.page_size
        for run in sorted(instance.runs.values(), key=lambda r: (-r.num_tokens(instance.steps), r.order)):
            place = max(range(len(parts)), key=lambda index: (free[index], -index))
            part, tokens = parts[place], run.num_tokens(instance.steps)
            needed = -(-(tokens + 1) // size) * size
            full = free[place] < needed or len(part.runs) >= part.limits.max_requests
            if full or run.request.max_total_tokens > part.capacity_tokens:
                self._executor.preempt(instance, run)
                continue
            free[place] -= needed
            part.take_over({run.request.request_id: run}, instance.steps)
        self._executor.replace([instance], parts)
        return parts
