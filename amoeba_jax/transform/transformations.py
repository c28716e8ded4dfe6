"""All transformations of a cluster, from the request to the report.

`TransformState` lists the states of a transformation. When the reason to wait may have ended,
`Transformations._proceed` moves a transformation to its next state.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import jax

from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.step import Row, StepPlan, clear_in_flight
from amoeba_jax.transform.merge_split import Requeue, merge, split
from amoeba_jax.transform.needs import GroupChange, request_programs, reserve_staging
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.parallel_attention import join_attention
from amoeba_jax.transform.pausing import check_paused, forget, pause, resume
from amoeba_jax.transform.report import GroupTransform, TransformReport
from amoeba_jax.transform.settle import abort, recover, settle_high, settle_low
from amoeba_jax.transform.transformation import Transformation, check_options, next_groups
from amoeba_jax.transform.transition import Transition
from amoeba_jax.views import TransformState, TransformStatus
from kvcache.allocator import OutOfPagesError

logger = logging.getLogger(__name__)

RECOMPUTED = "its requests are computed again"


class Transformations:
    """Transformations that have not ended. Used by the dispatcher thread only.

    Args:
        drain: function that waits for the steps in flight of an instance, and takes their results.
        requeue: function that takes a sequence off its instance and queues it, to be computed again.
    """

    def __init__(self, cluster: Cluster, drain: Callable[[Instance], None], requeue: Requeue):
        self._cluster, self._drain, self._requeue = cluster, drain, requeue
        self._present: list[Transformation] = []

    # Questions

    @property
    def busy(self) -> bool:
        """Whether any transformation has not ended."""
        return bool(self._present)

    @property
    def awaits_programs(self) -> bool:
        """Whether any transformation waits for programs."""
        return any(one.awaits_programs for one in self._present)

    @property
    def statuses(self) -> tuple[TransformStatus, ...]:
        """Progress of the transformations that have not ended."""
        return tuple(one.status for one in self._present)

    @property
    def transitions(self) -> list[Transition]:
        """Transitions of all groups that are changing now. Groups that only wait for their last step are included."""
        return [transition for one in self._present for transition in one.transitions]

    def targets(self) -> dict[int, int]:
        """Return the new degree of each device that is changing or will change.

        Devices of a transformation that waits for programs are left out. So are groups that have already changed, and
        groups that will not change because of an error.
        """
        targets: dict[int, int] = {}
        for one in [one for one in self._present if not one.awaits_programs]:
            degree = one.options.tensor_parallel_size
            devices = {device for transition in one.transitions for device in transition.devices}
            if one.error is None:
                to_come = [
                    i for i in self._cluster.instances if not one.options.is_reached_by(i.tp, i.attention_degree)
                ]
                devices |= {device for i in to_come for device in i.group.device_indices}
            targets |= dict.fromkeys(devices & set(one.options.devices), degree)
        return targets

    def request_programs(self, options: TransformOptions) -> bool:
        """Return whether all programs of a transformation are compiled. If not, compile them in the background."""
        return not request_programs(self._cluster, options, next_groups(options, self._cluster))

    def capacity_to_come(self, instance: Instance, further: TransformOptions | None = None) -> tuple[int, int]:
        """Return the capacity in tokens, and the degree, that an instance will have after all transformations.

        Any thread may call this. The instance may already have been replaced.

        Args:
            further: options of a transformation that is not requested yet, or None.
        """
        present = next((one for one in list(self._present) if instance.id in one.options.devices), None)
        options = present.options if present is not None else further
        attention = instance.attention_degree
        if options is None or instance.id not in options.devices or options.is_reached_by(instance.tp, attention):
            return self._cluster.capacity_tokens(attention, instance.released), instance.tp
        tp, released = options.tensor_parallel_size, instance.released
        if tp < instance.tp:
            released = min(released, tp)
        elif options.release_weights and tp > instance.tp:
            released = max(released, tp)
        return self._cluster.capacity_tokens(options.attention, released), tp

    def names(self, devices: Iterable[int]) -> bool:
        """Return whether a transformation that has not ended includes one of these devices."""
        return any(not set(devices).isdisjoint(one.options.devices) for one in self._present)

    def is_about_to_change(self, instance: Instance) -> bool:
        """Return whether an instance will change as soon as its steps in flight have ended."""
        return any(instance in one.draining for one in self._present)

    def holds(self, instance: Instance) -> bool:
        """Return whether an instance must launch no step until its steps in flight have ended.

        This is so if the instance is about to change, or if all of its layers have switched.
        """
        if instance.transition is not None:
            return bool(instance.pending) and instance.transition.done
        return self.is_about_to_change(instance)

    # From the request to the first switch

    def request(self, options: TransformOptions) -> "Future[TransformReport]":
        """Start a transformation. Raises `LayoutError` or `RequestError`, and changes nothing, if it is impossible."""
        check_options(options, self._cluster, self._present)
        self._cluster.check_in_service(options.devices)
        check_paused([i for i in self._cluster.instances if i.id in options.devices], options)
        one = Transformation(options)
        self._present.append(one)
        self._proceed(one)
        return one.future

    def retry(self) -> None:
        """Continue transformations that wait for programs. The engine calls this when programs have been compiled."""
        self._proceed_with([one for one in self._present if one.awaits_programs])

    def _proceed_with(self, transformations: Iterable[Transformation]) -> None:
        for one in transformations:
            try:
                self._proceed(one)
            except Exception as error:  # it cannot begin, and nothing has changed
                one.future.set_exception(error)

    def _proceed(self, one: Transformation) -> None:
        """Start all changes of groups that can start now. If no group is left, end the transformation.

        Raises `RequestError` or `TransformError` if the transformation fails before anything has changed.
        """
        for instance in one.draining:
            if instance.phase is Phase.DRAINING:  # not lost meanwhile
                instance.enter(Phase.SERVING)
        one.draining = []
        try:
            while not one.transitions and one.error is None and (groups := next_groups(one.options, self._cluster)):
                if self._must_wait(one, groups):
                    return
                for old in groups:
                    self._begin(one, old)
        except Exception as error:
            self._stop(one, error)
        if not one.transitions:
            self._end(one)

    def _must_wait(self, one: Transformation, groups: list[list[Instance]]) -> bool:
        """Return whether a transformation must wait for requests, programs or steps. If so, enter the state of waiting.

        While it waits for requests or steps, no requests start on the instances of `groups`.
        """
        instances = [instance for old in groups for instance in old]
        count = sum(len(instance.running) for instance in instances)
        awaits_requests = count > 0 and one.options.running == "wait"
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = awaits_requests
        if awaits_requests:
            one.await_requests(count)
            return True
        missing = request_programs(self._cluster, one.options, groups)
        one.update_programs(missing, self._cluster.executables.estimate_compile_s(missing))
        if missing:
            return True
        # All wait together: an instance that launched steps meanwhile would make the others wait again.
        draining = [instance for old in groups if not _keeps_steps(one, old) for instance in old]
        if not any(instance.pending for instance in draining):
            return False
        one.enter(TransformState.DRAINING)
        one.draining = draining
        for instance in draining:
            instance.enter(Phase.DRAINING)
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = True
        return True

    def _begin(self, one: Transformation, old: list[Instance]) -> None:
        degree = one.options.tensor_parallel_size
        for instance in old:
            if instance.paused and instance.paused[0].tp != degree:
                forget(instance)  # no requests are paused: see `check_paused`
        if _keeps_steps(one, old):
            self._pause(one, old)
        elif old[0].paused and not old[0].running:
            self._resume(one, old[0])
        else:
            self._begin_transition(one, old)

    def _begin_transition(self, one: Transformation, old: list[Instance]) -> None:
        cluster, options = self._cluster, one.options
        try:
            if len(old) > 1:
                transition = merge(cluster, options, old, self._requeue)
            elif old[0].has_parallel_attention:
                transition = join_attention(cluster, options, old[0])
            else:
                transition = split(cluster, options, old[0])
        except BaseException:
            for instance in old:
                reserve_staging(cluster, instance.group.device_indices, 0)
            raise
        one.prepare_s += transition.prepared.seconds
        one.transitions.append(transition)
        transition.instance.transition = transition
        cluster.link_lanes()
        transition.instance.enter(Phase.CHANGING)
        one.enter(TransformState.SWITCHING)

    def _pause(self, one: Transformation, old: list[Instance]) -> None:
        """Pause the requests of instances. One instance over all of their devices serves meanwhile."""
        start = time.perf_counter()
        change, cluster = GroupChange.of(self._cluster, one.options, old), self._cluster
        cluster.check_compiled(change.group, change.group.tp, change.released[1])
        for instance in old:
            if instance.released < change.released[0]:
                self._drain(instance)
                if instance not in cluster.instances:
                    raise RequestError(f"a step of instance {instance.id} has failed")
                cluster.release_more(instance, change.released[0])
        count = len(pause(cluster, old).paused_sequences)
        degrees = old[0].tp, change.group.tp
        one.groups.append(GroupTransform.without_moves(change.group.device_indices, degrees, start, paused=count))

    def _resume(self, one: Transformation, instance: Instance) -> None:
        """Replace an instance without requests by its paused instances, and resume their requests."""
        start = time.perf_counter()
        dropped = instance.lane.cache.num_cached_pages
        members = resume(self._cluster, instance)
        degrees, resumed = (instance.tp, members[0].tp), sum(len(member.running) for member in members)
        devices = instance.group.device_indices
        counts = {"resumed": resumed, "prefix_pages_dropped": dropped}
        one.groups.append(GroupTransform.without_moves(devices, degrees, start, **counts))

    def _stop(self, one: Transformation, error: Exception) -> None:
        """Stop a transformation after an error. Raise the error if nothing has changed.

        Transitions that have not started are aborted. Transitions that have started continue.
        """
        for transition in [t for t in one.transitions if not t.started]:
            abort(self._cluster, transition)
            self._remove(one, transition)
        if one.groups or one.transitions:
            one.error = error
            one.outcomes.append("what had not begun is as it was")
            return
        self._present.remove(one)
        one.enter(TransformState.ABORTED)
        if isinstance(error, OutOfPagesError | RequestError):
            kind = type(error) if isinstance(error, RequestError) else RequestError
            raise kind(f"the transformation is refused: {error}") from error
        drop_frames(error)
        raise TransformError(f"{one.name} failed: {error} (it had not begun; all is as it was)") from error

    # Switches, around the steps of an instance

    def switch_layers(self, instance: Instance, num_preempted: int, step: StepPlan | None) -> bool:
        """Launch the switch of the next layers before the next step, or leave it to the programs of this step.

        Return whether the instance is still in transition. If the switch fails, it is not.

        Args:
            num_preempted: number of sequences that have just lost their pages because no page was free.
            step: next step, if it is known.
        """
        transition = instance.transition
        transition.recomputed += num_preempted
        return self._tried(transition, lambda: transition.switch_layers(step))

    def switch_alone(self, instance: Instance) -> bool:
        """Launch a switch that was left to a step, because the step cannot be launched.

        Return the same as `switch_layers`.
        """
        return self._tried(instance.transition, instance.transition.switch_alone)

    def _tried(self, transition: Transition, switch: Callable[[], None]) -> bool:
        try:
            switch()
        except Exception as error:
            self._fail(transition, error)
            transition.drop_spent()
            return False
        return True

    def step_launched(self, instance: Instance, plan: StepPlan | None) -> None:
        """Record a launched step of an instance in transition. `plan` is None if there was nothing to compute.

        If there was nothing to compute, switch all remaining layers at once.
        """
        if (transition := instance.transition) is None:
            return  # the step failed, and the transition with it
        try:
            if plan is None:
                while not transition.done:
                    transition.switch_layers()
            else:
                transition.steps += 1
                transition.tokens += len(instance.pending[-1].sampled)
            if transition.done:
                self._settle(transition)
        except Exception as error:
            self._fail(transition, error)
        transition.drop_spent()

    # From the last switch to the end

    def _settle(self, transition: Transition) -> None:
        """End a transition after its last switch: the new instances take over."""
        cluster, instance = self._cluster, transition.instance
        if not transition.up and instance.pending:
            return  # until `collect` finds that the steps have run
        if transition.steps and not instance.pending:  # nothing else tells when the last switch has run
            jax.block_until_ready([transition.high.kv, *(site.kv for site in transition.members)])
        if transition.up:
            settle_high(cluster, transition)
            transition.last_result = instance.pending[-1].result if instance.pending else None
        else:
            settle_low(cluster, transition, self._requeue)
            if transition.restored:
                home = next(i for i in cluster.instances if i.id == instance.id)
                transition.last_result = home.reader.when_ready(transition.restored)
        if transition.last_result is None:
            self._end_transition(transition)
        elif all(t.last_result is not None for t in self._owner(transition).transitions):
            self._owner(transition).enter(TransformState.SETTLING)

    def wait(self) -> None:
        """Wait for transitions whose layers have all switched, and end them."""
        for transition in self.transitions:
            if transition.last_result is not None:
                transition.last_result.exception()
        self.collect()

    def collect(self) -> None:
        """End transitions whose last step has run.

        Continue transformations that waited for requests or steps, if these ended.
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
                self._fail_settled(transition, error)
        self._proceed_with([one for one in self._present if one.can_resume])

    def _end_transition(self, transition: Transition) -> None:
        one = self._owner(transition)
        self._remove(one, transition)
        one.groups.append(transition.report())
        self._proceed(one)

    def _end(self, one: Transformation) -> None:
        """End a transformation and give the caller the report. Let requests start again on all of its instances.

        If devices went out of service during the transformation, the report is an error.
        """
        self._present.remove(one)
        left = [i for i in self._cluster.instances if i.id in one.options.devices]
        for lane in [lane for instance in left for lane in instance.lanes]:
            lane.closed = False
        lost = set(one.options.devices).difference(*(instance.group.device_indices for instance in left))
        if lost and one.error is None:
            error = RuntimeError("devices went out of service while steps or requests were waited for")
            how = "their requests are computed again elsewhere; the others of their groups go on"
            one.fail(error, sorted(lost), how)
            one.recovered = True
        one.end()

    def _owner(self, transition: Transition) -> Transformation:
        return next(one for one in self._present if transition in one.transitions)

    def _remove(self, one: Transformation, transition: Transition) -> None:
        one.transitions.remove(transition)
        reserve_staging(self._cluster, transition.devices, 0)

    # Failures

    def lost(self, instance: Instance, error: Exception, sampled: Iterable[Row] = ()) -> None:
        """Recover a group in transition after a step or another program has failed on its devices.

        The group gets the higher degree and an empty cache. This is done even if no layer has switched, because pages
        may be lost.

        Args:
            sampled: rows of the failed step whose tokens were in flight.
        """
        transition = instance.transition
        clear_in_flight(sampled)
        logger.error("a step failed during a transformation of devices %s", transition.devices, exc_info=error)
        drop_frames(error)
        self._recover(transition)
        self._end_failed(transition, error, RECOMPUTED)

    def _fail(self, transition: Transition, error: Exception) -> None:
        """Handle an error of a transition. Abort it if no switch has started; otherwise recover its group."""
        drop_frames(error)  # they may hold buffers, and memory is short
        if transition.started:
            self._recover(transition)
            self._end_failed(transition, error, RECOMPUTED)
        else:
            abort(self._cluster, transition)
            self._end_failed(transition, error, "its instances are as they were", recovered=False)

    def _recover(self, transition: Transition) -> None:
        """Recover a group at the higher degree. If its cache cannot be allocated, take the group out of service."""
        transition.instance.transition = None
        transition.restored = []  # a kept error would keep the buffers
        for _ in range(2):
            try:
                recover(self._cluster, transition, self._requeue)
                return
            except Exception as error:
                logger.exception("the cache of devices %s cannot be made again", transition.devices)
                drop_frames(error)
            gc.collect()
        transition.drop_buffers()
        self._cluster.take_back([transition.instance])

    def _fail_settled(self, transition: Transition, error: BaseException) -> None:
        """Recover a group that has settled, but whose last result cannot be read.

        After a merge, the last result is a step. `Steps.recover` has already handled its failure. After a split, the
        last result is the restored weights. They are marked as released, and loaded again.
        """
        how = RECOMPUTED
        if not transition.up:
            instances = [i for i in self._cluster.instances if i.id in transition.devices]
            for instance in instances:
                instance.requeue_all(self._requeue)
                instance.site.kv.clear()
            transition.drop_buffers()
            programs, weights = transition.programs, self._cluster.weights
            for layer in range(programs.num_layers):
                weights.release(programs.group, layer, programs.released[1], programs.released[0])
            self._cluster.take_back(instances)
            how = f"its weights are loaded again, and {how}"
        self._end_failed(transition, error, how)

    def _end_failed(self, transition: Transition, error: BaseException, how: str, *, recovered: bool = True) -> None:
        one = self._owner(transition)
        drop_frames(error)
        self._remove(one, transition)
        one.fail(error, transition.devices, how)
        one.recovered |= recovered
        self._proceed(one)

    def fail(self, error: BaseException) -> None:
        """End all transformations, because the engine has failed."""
        for one in self._present:
            failure = TransformError(f"the engine failed: {error}")
            failure.__cause__ = error
            one.future.set_exception(failure)
        self._present.clear()


def _keeps_steps(one: Transformation, old: list[Instance]) -> bool:
    """Return whether steps in flight may run during the change. They may if requests only pause."""
    return one.options.running == "pause" and len(old) > 1
