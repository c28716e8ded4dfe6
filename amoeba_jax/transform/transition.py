"""An instance between two placements: its layers switch to other homes between steps.

There are two kinds. `Relayout` merges or splits: the pages of a group move in place among its ranks. `Relocation`
replicates, migrates or evicts modules: pages and weights are copied from device to device.
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
    """Transition of an instance. `Instance.transition` refers to it. Used by the dispatcher thread only.

    Args:
        instance: instance whose layers switch. It serves meanwhile.
        devices: devices before and after the transition, in order.
        num_layers: number of layers that must switch.

    Attributes:
        changes_degree: whether the instance merges or splits.
        num_switched: number of layers that have switched to their new homes.
        started: whether the first switch has begun. After that, the transition cannot be aborted.
        last_result: result after which the transition has ended. None while layers switch.
        prepare_s: seconds in which the engine compiled missing programs itself.
        steps: number of steps launched during the transition.
        tokens: number of tokens that these steps sample.
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
        """Whether the steps in flight must end before `settle`."""
        return False

    @abstractmethod
    def switch_layers(self, step: StepPlan | None = None) -> None:
        """Launch the switch of the next layers, or of all layers if no sequence runs.

        Args:
            step: next step, if it is known. Its programs may run the last of these switches if `overlaps`.
        """

    @abstractmethod
    def switch_alone(self) -> None:
        """Launch the switch that was left to a step, if the step has not launched it."""

    def drop_spent(self) -> None:
        """Drop arrays whose buffers now belong to other arrays.

        A switch of all layers leaves hundreds of such arrays. Call this after the launch of the next step, so that the
        step does not wait for it.
        """
        self._spent.clear()

    @abstractmethod
    def settle(self, requeue: Requeue) -> "Future[Any] | None":
        """End the transition after its last switch: the instance, or new instances, serve at the new placement.

        Return the result after which the transition has ended, or None if it has ended.
        """

    @abstractmethod
    def fail(self, requeue: Requeue) -> str:
        """End the transition after an error. Return a description of the result.

        If no switch has started, restore the old instances. Otherwise bring the instance to a placement at which it
        can serve.
        """

    @abstractmethod
    def fail_settled(self, requeue: Requeue) -> str:
        """Handle an error of `last_result`. Return a description of the result."""

    @abstractmethod
    def report(self) -> GroupTransform | PlacementReport:
        """Return the report of the ended transition."""

    def serve(
        self, lanes: SequenceOf[Lane], placement: Placement, numbers: SequenceOf[int], pools: Mapping[Home, PagePool]
    ) -> None:
        """Let the instance serve at its last placement, with a new lane for each microbatch.

        Args:
            lanes: old lanes. Their sequences and cached pages move to the new lanes.
            numbers: microbatch of each old lane.
            pools: page pools of the homes at which pages are freed if a new lane lacks the home.
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
