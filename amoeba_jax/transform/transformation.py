"""One call of `LLM.transform`: its state, its groups that change, and its report."""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from amoeba_jax.errors import LayoutError, RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.report import GroupTransform, TransformReport, TransformVariant
from amoeba_jax.transform.transition import Transition
from amoeba_jax.views import TRANSITIONS, TransformState, TransformStatus

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


@dataclass(eq=False)
class Transformation:
    """One call of `LLM.transform`. Used by the dispatcher thread only.

    Its groups of devices change at the same time, or one after another if they depend on each other.

    Attributes:
        state: present state. `enter` changes it.
        transitions: transitions of groups that are changing now.
        groups: reports of the groups that have changed.
        draining: instances whose steps in flight must end first. They launch no other steps.
        programs_left: number of missing programs.
        estimated_s: expected seconds to compile the missing programs. None: unknown.
        waited_s: seconds of waiting for programs so far.
        error: first error of a group.
        outcomes: texts that tell what happened to the failed groups, for the message of the error.
        recovered: whether a group has failed after its first switch.
    """

    options: TransformOptions
    future: "Future[TransformReport]" = field(default_factory=Future)
    state: TransformState = TransformState.REQUESTED
    transitions: list[Transition] = field(default_factory=list)
    groups: list[GroupTransform] = field(default_factory=list)
    draining: list[Instance] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    prepare_s: float = 0.0
    programs_left: int = 0
    estimated_s: float | None = None
    awaited_programs: int = 0
    waited_s: float = 0.0
    error: BaseException | None = None
    outcomes: list[str] = field(default_factory=list)
    recovered: bool = False
    _checked_at: float = 0.0
    _logged_at: float = 0.0
    _logged_left: int = 0

    def enter(self, state: TransformState) -> None:
        """Change the state. Raises `AssertionError` if the new state cannot follow the present one."""
        if state is self.state:
            return
        assert state in TRANSITIONS[self.state], f"{self.name}: {state} cannot follow {self.state}"
        logger.debug("%s: %s, then %s", self.name, self.state, state)
        self.state = state

    @property
    def name(self) -> str:
        return f"the transformation to TP{self.options.tensor_parallel_size}"

    @property
    def overlapped(self) -> bool:
        """Whether the host launches steps without waiting for a switch to end."""
        return self.options.variant is TransformVariant.IN_PLACE_OVERLAPPED

    @property
    def awaits_programs(self) -> bool:
        return self.state is TransformState.AWAITING_PROGRAMS

    @property
    def can_resume(self) -> bool:
        """Whether the reason to wait may have ended.

        True if the transformation waits for requests, or if it waits for steps and all of them have run.
        """
        if self.state is TransformState.DRAINING:
            return not any(instance.pending for instance in self.draining)
        return self.state is TransformState.AWAITING_REQUESTS

    @property
    def status(self) -> TransformStatus:
        """Progress of the transformation, for reports."""
        layers = sum(transition.num_switched for transition in self.transitions)
        total = sum(transition.programs.num_layers for transition in self.transitions)
        options = self.options
        return TransformStatus(
            options.tensor_parallel_size,
            options.devices,
            self.state,
            self.programs_left,
            self.estimated_s,
            layers,
            total,
        )

    def await_requests(self, count: int) -> None:
        """Enter the state in which running requests must end. Log it once."""
        if self.state is not TransformState.AWAITING_REQUESTS:
            logger.warning("%s waits for %s", self.name, _counted(count, "request"))
        self.enter(TransformState.AWAITING_REQUESTS)

    def update_programs(self, count: int, estimated_s: float | None) -> None:
        """Record the number of missing programs and the expected seconds to compile them, and log the progress."""
        now, before = time.perf_counter(), self.programs_left
        if before:
            self.waited_s += now - self._checked_at
        is_due = count < self._logged_left and now >= self._logged_at + _LOG_INTERVAL_S
        if count and (not before or is_due):
            estimate = "" if estimated_s is None else f", about {estimated_s:.0f} s"
            logger.warning("%s waits for %s%s", self.name, _counted(count, "program"), estimate)
            self._logged_at, self._logged_left = now, count
        elif before and not count:
            logger.warning("%s goes on after %.1f s: its programs are ready", self.name, self.waited_s)
        self.awaited_programs += max(0, count - before)
        self.programs_left, self.estimated_s, self._checked_at = count, estimated_s, now
        if count:
            self.enter(TransformState.AWAITING_PROGRAMS)

    def fail(self, error: BaseException, devices: Iterable[int], how: str) -> None:
        """Record the error of a group. `how` tells what happened to the group."""
        self.error = self.error or error
        self.outcomes.append(f"devices {list(devices)}: {how}")

    def end(self) -> None:
        """End the call: give the caller the report, or a `TransformError`."""
        degree = self.options.tensor_parallel_size
        if self.error is not None:
            changed = self.recovered or bool(self.groups)
            self.enter(TransformState.RECOVERED if changed else TransformState.ABORTED)
            ended = "; ".join(self.outcomes)
            failure = TransformError(f"{self.name} failed: {self.error} ({ended})")
            failure.__cause__ = self.error
            self.future.set_exception(failure)
            return
        self.enter(TransformState.DONE)
        seconds = time.perf_counter() - self.start
        counts = self.awaited_programs, self.waited_s
        report = TransformReport(self.options.variant, degree, seconds, self.prepare_s, tuple(self.groups), *counts)
        self.future.set_result(report)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_options(options: TransformOptions, cluster: Cluster, present: Iterable[Transformation]) -> None:
    """Check the arguments of `LLM.transform`.

    Raises `LayoutError` if the devices cannot form instances of the degree. Raises `RequestError` if options exclude
    each other, or if another transformation in `present` changes the same devices.
    """
    tp, devices, chosen = options.tensor_parallel_size, options.devices, set(options.devices)
    meshes = cluster.sub_meshes
    meshes.check_degree(tp)
    if not devices or sorted(set(devices)) != list(devices) or devices[0] < 0 or devices[-1] >= len(meshes.devices):
        raise LayoutError(
            f"devices={list(devices)} must be different indices, in order, of the {len(meshes.devices)} devices"
        )
    if options.running == "pause" and options.release_weights and tp > 1:
        raise RequestError(
            "running='pause' needs release_weights=False: pages of paused requests stay where they are, and released "
            "weights would have to come back while they do"
        )
    if options.attention_degree is not None:
        _check_attention(options, cluster)
    if options.order == "memory_first" and cluster.dims.transform_attention:
        raise RequestError(
            "order='memory_first' needs transform_attention=False: attention weights change together with their pages"
        )
    for instance in cluster.instances:
        placement = instance.runner.placement
        if chosen.isdisjoint(instance.devices):
            continue
        if instance.transition is not None and not instance.transition.changes_degree:
            raise RequestError(f"instance {instance.id} is changing its placement: wait until it is done")
        if cluster.plan.placement is not None and cluster.plan.placement.attention_degree is not None:
            raise LayoutError(
                f"instance {instance.id} ({placement}) has data-parallel attention, and its devices do not hold all "
                "weights: it merges and splits only if the model fits on each device and transform_attention is off"
            )
        if instance.has_parallel_attention and options.running == "pause":
            raise RequestError(
                f"running='pause' is not possible for instance {instance.id}, which has data-parallel attention: its "
                "requests cannot resume there. Use running='migrate'"
            )
        if cluster.plan.placement is not None or (instance.is_spread and not instance.has_parallel_attention):
            raise LayoutError(
                f"instance {instance.id} has a placement of its own ({placement}): only instances whose layers are all "
                "on the same devices merge and split. Evict its replicas and migrate its layers back first"
            )
    if empty := chosen.intersection(cluster.empty_devices):
        raise LayoutError(f"devices {sorted(empty)} are empty: they need an instance first (LLM.scale_out)")
    for other in present:
        if not set(other.options.devices).isdisjoint(devices):
            raise RequestError(f"devices {list(other.options.devices)} are being transformed: wait until they are done")
    for instance in cluster.instances:
        group = set(instance.group.device_indices)
        if not group.isdisjoint(devices) and not group <= set(devices):
            raise LayoutError(
                f"devices={list(devices)} cut instance {instance.group} in two: name all of its devices, or none"
            )
    for group in meshes.groups(tp) if options.running == "pause" else ():
        found = {i.tp for i in cluster.instances if i.id in group.device_indices and i.id in devices}
        if len(found) > 1:
            raise RequestError(
                f"devices {list(group.device_indices)} have instances of degrees {sorted(found)}: those of one degree "
                "can pause together; transform them to one first"
            )
    for start in range(0, len(meshes.devices), tp):
        named = set(range(start, start + tp)) & set(devices)
        if named and len(named) < tp:
            raise LayoutError(
                f"devices={list(devices)} do not make up TP{tp} instances: devices {start} to {start + tp - 1} "
                "belong together"
            )


