"""Transition: an instance changes from one placement to another, layer by layer, while its requests run.

There are two kinds of transitions. A `Relayout` changes the tensor-parallel degree of a group of devices: pages move in
place among the ranks of the group. A `Relocation` replicates, migrates or removes modules (attention or FFNs of
layers): pages and weights are copied from device to device.
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
        changes_degree: whether the transition changes the degree of the instance or of its attention.
        num_switched: number of layers that have switched to their new homes.
        started: whether the switch of the first layer has begun. If True, the transition can no longer be aborted.
        last_result: result of `settle`: future of the last work on the devices. The transition ends when this future is
            done. None before `settle` is called.
        prepare_s: number of seconds in which the engine compiled missing programs and launched no steps.
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
        """Whether the switch of layers may run inside the programs of the next step."""
        return False

    @property
    def must_drain(self) -> bool:
        """Whether all steps in flight must have ended before `settle` is called."""
        return False

    @abstractmethod
    def switch_layers(self, step: StepPlan | None = None) -> None:
        """Launch the switch of the next layers. If no sequence runs, launch the switch of all remaining layers.

        Args:
            step: next step. If `overlaps` is True, programs of this step may run the last part of the switch. If `step`
                is None, the whole switch runs before the next step.
        """

    @abstractmethod
    def switch_alone(self) -> None:
        """Launch, without a step, the switch that `switch_layers` left to the next step.

        If `switch_layers` left no switch to the next step, do nothing.
        """

    def drop_spent(self) -> None:
        """Drop all arrays that earlier switches have replaced by other arrays over the same buffers.

        After a switch of all layers, there may be hundreds of replaced arrays, and dropping them takes time. Call this
        method after the launch of the next step, so that the launch is not delayed.
        """
        self._spent.clear()

    @abstractmethod
    def settle(self, requeue: Requeue) -> "Future[Any] | None":
        """After the last switch, let the instances of the new placement serve.

        Return the future of the last work of the transition on the devices. Return None if no work is in flight. In
        that case, the transition can end now.
        """

    @abstractmethod
    def fail(self, requeue: Requeue) -> str:
        """End the transition after an error. Return a text that tells what happened to the instances.

        If no switch has begun, the old instances serve again. If a switch has begun, the devices continue to serve at a
        valid placement, and requests may be computed again.
        """

    @abstractmethod
    def fail_settled(self, requeue: Requeue) -> str:
        """Recover from an error of the future that `settle` returned. Return a text that tells what happened."""

    @abstractmethod
    def report(self) -> GroupTransform | PlacementReport:
        """Return the report of the transition. Call this method only after the end of the transition."""

    def serve(
        self, lanes: SequenceOf[Lane], placement: Placement, numbers: SequenceOf[int], pools: Mapping[Home, PagePool]
    ) -> None:
        """End the transition. The instance then serves at `placement`, with a new lane for each microbatch.

        Args:
            lanes: old lanes. The sequences and cached pages of each old lane move to a new lane.
            numbers: for each old lane, index of the microbatch whose new lane gets the sequences of the old lane.
            pools: `{home: page pool}`. The pages of an old lane at one of these homes are freed if the new lane that
                gets the sequences of the old lane does not have this home.
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
