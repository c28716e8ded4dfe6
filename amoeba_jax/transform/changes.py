"""`Changes`: starts, continues and ends all changes of a cluster (the instances of an engine).

A change is one call of an `LLM` method that changes tensor-parallel degrees or a placement. `Changes._proceed` moves a
change forward as far as possible. A change may have to wait, for example until its programs are compiled. `_proceed`
then returns. Other methods of `Changes` call `_proceed` again when the wait may be over.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from jax.profiler import TraceAnnotation

from amoeba_jax.errors import LayoutError, MemoryBudgetError, RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.step import Row, StepPlan, clear_in_flight
from amoeba_jax.transform.change import Change
from amoeba_jax.transform.lanes import Requeue
from amoeba_jax.transform.merge_split import begin
from amoeba_jax.transform.options import PlacementOptions, TransformOptions
from amoeba_jax.transform.pausing import forget_paused, pause, resume
from amoeba_jax.transform.relayout_plan import RelayoutPlan, check_options, relayout_plans, reserve_staging
from amoeba_jax.transform.relocation import Relocation
from amoeba_jax.transform.relocation_plan import RelocationPlan, plan_relocation
from amoeba_jax.transform.transition import Transition
from amoeba_jax.views import PlacementStatus, TransformState, TransformStatus
from kvcache.allocator import OutOfPagesError

logger = logging.getLogger(__name__)


class Changes:
    """All unfinished changes of a cluster (the instances of an engine).

    Any thread may call `capacity_to_come`. Only the dispatcher thread may use all other methods and properties.

    Args:
        requeue: function that removes a sequence from its instance and puts the sequence back into the queue of waiting
            sequences. The sequence is computed again later.
    """

    def __init__(self, cluster: Cluster, requeue: Requeue):
        self._cluster, self._requeue = cluster, requeue
        self._present: list[Change] = []

    # Questions

    @property
    def busy(self) -> bool:
        """Whether at least one change has not ended."""
        return bool(self._present)

    @property
    def awaits_programs(self) -> bool:
        """Whether at least one change waits for programs to be compiled."""
        return any(one.awaits_programs for one in self._present)

    @property
    def statuses(self) -> tuple[TransformStatus | PlacementStatus, ...]:
        """State and progress of each change that has not ended."""
        return tuple(one.status for one in self._present)

    @property
    def transitions(self) -> list[Transition]:
        """All transitions that have begun and have not ended. The last switch of a transition is not yet its end."""
        return [transition for one in self._present for transition in one.transitions]

    def targets(self) -> dict[int, int]:
        """Return `{device: requested degree}` for all devices whose instances are changing or must still change.

        Only transformations (changes of degree) count. These devices are left out:

        - all devices of a transformation that waits for programs,
        - devices that have not begun to change, if their transformation has already failed for other devices.
        """
        targets: dict[int, int] = {}
        for one, options in [(one, one.options) for one in self._present if not one.awaits_programs]:
            if not isinstance(options, TransformOptions):
                continue
            degree = options.tensor_parallel_size
            devices = {device for transition in one.transitions for device in transition.devices}
            if one.error is None:
                to_come = [i for i in self._cluster.instances if not options.is_reached_by(i.tp, i.attention_degree)]
                devices |= {device for i in to_come for device in i.group.device_indices}
            targets |= dict.fromkeys(devices & set(options.devices), degree)
        return targets

    def request_programs(self, options: TransformOptions) -> bool:
        """Start a background compilation of the programs that a transformation needs and that are not compiled yet.

        Return whether the transformation could begin now without a wait for programs.
        """
        plans = relayout_plans(self._cluster, options)
        return self._cluster.executables.request(spec for plan in plans for spec in plan.programs(self._cluster))

    def capacity_to_come(self, instance: Instance, further: TransformOptions | None = None) -> tuple[int, int]:
        """Return `(capacity, degree)` of an instance after the requested transformation of its devices.

        The capacity is the number of tokens that fit in the KV cache of one instance. With data-parallel attention, the
        capacity is for one of the parts of the instance that compute attention separately. If the instance will merge,
        the result describes the merged instance. If the instance will split, the result describes one of the new
        instances. If no transformation of the instance is requested, the result describes the instance as it is now.

        Any thread may call this method. `instance` may already have been replaced by other instances.

        Args:
            further: options of a transformation that has not been requested. If no requested transformation includes
                the instance, the result is as if this transformation were requested.
        """
        requested = [one.options for one in list(self._present) if isinstance(one.options, TransformOptions)]
        options = next((options for options in requested if instance.id in options.devices), further)
        attention = instance.attention_degree
        if options is None or instance.id not in options.devices or options.is_reached_by(instance.tp, attention):
            return self._cluster.plan.capacity_tokens(attention, instance.released), instance.tp
        tp, released = options.tensor_parallel_size, instance.released
        if tp < instance.tp:
            released = min(released, tp)
        elif options.release_weights and tp > instance.tp:
            released = max(released, tp)
        return self._cluster.plan.capacity_tokens(options.attention, released), tp

    # From the request to the first switch

    def request(self, options: TransformOptions | PlacementOptions) -> "Future[Any]":
        """Start a change. Return a future of the `TransformReport` or `PlacementReport`.

        Raises `LayoutError`, `RequestError` or `MemoryBudgetError` if the change is impossible. Raises `TransformError`
        if the start fails for another reason. If an error is raised, nothing has changed. If the change fails after its
        start, the future gets the error.
        """
        one = Change(options)
        if isinstance(options, TransformOptions):
            check_options(options, self._cluster, [other.options for other in self._present])
        else:
            self._plans(one)
        self._present.append(one)
        self._proceed(one)
        return one.future

    def _plans(self, one: Change) -> list[RelayoutPlan | RelocationPlan]:
        """Return one plan for each group of devices that can change next. If nothing is left to change, return [].

        Raises `LayoutError`, `RequestError` or `MemoryBudgetError` if the change is impossible.
        """
        if isinstance(one.options, TransformOptions):
            return [*relayout_plans(self._cluster, one.options)]
        if one.reports:
            return []
        plan = plan_relocation(self._cluster, one.options)
        for other in [other.options for other in self._present]:
            if isinstance(other, TransformOptions) and not plan.device_indices.isdisjoint(other.devices):
                devices = sorted(plan.device_indices)
                raise RequestError(f"devices {devices} are being transformed: wait until that is done")
        return [plan]

    def retry(self) -> None:
        """Continue each change that waits for programs, if all of its programs are now compiled.

        The engine calls this method when the background warm-up has compiled programs.
        """
        self._proceed_with([one for one in self._present if one.awaits_programs])

    def _proceed_with(self, changes: Iterable[Change]) -> None:
        for one in changes:
            try:
                self._proceed(one)
            except Exception as error:  # the change cannot begin, and nothing has changed
                one.future.set_exception(error)

    def _proceed(self, one: Change) -> None:
        """Move a change forward as far as is possible now.

        - If transitions of the change have not ended, begin nothing.
        - If the next groups of devices must wait for requests, programs or steps in flight, begin nothing.
        - If the next groups need not wait, begin to change all of them.
        - If nothing is left to change, end the change.

        Raises `LayoutError`, `RequestError`, `MemoryBudgetError` or `TransformError` if an error occurs and no group
        has changed or is changing.
        """
        one.let_go()
        try:
            while not one.transitions and one.error is None and (plans := self._plans(one)):
                if self._must_wait(one, plans):
                    return
                for plan in plans:
                    self._begin(one, plan)
        except Exception as error:
            self._stop(one, error)
        if not one.transitions:
            self._end(one)

    def _must_wait(self, one: Change, plans: list[RelayoutPlan | RelocationPlan]) -> bool:
        """Return whether a change must wait for requests, programs or steps in flight before it can continue.

        If True, the state of the change is now `AWAITING_REQUESTS`, `AWAITING_PROGRAMS` or `DRAINING`.
        """
        old = [instance for plan in plans for instance in plan.old]
        executables, specs = self._cluster.executables, [s for plan in plans for s in plan.programs(self._cluster)]
        executables.check(specs)
        missing = 0 if executables.request(specs) else executables.num_missing(specs)
        count = sum(len(instance.running) for instance in old)
        if one.options.running == "wait" and (count or missing):
            one.hold(old)  # otherwise the change would also wait for requests that start now
            if count:
                one.await_requests(count)
                return True
        one.update_programs(missing, executables.estimate_compile_s(missing))
        if missing:
            return True
        for spec in [spec for spec in specs if executables.has_failed([spec])]:
            executables.get(spec)  # raises the error of the failed compilation
        # All draining instances stop together. Otherwise, new steps of one instance would make all others wait again.
        draining = [instance for plan in plans for instance in plan.draining]
        if not any(instance.pending for instance in draining):
            return False
        one.enter(TransformState.DRAINING)
        one.hold(old, draining)
        return True

    def _begin(self, one: Change, plan: RelayoutPlan | RelocationPlan) -> None:
        """Begin to change one group of devices.

        A pause or resume is complete when this method returns, because no layers switch. All other changes of a group
        start a transition: the layers switch later.
        """
        cluster = self._cluster
        if isinstance(plan, RelocationPlan):
            transition = Relocation(cluster, plan)
            transition.begin(self._requeue)
        else:
            forget_paused(plan)
            if plan.kind in ("pause", "resume"):
                one.reports.append(pause(cluster, plan) if plan.kind == "pause" else resume(cluster, plan))
                return
            transition = begin(cluster, plan, self._requeue)
        one.prepare_s += transition.prepare_s
        one.transitions.append(transition)
        transition.instance.transition = transition
        cluster.link_lanes()
        transition.instance.enter(Phase.CHANGING)
        one.enter(TransformState.SWITCHING)

    def _stop(self, one: Change, error: Exception) -> None:
        """Stop a change, because one of its groups could not begin to change.

        First abort the transitions that have not begun to switch layers. There are then two cases:

        - Other groups of the change have changed or are changing: record the error. The caller of the change gets the
          error after the last transition of the change has ended.
        - No group of the change has changed or is changing: end the change, and raise `LayoutError`, `RequestError`,
          `MemoryBudgetError` or `TransformError`.
        """
        for transition in [t for t in one.transitions if not t.started]:
            transition.fail(self._requeue)
            self._remove(one, transition)
        if one.reports or one.transitions:
            one.fail(error, "what had not begun is as it was")
            return
        self._present.remove(one)
        one.enter(TransformState.ABORTED)
        refused = RequestError if isinstance(error, OutOfPagesError) else type(error)
        relocates = isinstance(one.options, PlacementOptions)
        if issubclass(refused, RequestError) or (relocates and issubclass(refused, LayoutError | MemoryBudgetError)):
            raise refused(f"{one.name} is refused: {error}") from error
        drop_frames(error)
        raise TransformError(f"{one.name} failed: {error} (it had not begun; all is as it was)") from error

    # Switches, around the steps of an instance

    def switch_layers(self, instance: Instance, num_preempted: int, step: StepPlan | None) -> bool:
        """Launch the switch of the next layers of an instance in transition. Return whether the transition continues.

        Call this method before each step of the instance. If the switch fails, the transition ends, and the result is
        False.

        Args:
            num_preempted: number of sequences that were preempted just before this call, for the report.
            step: next step, whose programs may run a part of the switch. If None, the whole switch runs before the next
                step.
        """
        transition = instance.transition
        transition.recomputed += num_preempted
        try:
            self._switch(transition, step)
        except Exception as error:
            self._fail(transition, error)
        return instance.transition is transition

    def _switch(self, transition: Transition, step: StepPlan | None = None) -> None:
        with TraceAnnotation("amoeba.switch", instance=transition.instance.id, switched=transition.num_switched):
            transition.switch_layers(step)

    def switch_alone(self, instance: Instance) -> bool:
        """Launch, without a step, the switch that `switch_layers` left to the next step.

        Call this method if that step cannot be launched. Return whether the transition continues. If the switch fails,
        the transition ends, and the result is False.
        """
        transition = instance.transition
        try:
            transition.switch_alone()
        except Exception as error:
            self._fail(transition, error)
        return instance.transition is transition

    def step_launched(self, instance: Instance, plan: StepPlan | None) -> None:
        """Record that an instance in transition has launched a step, or that the instance had nothing to compute.

        If the instance had nothing to compute, a relayout (change of degree) now switches all remaining layers. A
        relocation switches no layers here, because the weights of the remaining layers must arrive first.

        Args:
            plan: launched step. None if the instance had nothing to compute.
        """
        if (transition := instance.transition) is None:
            return  # the step has failed, which ended the transition
        try:
            if plan is not None:
                transition.steps += 1
                transition.tokens += len(instance.pending[-1].sampled)
            while plan is None and transition.changes_degree and not transition.done:
                self._switch(transition)
            if transition.done:
                self._settle(transition)
        except Exception as error:
            self._fail(transition, error)
        transition.drop_spent()

    # From the last switch to the end

    def _settle(self, transition: Transition) -> None:
        """Let the instances of the new placement take over, after the last switch of a transition.

        If `transition.must_drain` is True and steps are in flight, only stop the launch of new steps. `collect` then
        calls this method again when the steps in flight have ended.
        """
        if transition.must_drain and transition.instance.pending:
            transition.instance.enter(Phase.DRAINING)
            return  # `collect` calls this method again
        transition.last_result = transition.settle(self._requeue)
        one = self._owner(transition)
        if transition.last_result is None:
            self._end_transition(transition)
        if one.transitions and all(t.last_result is not None for t in one.transitions):
            one.enter(TransformState.SETTLING)

    def wait(self) -> None:
        """Wait until the future `last_result` of each transition is done. Then call `collect`.

        If layers of a transition still have to switch, its `last_result` is None, and the transition is skipped.
        """
        for transition in self.transitions:
            if transition.last_result is not None:
                transition.last_result.exception()
        self.collect()

    def collect(self) -> None:
        """Continue all changes as far as is possible without a wait for the devices.

        - If a transition has switched all layers and has no steps in flight, let the new placement take effect.
        - If the last work of a transition on the devices is done, end the transition.
        - If the requests or steps that a change awaits have ended, continue the change.
        """
        for transition in [t for t in self.transitions if t.instance.transition is t]:
            if transition.done and not transition.instance.pending:
                try:
                    self._settle(transition)
                except Exception as error:
                    self._fail(transition, error)
        for transition in [t for t in self.transitions if t.last_result is not None and t.last_result.done()]:
            assert transition.last_result is not None
            error = transition.last_result.exception()
            if error is None:
                self._end_transition(transition)
            else:
                self._end_failed(transition, error, transition.fail_settled(self._requeue))
        self._proceed_with([one for one in self._present if one.can_resume])

    def _end_transition(self, transition: Transition) -> None:
        one = self._owner(transition)
        self._remove(one, transition)
        one.reports.append(transition.report())
        self._proceed(one)

    def _end(self, one: Change) -> None:
        """End a change. The caller of the change gets the report or the error.

        If a device of a transformation has gone out of service, the caller gets an error.
        """
        self._present.remove(one)
        if isinstance(one.options, TransformOptions) and one.error is None:
            kept = {device for instance in self._cluster.instances for device in instance.group.device_indices}
            if lost := sorted(set(one.options.devices) - kept):
                error = RuntimeError("devices went out of service while steps or requests were waited for")
                how = "their requests are computed again elsewhere; the others of their groups go on"
                one.fail(error, f"devices {lost}: {how}")
                one.recovered = True
        one.end()

    def _owner(self, transition: Transition) -> Change:
        return next(one for one in self._present if transition in one.transitions)

    def _remove(self, one: Change, transition: Transition) -> None:
        one.transitions.remove(transition)
        if transition.changes_degree:
            reserve_staging(self._cluster, transition.devices, 0)

    # Failures

    def lost(self, instance: Instance, error: Exception, sampled: Iterable[Row] = ()) -> None:
        """Recover a group of devices, after a step or another program has failed during a merge or split.

        The transition ends. All requests of the group are computed again, because their pages may be lost. The group
        then serves at the higher degree with an empty KV cache, even if no layer has switched.

        Args:
            instance: instance that is merging or splitting.
            error: error of the step or program.
            sampled: rows whose next token the failed step was to sample. These tokens are lost.
        """
        transition = instance.transition
        clear_in_flight(sampled)
        logger.error("a step failed during a transformation of devices %s", transition.devices, exc_info=error)
        transition.started = True
        self._fail(transition, error)

    def forget(self, instance: Instance) -> None:
        """End the relocation of an instance, because the KV cache of the instance is lost.

        The instance keeps its present placement. If no relocation of the instance is in progress, do nothing.
        """
        transition = instance.transition
        if isinstance(transition, Relocation):
            self._end_failed(transition, RuntimeError("a step failed"), transition.forget())

    def _fail(self, transition: Transition, error: Exception) -> None:
        drop_frames(error)  # the stack frames of the error may hold buffers, and memory is short
        how = transition.fail(self._requeue)
        transition.drop_spent()
        self._end_failed(transition, error, how)

    def _end_failed(self, transition: Transition, error: BaseException, how: str) -> None:
        one = self._owner(transition)
        drop_frames(error)
        self._remove(one, transition)
        one.fail(error, f"devices {list(transition.devices)}: {how}")
        one.recovered |= transition.started
        self._proceed(one)

    def fail(self, error: BaseException) -> None:
        """End all changes, because the engine has failed. The caller of each change gets a `TransformError`."""
        for one in self._present:
            failure = TransformError(f"the engine failed: {error}")
            failure.__cause__ = error
            one.future.set_exception(failure)
        self._present.clear()