def _check_attention(options: TransformOptions, cluster: Cluster) -> None:
    tp, degree = options.tensor_parallel_size, options.attention
    if type(degree) is not int or degree < 1 or degree > tp or degree & (degree - 1):
        raise LayoutError(f"attention_degree={degree} must be a power of two, and at most tensor_parallel_size={tp}")
    if degree < tp and options.running == "pause":
        raise RequestError("running='pause' does not fit attention_degree: paused requests resume at their old degree")
    if degree < tp and cluster.dims.transform_attention:
        raise RequestError(
            "attention_degree needs transform_attention=False: attention of a lower degree needs all attention weights"
        )


def next_groups(options: TransformOptions, cluster: Cluster) -> list[list[Instance]]:
    """Return the groups that change next. A group is one instance that splits, or several of one degree that merge.

    An instance with data-parallel attention first gets attention of its own degree. An instance gets data-parallel
    attention when it has the right degree. Both are groups of one instance.
    """
    tp, devices = options.tensor_parallel_size, set(options.devices)
    mine = [i for i in cluster.instances if i.transition is None and i.id in devices]
    mine = [i for i in mine if not options.is_reached_by(i.tp, i.attention_degree)]
    groups = [[i] for i in mine if i.has_parallel_attention or i.tp > tp or (i.tp == tp and options.attention < tp)]
    size = tp
    while size > 1:
        for start in range(0, len(cluster.sub_meshes.devices), size):
            inside = [i for i in mine if start <= i.id < start + size and i.tp < size]
            if sum(i.tp for i in inside) != size or len({i.tp for i in inside}) != 1:
                continue
            if not any(i in group for group in groups for i in inside):
                groups.append(inside)
        size //= 2
    return groups
