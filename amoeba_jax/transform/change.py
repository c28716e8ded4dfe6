"""`Change`: state and result of one call that changes tensor-parallel degrees or a placement."""

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
    """One call of `LLM.transform`, `replicate`, `evict`, `migrate`, `scale_out` or `scale_in`.

    `LLM.transform` may change several groups of devices, and changes independent groups at the same time. Each of the
    other methods changes only one group. Only the dispatcher thread may use this object.

    Attributes:
        future: future on which the caller waits. It gets the report or the error.
        state: present state. Only `enter` may set the state.
        transitions: transitions of the groups whose layers are switching now.
        reports: reports of the groups that have changed.
        held: instances that start no new requests until `let_go` is called.
        programs_left: number of programs that the change needs and that are not compiled yet.
        estimated_s: expected seconds until all programs of the change are compiled. None if unknown.
        awaited_programs: number of programs for which the change has had to wait so far.
        waited_s: seconds that the change has waited for programs.
        error: error of the first group that failed. None if no group has failed.
        outcomes: one text for each failed group. The text tells what happened to the group, for the error message.
        recovered: whether a group has failed after its first switch had begun.
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
        """Set the state. Raises `AssertionError` if `state` cannot follow the present state."""
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
        """Whether the requests or steps for which the change waits have ended. False in all other states."""
        if self.state is TransformState.AWAITING_REQUESTS:
            return not any(instance.running for instance in self.held)
        if self.state is TransformState.DRAINING:
            return not any(instance.pending for instance in self.held if instance.phase is Phase.DRAINING)
        return False

    @property
    def status(self) -> TransformStatus | PlacementStatus:
        """State of the change, and the number of layers that have switched."""
        options, switched = self.options, sum(transition.num_switched for transition in self.transitions)
        if isinstance(options, PlacementOptions):
            span = (0, 0) if options.layers is None else (options.layers.start, options.layers.stop)
            return PlacementStatus(options.kind, options.instance, options.device, span, self.state, switched)
        total = sum(transition.num_layers for transition in self.transitions)
        what = options.tensor_parallel_size, options.devices, self.state
        return TransformStatus(*what, self.programs_left, self.estimated_s, switched, total)

    # Waiting

    def hold(self, instances: list[Instance], draining: Iterable[Instance] = ()) -> None:
        """Stop instances from starting new requests, until `let_go` is called.

        Args:
            instances: instances that start no new requests.
            draining: some of `instances`, which also launch no new steps. Steps in flight still run.
        """
        self.held = instances
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = True
        for instance in draining:
            instance.enter(Phase.DRAINING)

    def let_go(self) -> None:
        """Let the held instances start requests and steps again."""
        for instance in self.held:
            for lane in instance.lanes:
                lane.closed = False
            if instance.phase is Phase.DRAINING:  # not lost meanwhile
                instance.enter(Phase.SERVING)
        self.held = []

    def await_requests(self, count: int) -> None:
        """Enter `AWAITING_REQUESTS`. If this changes the state, log the number of running requests (`count`)."""
        if self.state is not TransformState.AWAITING_REQUESTS:
            logger.warning("%s waits for %s", self.name, _counted(count, "request"))
        self.enter(TransformState.AWAITING_REQUESTS)

    def update_programs(self, count: int, estimated_s: float | None) -> None:
        """Record how many programs the change still waits for, and log the progress.

        If `count` is not 0, the change enters the state `AWAITING_PROGRAMS`.

        Args:
            count: number of programs that the change needs and that are not compiled yet.
            estimated_s: expected seconds until all programs of the change are compiled. None if unknown.
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
            how: text that tells what happened to the group.
        """
        self.error = self.error or error
        self.outcomes.append(how)

    def end(self) -> None:
        """End the change. The caller gets the report, or a `TransformError` if any group has failed."""
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
