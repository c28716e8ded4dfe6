"""What a call of `LLM.transform` asks for, and how far it has come."""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from amoeba_jax.errors import LayoutError, RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.pausing import KeptPages
from amoeba_jax.transform.report import GroupTransform, TransformReport, TransformVariant
from amoeba_jax.transform.transition import Transition
from amoeba_jax.views import TransformState, TransformStatus
from kvcache.allocator import BuddyAllocator

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


@dataclass(eq=False)
class TransformCall:
    """A call of `LLM.transform`: transitions of groups, one after the other where they depend on each other."""

    options: TransformOptions
    future: "Future[TransformReport]" = field(default_factory=Future)
    start: float = field(default_factory=time.perf_counter)
    prepare_s: float = 0.0
    groups: list[GroupTransform] = field(default_factory=list)
    active: int = 0
    programs_left: int = 0
    """Missing programs. The call begins, or goes on, when they are compiled."""
    estimated_s: float | None = None
    """Expected seconds to compile the missing programs. None: unknown."""
    awaited_programs: int = 0
    waited_s: float = 0.0
    """Seconds of waiting for programs until `checked_at`."""
    checked_at: float = 0.0
    logged_at: float = 0.0
    logged_left: int = 0
    awaits_requests: bool = False
    """It begins when the requests of its instances have ended."""
    awaited: list[Instance] = field(default_factory=list)
    """It begins when the steps of these have run. They launch no others."""
    error: BaseException | None = None
    outcomes: list[str] = field(default_factory=list)
    """How groups ended that failed."""

    @property
    def overlapped(self) -> bool:
        """Whether steps are launched behind switches without waiting for them."""
        return self.options.variant is TransformVariant.IN_PLACE_OVERLAPPED

    @property
    def awaits_programs(self) -> bool:
        """Whether programs are missing that the call needs to begin or go on."""
        return self.programs_left > 0

    @property
    def status(self) -> TransformStatus:
        """Progress of the call."""
        state = TransformState.SWITCHING
        if self.awaits_requests:
            state = TransformState.AWAITING_REQUESTS
        elif self.awaits_programs:
            state = TransformState.AWAITING_PROGRAMS
        elif self.awaited:
            state = TransformState.DRAINING
        degree, devices = self.options.tensor_parallel_size, self.options.devices
        return TransformStatus(degree, devices, state, self.programs_left, self.estimated_s)

    def await_requests(self, count: int) -> None:
        """Record and log whether the call waits for running requests, and for how many."""
        if count and not self.awaits_requests:
            logger.warning("%s waits for %s", self._name, _counted(count, "request"))
        self.awaits_requests = count > 0

    def await_programs(self, count: int, estimated_s: float | None) -> None:
        """Record and log the number of missing programs and the expected seconds to compile them."""
        now, before = time.perf_counter(), self.programs_left
        if before:
            self.waited_s += now - self.checked_at
        is_due = count < self.logged_left and now >= self.logged_at + _LOG_INTERVAL_S
        if count and (not before or is_due):
            estimate = "" if estimated_s is None else f", about {estimated_s:.0f} s"
            logger.warning("%s waits for %s%s", self._name, _counted(count, "program"), estimate)
            self.logged_at, self.logged_left = now, count
        elif before and not count:
            logger.warning("%s goes on after %.1f s: its programs are ready", self._name, self.waited_s)
        self.awaited_programs += max(0, count - before)
        self.programs_left, self.estimated_s, self.checked_at = count, estimated_s, now

    @property
    def _name(self) -> str:
        return f"the transformation to TP{self.options.tensor_parallel_size}"

    def fail(self, error: BaseException, devices: Iterable[int], how: str) -> None:
        """Take note that the transition of a group failed, and of how it ended."""
        self.error = self.error or error
        self.outcomes.append(f"devices {list(devices)}: {how}")

    def end(self) -> None:
        """Give the caller the report, or a `TransformError`."""
        degree = self.options.tensor_parallel_size
        if self.error is not None:
            ended = "; ".join(self.outcomes)
            failure = TransformError(f"the transformation to TP{degree} failed: {self.error} ({ended})")
            failure.__cause__ = self.error
            self.future.set_exception(failure)
            return
        seconds = time.perf_counter() - self.start
        self.future.set_result(
            TransformReport(
                self.options.variant,
                degree,
                seconds,
                self.prepare_s,
                tuple(self.groups),
                self.awaited_programs,
                self.waited_s,
            )
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(eq=False)
class GroupTransition:
    """A transition under way."""

    call: TransformCall
    transition: Transition
    allocators: list[BuddyAllocator]
    """The allocators of the layout to come, one a device."""
    old: list[Instance]
    staging_bytes: int
    step_s: float | None
    """Seconds of a step of the instances before; see `GroupTransform`."""
    kept: KeptPages | None = None
    cached_before: int = 0
    """Cached pages, and those that are kept."""
    cached_after: int = 0
    start: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: int = 0
    recomputed: int = 0

    @property
    def devices(self) -> tuple[int, ...]:
        return self.transition.instance.group.device_indices

    def report(self) -> GroupTransform:
        """What it took, now that it is done."""
        transition, programs = self.transition, self.transition.programs
        lower, higher = programs.lower, programs.group.tp
        return GroupTransform(
            programs.group.device_indices,
            lower if transition.up else higher,
            higher if transition.up else lower,
            time.perf_counter() - self.start,
            tuple(transition.switches),
            self.steps,
            self.tokens,
            self.staging_bytes,
            len(transition.switches) * programs.restored_bytes,
            self.recomputed,
            self.step_s,
            prefix_pages_kept=self.cached_after,
            prefix_pages_dropped=self.cached_before - self.cached_after,
        )


def check_options(options: TransformOptions, cluster: Cluster, calls: Iterable[TransformCall]) -> None:
    """Raise `LayoutError` for devices that make up no instances, `RequestError` while others change them, or for
    options that exclude each other."""
    tp, devices = options.tensor_parallel_size, options.devices
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
    placed = [instance for instance in cluster.instances if instance.is_placed]
    if placed:
        raise LayoutError(
            f"instance {placed[0].id} has a placement of its own ({placed[0].runner.placement}): only instances whose "
            "layers are all on the same devices merge and split"
        )
    for call in calls:
        if not set(call.options.devices).isdisjoint(devices):
            raise RequestError(f"devices {list(call.options.devices)} are being transformed: wait until they are done")
    for instance in cluster.instances:
        group = set(instance.group.device_indices)
        if group.isdisjoint(devices):
            continue
        if not group <= set(devices):
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


def next_groups(options: TransformOptions, cluster: Cluster) -> list[list[Instance]]:
    """Return the instances that change next: one that splits, or several of one degree that merge."""
    tp, devices = options.tensor_parallel_size, set(options.devices)
    mine = [i for i in cluster.instances if i.transition is None and i.id in devices]
    groups = [[instance] for instance in mine if instance.tp > tp]
    size = tp
    while size > 1:
        for start in range(0, len(cluster.sub_meshes.devices), size):
            inside = [i for i in mine if start <= i.id < start + size and i.tp < size]
            degrees = {instance.tp for instance in inside}
            if sum(i.tp for i in inside) == size and len(degrees) == 1:
                covered = {i for group in groups for i in group}
                if not covered.intersection(inside):
                    groups.append(inside)
        size //= 2
    return groups
