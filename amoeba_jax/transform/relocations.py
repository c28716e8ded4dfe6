"""Changes of placements, from the request to the report. `TransformState` lists their states."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.transform.merge_split import Requeue
from amoeba_jax.transform.options import PlacementOptions
from amoeba_jax.transform.relocation import Relocation
from amoeba_jax.transform.relocation_plan import RelocationPlan, needed_programs, plan_relocation
from amoeba_jax.transform.report import PlacementReport
from amoeba_jax.views import TRANSITIONS, PlacementStatus, TransformState
from kvcache.allocator import OutOfPagesError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PlacementChange:
    """One call of `LLM.replicate`, `evict`, `migrate`, `scale_out` or `scale_in`. Used by the dispatcher thread only.

    Attributes:
        relocation: relocation whose layers are switching; None before and after.
        draining: instance whose steps in flight must end before its sequences move to another instance.
        programs_left: number of missing programs.
    """

    options: PlacementOptions
    future: "Future[PlacementReport]" = field(default_factory=Future)
    state: TransformState = TransformState.REQUESTED
    relocation: Relocation | None = None
    draining: Instance | None = None
    programs_left: int = 0
    ready: "Future[object] | None" = None

    def enter(self, state: TransformState) -> None:
        """Change the state. Raises `AssertionError` if the new state cannot follow the present one."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.name}: {state} cannot follow {self.state}"
            logger.debug("%s: %s, then %s", self.name, self.state, state)
            self.state = state

    @property
    def name(self) -> str:
        layers = self.options.layers
        which = "" if layers is None else f" of layers {layers.start} to {layers.stop - 1}"
        return f"{self.options.kind}{which} (instance {self.options.instance}, device {self.options.device})"

    @property
    def status(self) -> PlacementStatus:
        """Progress of the change, for reports."""
        options, layers = self.options, self.options.layers
        switched = 0 if self.relocation is None else self.relocation.num_switched
        span = (0, 0) if layers is None else (layers.start, layers.stop)
        return PlacementStatus(options.kind, options.instance, options.device, span, self.state, switched)


