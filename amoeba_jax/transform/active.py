"""Transitions under way: layers that switch between steps, and how each group's transition ends.

A transition has a point of no return: the switch of its first layer. What fails before it leaves the instances as they
were. What fails after it ends at the higher degree, whose weights are never given away, with all extents that are not
weights as an empty cache: the group's requests are computed again from their tokens.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import jax

from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan, clear_in_flight
from amoeba_jax.transform.call import GroupTransition, TransformCall
from amoeba_jax.transform.ending import Ending
from amoeba_jax.transform.staging import reserve_staging
from kvcache.pages import PagePool

logger = logging.getLogger(__name__)


class ActiveTransitions:
    """Advances and ends the transitions of groups. Used by the dispatcher thread only.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
        proceed: called with the call of a transition that has ended, whose next groups may begin.
    """

    def __init__(
        self,
        cluster: Cluster,
        requeue: Callable[[Instance, Sequence], None],
        proceed: Callable[[TransformCall], None],
    ):
        self._cluster, self._requeue, self._proceed = cluster, requeue, proceed
        self._ending = Ending(cluster, requeue)
        self._active: dict[Instance, GroupTransition] = {}
        self._finishing: list[tuple[GroupTransition, Future[Any]]] = []

    def __iter__(self) -> Iterator[GroupTransition]:
        """Those that switch layers, and those that wait for their last step."""
        return iter([*self._active.values(), *(active for active, _ in self._finishing)])

    def add(self, active: GroupTransition) -> None:
        """Begin a transition."""
        instance = active.transition.instance
        self._active[instance] = active
        instance.transition = active.transition
        active.call.active += 1

    def take_back(self, call: TransformCall) -> None:
        """Drop the transitions of a call that have not switched a layer: all is as it was."""
        for active in [a for a in self._active.values() if a.call is call and not a.transition.started]:
            self._abort(active)
            reserve_staging(self._cluster, active.devices, 0)
            call.active -= 1

    def clear(self) -> None:
        """Forget all of them: the engine has failed."""
        self._active.clear()
        self._finishing.clear()

    def has_switched_all(self, instance: Instance) -> bool:
        """Whether all layers of an instance in transition are where they are to be."""
        return self._active[instance].transition.done

    def switch_layers(self, instance: Instance, num_preempted: int, step: StepPlan | None) -> bool:
        """Launch the switch of the next layers of an instance in transition, before its next step, or within it if it
        is known.

        `num_preempted` of its sequences have just lost their pages, for want of room. Returns whether it is still in
        transition: False where the switch failed.
        """
        active = self._active[instance]
        active.recomputed += num_preempted
        return self._tried(active, lambda: active.transition.switch_layers(step))

    def switch_deferred(self, instance: Instance) -> bool:
        """Launch a switch that was left to a step that cannot be launched. Returns as `switch_layers` does."""
        active = self._active[instance]
        return self._tried(active, active.transition.switch_deferred)

    def _tried(self, active: GroupTransition, switch: Callable[[], None]) -> bool:
        try:
            switch()
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
        """Wait for the last steps of transitions that have switched all layers."""
        for _, result in self._finishing:
            result.exception()

    def collect(self) -> None:
        """End the transitions whose last step has run."""
        for active in [a for a in self._active.values() if a.transition.done and not a.transition.instance.pending]:
            try:
                self._finish(active)
            except Exception as error:
                self._fail(active, error)
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
        drop_frames(error)  # they may hold buffers that there is no room beside
        if active.transition.started:
            self._recover(active)
            how = "its requests are computed again"
        else:
            self._abort(active)
            how = "its instances are as they were"
        self._end_failed(active, error, how)

    def lost(self, instance: Instance, error: Exception, sampled: Iterable[Row] = ()) -> None:
        """A step of an instance in transition, with these rows whose tokens were in flight, failed on its devices, or
        another program did: results cannot be read. The group goes on at the higher degree with an empty cache, whether
        or not a layer has switched: its pages may be lost."""
        active = self._active[instance]
        clear_in_flight(sampled)
        logger.error("a step failed during a transformation of devices %s", active.devices, exc_info=error)
        drop_frames(error)
        self._recover(active)
        self._end_failed(active, error, "its requests are computed again")

    def _fail_finishing(self, active: GroupTransition, error: BaseException) -> None:
        """What a group was left with cannot be read: its cache, which is made again with its step, or its weights."""
        how = "its requests are computed again"
        if not active.transition.up:
            instances = [i for i in self._cluster.instances if i.id in active.devices]
            for instance in instances:
                instance.requeue_all(self._requeue)
                instance.site.kv.clear()
            active.transition.let_go()
            # What was restored counts as released again, and is loaded.
            programs, weights = active.transition.programs, self._cluster.weights
            for layer in range(programs.num_layers):
                weights.release(programs.group, layer, programs.released[1], programs.released[0])
            self._cluster.take_back(instances)
            how = f"its weights are loaded again, and {how}"
        self._end_failed(active, error, how)

    def _end_failed(self, active: GroupTransition, error: BaseException, how: str) -> None:
        drop_frames(error)
        reserve_staging(self._cluster, active.devices, 0)
        active.call.fail(error, active.devices, how)
        active.call.active -= 1
        self._proceed(active.call)

    def _abort(self, active: GroupTransition) -> None:
        """Before the point of no return: nothing has moved and no step has run, and the layout to come is dropped."""
        del self._active[active.transition.instance]
        self._ending.abort(active)

    def _recover(self, active: GroupTransition) -> None:
        """After it: the group goes on at the higher degree, and computes its requests again. Where its cache cannot be
        made again, it is out of service."""
        transition = active.transition
        del self._active[transition.instance]
        transition.restored = []  # a kept error would keep what copies have replaced
        for _ in range(2):
            try:
                self._ending.recover(active)
                return
            except Exception as error:
                logger.exception("the cache of devices %s cannot be made again", active.devices)
                drop_frames(error)
            gc.collect()
        transition.let_go()
        self._cluster.take_back([transition.instance])
