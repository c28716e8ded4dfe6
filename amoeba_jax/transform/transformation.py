"""Transformations: which groups of devices change their degree, from the request to the report.

A group's transition has a point of no return: the switch of its first layer. What fails before it leaves the instances
as they were. What fails after it ends at the higher degree, whose weights are never given away, with all extents that
are not weights as an empty cache: the group's requests are computed again from their tokens.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import jax

from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.giving_up import give_up
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepPlan
from amoeba_jax.transform.at_once import AtOnce
from amoeba_jax.transform.beginning import Beginning
from amoeba_jax.transform.call import GroupTransition, TransformCall, check_options, next_groups
from amoeba_jax.transform.ending import Ending
from amoeba_jax.transform.needs import needed_programs
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.pausing import check_paused, forget
from amoeba_jax.transform.report import TransformReport, TransformVariant
from amoeba_jax.transform.residency import released_for
from amoeba_jax.transform.staging import reserve_staging
from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool

logger = logging.getLogger(__name__)


class Transformations:
    """Starts, advances and ends transitions of a cluster's instances. Used by the dispatcher thread only.

    Args:
        drain: waits for what an instance has launched, and takes in the results.
        requeue: takes a sequence off its instance, to be computed again.
    """

    def __init__(
        self,
        cluster: Cluster,
        drain: Callable[[Instance], None],
        requeue: Callable[[Instance, Sequence], None],
    ):
        self._cluster, self._requeue = cluster, requeue
        self._beginning, self._ending = Beginning(cluster, requeue), Ending(cluster, requeue)
        self._at_once = AtOnce(cluster, drain, requeue)
        self._calls: list[TransformCall] = []
        self._active: dict[Instance, GroupTransition] = {}
        self._finishing: list[tuple[GroupTransition, Future[Any]]] = []

    @property
    def busy(self) -> bool:
        """A transformation has not ended yet."""
        return bool(self._calls)

    @property
    def awaits_programs(self) -> bool:
        """A transformation cannot begin, or go on, before programs have come."""
        return any(call.awaits_programs for call in self._calls)

    def targets(self) -> dict[int, int]:
        """Return the degree to come of every device that is being transformed, or is about to be.

        Groups of a call that have ended, or that will not begin as another has failed, are not among them.
        """
        targets: dict[int, int] = {}
        for call in (call for call in self._calls if not call.awaits_programs):
            active = [*self._active.values(), *(active for active, _ in self._finishing)]
            devices = {device for a in active if a.call is call for device in a.devices}
            if call.error is None:
                to_come = [i for i in self._cluster.instances if i.tp != call.options.tensor_parallel_size]
                devices |= {device for i in to_come for device in i.group.device_indices}
            targets |= dict.fromkeys(devices & set(call.options.devices), call.options.tensor_parallel_size)
        return targets

    def request_programs(self, options: TransformOptions) -> bool:
        """Whether a transformation could begin at once. If not, its programs are compiled meanwhile."""
        return self._request_programs(options, next_groups(options, self._cluster))

    def _request_programs(self, options: TransformOptions, groups: list[list[Instance]]) -> bool:
        needed = [request for old in groups for request in needed_programs(self._cluster, options, old)]
        return self._cluster.executables.request(needed)

    def capacity_to_come(self, instance: Instance, further: TransformOptions | None = None) -> tuple[int, int]:
        """Tokens that an instance of an instance's devices holds when all transformations are through, and its degree.

        `further` is one that has not been requested yet. May be called by any thread.
        """
        call = next((call for call in list(self._calls) if instance.id in call.options.devices), None)
        options = call.options if call is not None else further
        if options is None or instance.id not in options.devices:
            return instance.capacity_tokens, instance.tp
        if options.tensor_parallel_size == instance.tp:
            if call is not None and instance.id not in call.residencies:
                return instance.capacity_tokens, instance.tp
            return self._cluster.capacity_tokens(instance.tp, released_for(options)), instance.tp
        tp, released = options.tensor_parallel_size, instance.released
        if tp < instance.tp:
            released = min(released, tp)
        elif options.release_weights:
            released = max(released, tp)
        return self._cluster.capacity_tokens(tp, released), tp

    def request(self, options: TransformOptions) -> "Future[TransformReport]":
        """Start a transformation. Raises `LayoutError` or `RequestError`, with nothing changed, if it cannot be."""
        check_options(options, self._cluster, self._calls)
        self._cluster.check_in_service(options.devices)
        named = [i for i in self._cluster.instances if i.id in options.devices]
        check_paused(named, options)
        call = TransformCall(options)
        degree = options.tensor_parallel_size
        call.residencies = {i.id for i in named if i.tp == degree and i.released != released_for(options)}
        self._calls.append(call)
        self._proceed(call)
        return call.future

    # The course of a call

    def _proceed(self, call: TransformCall) -> None:
        """Start whatever transitions of a call can start now; report if there are none left."""
        if call.error is None:
            try:
                while not call.active and call.error is None and (groups := self._next_groups(call)):
                    call.awaited = []
                    if self._await_requests(call, groups):
                        return  # until `collect` finds that they have ended
                    call.awaits_programs = not self._request_programs(call.options, groups)
                    if call.awaits_programs:
                        return  # until `retry`
                    if self._await_steps(call, groups):
                        return  # until `collect` finds that they have run
                    for old in groups:
                        self._begin(call, old)
                        if call.error is not None:
                            break  # a restart failed
            except Exception as error:
                for active in [a for a in self._active.values() if a.call is call and not a.transition.started]:
                    self._abort(active)
                    reserve_staging(self._cluster, active.devices, 0)
                    call.active -= 1
                if not call.groups and not call.active:
                    self._calls.remove(call)
                    if isinstance(error, OutOfPagesError | RequestError):
                        kind = type(error) if isinstance(error, RequestError) else RequestError
                        raise kind(f"the transformation is refused: {error}") from error
                    drop_frames(error)
                    degree = call.options.tensor_parallel_size
                    raise TransformError(
                        f"the transformation to TP{degree} failed: {error} (it had not begun; all is as it was)"
                    ) from error
                call.error = error
                call.outcomes.append("what had not begun is as it was")
        if call.active:
            return
        self._calls.remove(call)
        call.end()

    def _next_groups(self, call: TransformCall) -> list[list[Instance]]:
        return next_groups(call.options, self._cluster, call.residencies)

    def awaits_steps(self, instance: Instance) -> bool:
        """Whether an instance launches no steps until those that it has launched have run: it is about to change, or
        all of its layers are where they are to be."""
        if instance.transition is not None:
            return bool(instance.pending) and self._active[instance].transition.done
        return any(instance in call.awaited for call in self._calls)

    def retry(self) -> None:
        """Programs have come: go on with calls that wait for some."""
        self._proceed_with([call for call in self._calls if call.awaits_programs])

    def _proceed_with(self, calls: list[TransformCall]) -> None:
        for call in calls:
            try:
                self._proceed(call)
            except Exception as error:  # it cannot begin, and all is as it was
                call.future.set_exception(error)

    def _begin(self, call: TransformCall, old: list[Instance]) -> None:
        degree = call.options.tensor_parallel_size
        for instance in old:
            if instance.paused and instance.paused[0].tp != degree:
                forget(instance)  # they have no requests: see `check_paused`
        if _keeps_steps(call, old):
            self._at_once.pause(call, old)
            return
        if old[0].tp == degree:
            self._at_once.change_residency(call, old[0])
            return
        if old[0].paused and not old[0].running:
            self._at_once.resume(call, old[0])
            return
        if call.options.variant is TransformVariant.RESTART:
            self._at_once.restart(call, old)
            return
        try:
            active = self._beginning.merge(call, old) if len(old) > 1 else self._beginning.split(call, old[0])
        except BaseException:
            for instance in old:
                reserve_staging(self._cluster, instance.group.device_indices, 0)
            raise
        self._active[active.transition.instance] = active
        active.transition.instance.transition = active.transition
        call.active += 1

    def _await_requests(self, call: TransformCall, groups: list[list[Instance]]) -> bool:
        """Whether requests run that are waited for. No others start beside them."""
        instances = [instance for old in groups for instance in old]
        call.awaits_requests = call.options.running == "wait" and any(instance.running for instance in instances)
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = call.awaits_requests
        return call.awaits_requests

    def _await_steps(self, call: TransformCall, groups: list[list[Instance]]) -> bool:
        """Whether steps that were launched are waited for. No others are, and no requests start beside them."""
        call.awaited = [i for old in groups if not _keeps_steps(call, old) for i in old if i.pending]
        for lane in [lane for old in groups if call.awaited for instance in old for lane in instance.lanes]:
            lane.closed = True
        return bool(call.awaited)

    # The course of a transition

    def switch_layers(self, instance: Instance, num_preempted: int) -> bool:
        """Launch the switch of the next layers of an instance in transition, before its next step.

        `num_preempted` of its sequences have just lost their pages, for want of room. Returns whether it is still in
        transition: False where the switch failed.
        """
        active = self._active[instance]
        active.recomputed += num_preempted
        try:
            active.transition.switch_layers()
        except Exception as error:
            self._fail(active, error)
            active.transition.drop_spent()
            return False
        return True

    def step_launched(self, instance: Instance, plan: StepPlan | None) -> None:
        """A step was launched behind the switch, or there was nothing to compute: then all layers switch at once."""
        if (active := self._active.get(instance)) is None:
            return  # the step failed, and the transition with it
        transition = active.transition
        try:
            if plan is None:
                while not transition.done:
                    transition.switch_layers()
            else:
                active.steps += 1
                active.tokens += len(instance.pending[-1].sampled)
            transition.pace.behind_step = 0
            if transition.done:
                self._finish(active)
        except Exception as error:
            self._fail(active, error)
        transition.drop_spent()

    def _finish(self, active: GroupTransition) -> None:
        cluster, transition = self._cluster, active.transition
        instance, group = transition.instance, transition.instance.group
        if not transition.up and instance.pending:
            return  # until `collect` finds that they have run
        if active.steps and not instance.pending:  # no one else will tell when the last switch is over
            jax.block_until_ready([transition.high.kv, *(site.kv for site in transition.members)])
        if transition.up:
            allocators = cluster.factory.settle_allocators(group, active.allocators)
            self._ending.settle_high(instance, PagePool(cluster.dims.pages, allocators, group.tp))
        else:
            self._ending.settle_low(active)
        del self._active[instance]
        if transition.up and instance.pending:
            self._finishing.append((active, instance.pending[-1].result))
            return
        if transition.restored:
            home = next(i for i in cluster.instances if i.id == instance.id)
            self._finishing.append((active, home.reader.when_ready(transition.restored)))
            return
        self._end(active)

    def wait(self) -> None:
        """Wait for transitions that have switched all layers, and end them."""
        for _, result in self._finishing:
            result.exception()
        self.collect()

    def collect(self) -> None:
        """End the transitions whose last step has run, and begin those whose instances' requests, or steps, have
        ended."""
        for active in [a for a in self._active.values() if a.transition.done and not a.transition.instance.pending]:
            try:
                self._finish(active)
            except Exception as error:
                self._fail(active, error)
        self._proceed_with([call for call in self._calls if call.awaits_requests or _steps_have_run(call)])
        arrived = [finishing for finishing in self._finishing if finishing[1].done()]
        self._finishing = [finishing for finishing in self._finishing if finishing not in arrived]
        for active, result in arrived:
            error = result.exception()
            if error is None:
                self._end(active)
            else:
                self._fail_finishing(active, error)

    def _end(self, active: GroupTransition) -> None:
        reserve_staging(self._cluster, active.devices, 0)
        active.call.groups.append(active.report())
        active.call.active -= 1
        self._proceed(active.call)

    # Failures

    def _fail(self, active: GroupTransition, error: Exception) -> None:
        """A step or a switch failed: back to what was, or, after the point of no return, on with an empty cache."""
        if active.transition.started:
            self._recover(active)
            how = "its requests are computed again"
        else:
            self._abort(active)
            how = "its instances are as they were"
        self._end_failed(active, error, how)

    def lost(self, instance: Instance, error: Exception, rows: Iterable[Row]) -> None:
        """A step of these rows of an instance in transition failed on its devices: its results cannot be read. The
        group goes on at the higher degree with an empty cache, whether or not a layer has switched: its pages may be
        lost."""
        active = self._active[instance]
        for row in rows:
            row.sequence.num_in_flight = 0
        logger.error("a step failed during a transformation of devices %s", active.devices, exc_info=error)
        self._recover(active)
        self._end_failed(active, error, "its requests are computed again")

    def _fail_finishing(self, active: GroupTransition, error: BaseException) -> None:
        """What a group was left with cannot be read: its cache, which is made again with its step, or its weights."""
        how = "its requests are computed again"
        if not active.transition.up:
            instances = [i for i in self._cluster.instances if i.id in active.devices]
            for instance in instances:
                give_up(instance, self._requeue)
            # What was restored counts as released again, and is loaded.
            programs, weights = active.transition.programs, self._cluster.weights
            for layer in range(programs.num_layers):
                weights.release(programs.group, layer, programs.released[1], programs.released[0])
            self._cluster.take_back(instances)
            how = f"its weights are loaded again, and {how}"
        self._end_failed(active, error, how)

    def _end_failed(self, active: GroupTransition, error: BaseException, how: str) -> None:
        drop_frames(error)
        for site in (active.transition.high, *active.transition.members):
            site.forget_weights()  # those that were replaced by then live as long as views of them
        reserve_staging(self._cluster, active.devices, 0)
        active.call.fail(error, active.devices, how)
        active.call.active -= 1
        self._proceed(active.call)

    def fail(self, error: BaseException) -> None:
        """The engine fails: so do the transformations under way."""
        for call in self._calls:
            failure = TransformError(f"the engine failed: {error}")
            failure.__cause__ = error
            call.future.set_exception(failure)
        self._calls.clear()
        self._active.clear()
        self._finishing.clear()

    def _abort(self, active: GroupTransition) -> None:
        """Before the point of no return: nothing has moved and no step has run, and the layout to come is dropped."""
        del self._active[active.transition.instance]
        self._ending.abort(active)

    def _recover(self, active: GroupTransition) -> None:
        """After it: the group goes on at the higher degree, and computes its requests again."""
        del self._active[active.transition.instance]
        self._ending.recover(active)


def _keeps_steps(call: TransformCall, old: list[Instance]) -> bool:
    """Whether a change leaves the steps that its instances have launched to themselves: their requests pause."""
    return call.options.running == "pause" and len(old) > 1


def _steps_have_run(call: TransformCall) -> bool:
    """Whether a call can begin that has waited for steps."""
    return bool(call.awaited) and not any(instance.pending for instance in call.awaited)