class Relocations:
    """Changes of placements that have not ended. Used by the dispatcher thread only.

    Args:
        requeue: function that takes a sequence off its instance and queues it, to be computed again.
        are_transformed: function that returns whether a merge or split of some devices has not ended.
    """

    def __init__(self, cluster: Cluster, requeue: Requeue, are_transformed: Callable[[Iterable[int]], bool]):
        self._cluster, self._requeue, self._are_transformed = cluster, requeue, are_transformed
        self._present: list[PlacementChange] = []

    # Questions

    @property
    def busy(self) -> bool:
        return bool(self._present)

    @property
    def awaits_programs(self) -> bool:
        return any(one.state is TransformState.AWAITING_PROGRAMS for one in self._present)

    @property
    def statuses(self) -> tuple[PlacementStatus, ...]:
        """Progress of the changes that have not ended."""
        return tuple(one.status for one in self._present)

    def holds(self, instance: Instance) -> bool:
        """Return whether an instance must launch no step until its steps in flight have ended."""
        change = instance.transition
        if isinstance(change, Relocation):
            return change.must_drain and change.done and bool(instance.pending)
        return any(one.draining is instance for one in self._present)

    # From the request to the first switch

    def request(self, options: PlacementOptions) -> "Future[PlacementReport]":
        """Start a change.

        Raises `LayoutError`, `RequestError` or `MemoryBudgetError`, and changes nothing, if it is impossible.
        """
        one = PlacementChange(options)
        self._check_free(plan_relocation(self._cluster, options))
        self._present.append(one)
        try:
            self._proceed(one)
        except BaseException:
            if one in self._present:
                self._present.remove(one)
            raise
        return one.future

    def _check_free(self, plan: RelocationPlan) -> None:
        if self._are_transformed(plan.device_indices):
            raise RequestError(f"devices {sorted(plan.device_indices)} are being transformed: wait until that is done")

    def retry(self) -> None:
        """Continue changes that wait for programs. The engine calls this when programs have been compiled."""
        self._proceed_with([one for one in self._present if one.state is TransformState.AWAITING_PROGRAMS])

    def _proceed_with(self, changes: Iterable[PlacementChange]) -> None:
        for one in changes:
            try:
                self._proceed(one)
            except Exception as error:  # it cannot begin, and nothing has changed
                self._present.remove(one)
                one.future.set_exception(error)

    def _proceed(self, one: PlacementChange) -> None:
        """Start the relocation of a change if its programs are compiled and the steps that it waits for have ended."""
        if one.draining is not None and one.draining.phase is Phase.DRAINING:
            one.draining.enter(Phase.SERVING)
        one.draining = None
        plan = plan_relocation(self._cluster, one.options)
        self._check_free(plan)
        executables, specs = self._cluster.executables, needed_programs(self._cluster, plan)
        executables.check(specs)
        one.programs_left = 0 if executables.request(specs) else executables.num_missing(specs)
        if one.programs_left:
            one.enter(TransformState.AWAITING_PROGRAMS)
            return
        if failed := [spec for spec in specs if executables.has_failed([spec])]:
            executables.get(failed[0])  # raises the error of its compilation
        if plan.joining is not None and plan.joining.pending:
            one.enter(TransformState.DRAINING)
            one.draining = plan.joining
            plan.joining.enter(Phase.DRAINING)
            return
        relocation = Relocation(self._cluster, plan, self._requeue)
        try:
            relocation.begin()
        except OutOfPagesError as error:
            raise RequestError(f"the change is refused: {error}") from error
        one.relocation = relocation
        one.enter(TransformState.SWITCHING)

    # Switches, around the steps of an instance

    def switch_layers(self, instance: Instance, num_preempted: int) -> bool:
        """Switch the next layers of an instance before its next step. Return whether the instance is still changing."""
        relocation = instance.transition
        relocation.recomputed += num_preempted
        try:
            relocation.switch_layers()
        except Exception as error:
            self._fail(relocation, error)
        return instance.transition is relocation

    def step_launched(self, instance: Instance, plan: StepPlan | None) -> None:
        """Record a launched step of a changing instance. `plan` is None if there was nothing to compute."""
        relocation = instance.transition
        if not isinstance(relocation, Relocation):
            return  # the step failed, and the change with it
        if plan is not None:
            relocation.steps += 1
        if relocation.done and not (relocation.must_drain and instance.pending):
            self._settle(relocation)

    # The end

    def _settle(self, relocation: Relocation) -> None:
        one = self._owner(relocation)
        try:
            relocation.settle()
        except Exception as error:
            logger.exception("%s cannot end as planned", one.name)
            self._fail(relocation, error)
            return
        one.enter(TransformState.SETTLING)
        if relocation.arrays:
            one.ready = relocation.instance.reader.when_ready(relocation.arrays)
        else:
            self._end(one)

    def collect(self) -> None:
        """End changes whose copies have arrived. Start changes that waited for steps in flight, if these have ended."""
        for one in list(self._present):
            relocation = one.relocation
            if one.ready is not None and one.ready.done():
                self._end(one)
            elif relocation is not None and relocation.instance.transition is relocation and relocation.done:
                if not relocation.instance.pending:
                    self._settle(relocation)
            elif one.state is TransformState.DRAINING and not (one.draining and one.draining.pending):
                self._proceed_with([one])

    def wait(self) -> None:
        """Wait for copies that still run, and end their changes."""
        for one in self._present:
            if one.ready is not None:
                one.ready.exception()
        self.collect()

    def _end(self, one: PlacementChange) -> None:
        assert one.relocation is not None, "it has begun"
        if one.ready is not None and (error := one.ready.exception()) is not None:
            self._end_failed(one, error, "copies of weights have failed")
            return
        one.enter(TransformState.DONE)
        self._present.remove(one)
        one.future.set_result(one.relocation.report())

    def _owner(self, relocation: Relocation) -> PlacementChange:
        return next(one for one in self._present if one.relocation is relocation)

    # Failures

    def _fail(self, relocation: Relocation, error: Exception) -> None:
        """End a relocation after an error. Layers that have switched stay at their new homes."""
        one = self._owner(relocation)
        drop_frames(error)
        relocation.stop()
        relocation.settle()
        self._end_failed(one, error, "what had not switched is as it was")

    def forget(self, instance: Instance) -> None:
        """End the change of an instance whose cache is lost. The instance keeps its present placement."""
        relocation = instance.transition
        if isinstance(relocation, Relocation):
            one = self._owner(relocation)
            relocation.stop()
            instance.transition = None
            instance.enter(Phase.SERVING)
            instance.runner.place(instance.runner.placement.joined()[0])
            relocation.leave_homes()
            self._end_failed(one, RuntimeError("a step failed"), "its requests are computed again")

    def _end_failed(self, one: PlacementChange, error: BaseException, how: str) -> None:
        self._present.remove(one)
        started = one.relocation is not None and one.relocation.started
        one.enter(TransformState.RECOVERED if started else TransformState.ABORTED)
        failure = TransformError(f"{one.name} failed: {error} ({how})")
        failure.__cause__ = error
        one.future.set_exception(failure)

    def fail(self, error: BaseException) -> None:
        """End all changes, because the engine has failed."""
        for one in self._present:
            failure = TransformError(f"the engine failed: {error}")
            failure.__cause__ = error
            one.future.set_exception(failure)
        self._present.clear()
