"""Transition: the time in which an instance changes from one placement to another, layer by layer.

There are two kinds of transitions. A `Relayout` changes the tensor-parallel degree of a group of devices: pages move in
place among the ranks of the group. A `Relocation` replicates, migrates or evicts modules: pages and weights are copied
from device to device.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.transform.lanes import Requeue, regroup
from amoeba_jax.transform.report import GroupTransform, PlacementReport
from kvcache.pages import PagePool
from sharding.placement import Home, Placement


class Transition(ABC):
    """Transition of one instance between two placements. Only the dispatcher thread may use this object.

    During the transition, `Instance.transition` is this object.

    Args:
        instance: instance whose layers switch. The instance serves during the transition.
        devices: indices of all devices of the two placements, in ascending order.
        num_layers: number of layers that must switch.

    Attributes:
        changes_degree: whether the instance or its attention changes its degree.
        num_switched: number of layers that have switched to their new homes.
        started: whether the first switch has begun. If True, the transition can no longer be aborted.
        last_result: future of the last work on the devices. The transition ends when this future is done. None until
            all layers have switched.
        prepare_s: seconds in which the engine compiled missing programs and launched no steps.
        steps: number of steps launched during the transition.
        tokens: number of tokens sampled during the transition.
        recomputed: number of times that a sequence lost its pages during the transition.
    """

    changes_degree = False
    prepare_s = 0.0

    def __init__(self, cluster: Cluster, instance: Instance, devices: Iterable[int], num_layers: int):
        self.cluster, self.instance = cluster, instance
        self.devices, self.num_layers = tuple(devices), num_layers
        self.num_switched = self.steps = self.tokens = self.recomputed = 0
        self.started = False
        self.last_result: Future[Any] | None = None
        self._spent: list[Any] = []
        self._start = time.perf_counter()

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all layers have switched."""

    @property
    def overlaps(self) -> bool:
        """Whether a switch may run inside the programs of a step."""
        return False

    @property
    def must_drain(self) -> bool:
        """Whether all steps in flight must end before `settle` is called."""
        return False

    @abstractmethod
    def switch_layers(self, step: StepPlan | None = None) -> None:
        """Launch the switch of the next layers. If no sequence runs, launch the switch of all layers.

        Args:
            step: next step. If `overlaps` is True, programs of this step may run the last part of the switch. If `step`
                is None, the whole switch runs before the next step.
        """

    @abstractmethod
    def switch_alone(self) -> None:
        """Launch, without a step, the switch that `switch_layers` left to the next step.

        Do nothing if no switch is waiting for a step.
        """

    def drop_spent(self) -> None:
        """Drop arrays whose buffers now belong to other arrays.

        After a switch of all layers, there are hundreds of these arrays, and dropping them takes time. Call this method
        after the launch of the next step, so that the step does not wait for this work.
        """
        self._spent.clear()

    @abstractmethod
    def settle(self, requeue: Requeue) -> "Future[Any] | None":
        """Let instances serve at the new placement, after the last switch.

        Return a future that is done when the transition ends. Return None if the transition has already ended.
        """

    @abstractmethod
    def fail(self, requeue: Requeue) -> str:
        """End the transition after an error. Return a text that tells what happened to the instances.

        If no switch has begun, restore the old instances. If a switch has begun, give the instance a placement at which
        it can serve.
        """

    @abstractmethod
    def fail_settled(self, requeue: Requeue) -> str:
        """Handle an error of `last_result`. Return a text that tells what happened to the instances."""

    @abstractmethod
    def report(self) -> GroupTransform | PlacementReport:
        """Return the report of the transition. Call this method after the end of the transition."""

    def serve(
        self, lanes: SequenceOf[Lane], placement: Placement, numbers: SequenceOf[int], pools: Mapping[Home, PagePool]
    ) -> None:
        """End the transition. The instance then serves at `placement`, with a new lane for each microbatch.

        Args:
            lanes: old lanes. Their sequences and cached pages move to the new lanes.
            numbers: indices of microbatches, one index for each old lane. This microbatch gets the sequences of the
                lane.
            pools: `{home: page pool}`. If a home in `pools` is not a home of a new lane, the pages of the lane's
                sequences at this home are freed.
        """
        cluster, instance = self.cluster, self.instance
        new = cluster.factory.new_lanes(placement, instance.allocators, instance.width)
        for number, target in enumerate(new):
            regroup(target, [lane for lane, own in zip(lanes, numbers, strict=True) if own == number], pools)
        instance.lanes, instance.transition = new, None
        instance.attention_degree = placement.attention_degree or instance.tp
        instance.limit_batch(instance.batch_limit)
        instance.runner.place(placement)
        instance.enter(Phase.SERVING)
        cluster.link_lanes()
