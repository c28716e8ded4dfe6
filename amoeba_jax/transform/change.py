"""`Change`: state and result of one call of an `LLM` method that changes tensor-parallel degrees or a placement."""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from amoeba_jax.errors import TransformError
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.transform.options import PlacementOptions, TransformOptions
from amoeba_jax.transform.report import GroupTransform, PlacementReport, TransformReport
from amoeba_jax.transform.transition import Transition
from amoeba_jax.views import TRANSITIONS, PlacementStatus, TransformState, TransformStatus

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


@dataclass(eq=False)
class Change:
    """State and result of one call of `LLM.transform`, `replicate`, `evict`, `migrate`, `scale_out` or `scale_in`.

    A group is a set of devices that change together. `LLM.transform` may change several groups, some of them at the
    same time. Each of the other methods changes one group. Only the dispatcher thread may use this object.

    Attributes:
        future: future of the report. The caller waits for this future. If the change fails, the future gets the error.
        state: present state of the change. Only `enter` may set this attribute.
        transitions: list of the transitions that have begun and have not ended, one for each group that is changing.
        reports: list of reports. Each completed transition, pause or resume of a group adds one report.
        held: list of the instances that start no new requests until `let_go` is called.
        prepare_s: number of seconds in which the engine compiled missing programs and launched no steps.
        programs_left: number of programs that the change needs and that are not compiled yet.
        estimated_s: expected number of seconds until all programs of the change are compiled. None if unknown.
        awaited_programs: number of programs for which the change has had to wait so far.
        waited_s: number of seconds that the change has waited for programs so far.
        error: error of the first group that failed. None if no group has failed.
        outcomes: list of texts for the error message, one for each failed group: what happened to the group.
        recovered: whether at least one group has failed and could not be restored to its old state. If True, the change
            ends in the state `RECOVERED`.
    """

    options: TransformOptions | PlacementOptions
    future: "Future[Any]" = field(default_factory=Future)
    state: TransformState = TransformState.REQUESTED
    transitions: list[Transition] = field(default_factory=list)
    reports: list[GroupTransform | PlacementReport] = field(default_factory=list)
    held: list[Instance] = field(default_factory=list)
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
        """Set the state of the change. Raises `AssertionError` if `state` must not follow the present state."""
        if state is self.state:
            return
        assert state in TRANSITIONS[self.state], f"{self.name}: {state} cannot follow {self.state}"
        logger.debug("%s: %s, then %s", self.name, self.state, state)
        self.state = state

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def awaits_programs(self) -> bool:
        return self.state is TransformState.AWAITING_PROGRAMS

    @property
    def can_resume(self) -> bool:
        """Whether the requests or steps that the change awaits have ended. False if the change awaits neither."""
        if self.state is TransformState.AWAITING_REQUESTS:
            return not any(instance.running for instance in self.held)
        if self.state is TransformState.DRAINING:
            return not any(instance.pending for instance in self.held if instance.phase is Phase.DRAINING)
        return False

    @property
    def status(self) -> TransformStatus | PlacementStatus:
        """Progress of the change: its state, and the number of layers that have switched in its present transitions."""
        options, switched = self.options, sum(transition.num_switched for transition in self.transitions)
        if isinstance(options, PlacementOptions):
            span = (0, 0) if options.layers is None else (options.layers.start, options.layers.stop)
            return PlacementStatus(options.kind, options.instance, options.device, span, self.state, switched)
        total = sum(transition.num_layers for transition in self.transitions)
        what = options.tensor_parallel_size, options.devices, self.state
        return TransformStatus(*what, self.programs_left, self.estimated_s, switched, total)

    # Waiting

    def hold(self, instances: list[Instance], draining: Iterable[Instance] = ()) -> None:
        """Keep instances from starting new requests until `let_go` is called.

        Args:
            instances: list of the instances that start no new requests.
            draining: the members of `instances` that also launch no new steps. Steps that are in flight still run.
        """
        self.held = instances
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = True
        for instance in draining:
            instance.enter(Phase.DRAINING)

    def let_go(self) -> None:
        """Let the instances in `held` start requests and launch steps again."""
        for instance in self.held:
            for lane in instance.lanes:
                lane.closed = False
            if instance.phase is Phase.DRAINING:  # a lost instance stays lost
                instance.enter(Phase.SERVING)
        self.held = []

    def await_requests(self, count: int) -> None:
        """Enter the state `AWAITING_REQUESTS`. If this changes the state, log that `count` requests still run."""
        if self.state is not TransformState.AWAITING_REQUESTS:
            logger.warning("%s waits for %s", self.name, _counted(count, "request"))
        self.enter(TransformState.AWAITING_REQUESTS)

    def update_programs(self, count: int, estimated_s: float | None) -> None:
        """Record how many programs the change still waits for, and log the progress.

        If `count` is not 0, the change enters the state `AWAITING_PROGRAMS`.

        Args:
            count: number of programs that the change needs and that are not compiled yet.
            estimated_s: expected number of seconds until all programs of the change are compiled. None if unknown.
        """
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

    # The end

    def fail(self, error: BaseException, how: str) -> None:
        """Record that a group has failed.

        Args:
            error: error of the group. The change keeps only the error of the first group that fails.
            how: text for the error message: what happened to the group.
        """
        self.error = self.error or error
        self.outcomes.append(how)

    def end(self) -> None:
        """End the change. `future` gets a `TransformError` if at least one group has failed, otherwise the report."""
        options = self.options
        if self.error is not None:
            changed = self.recovered or bool(self.reports)
            self.enter(TransformState.RECOVERED if changed else TransformState.ABORTED)
            failure = TransformError(f"{self.name} failed: {self.error} ({'; '.join(self.outcomes)})")
            failure.__cause__ = self.error
            self.future.set_exception(failure)
            return
        self.enter(TransformState.DONE)
        if isinstance(options, PlacementOptions):
            self.future.set_result(self.reports[0])
            return
        groups = tuple(report for report in self.reports if isinstance(report, GroupTransform))
        seconds, counts = time.perf_counter() - self.start, (self.awaited_programs, self.waited_s)
        degree = options.tensor_parallel_size
        report = TransformReport(options.variant, degree, seconds, self.prepare_s, groups, *counts)
        self.future.set_result(report)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
