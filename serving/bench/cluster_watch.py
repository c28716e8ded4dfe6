"""What a server's instances were while requests ran."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from amoeba_jax.client import AsyncClient, Cluster


@dataclass(frozen=True)
class Sample:
    """The instances at one moment, in seconds from the start of the run."""

    time_s: float
    devices: tuple[tuple[int, ...], ...]
    """Devices of each instance."""
    degrees: tuple[int, ...]
    """Tensor-parallel sizes of the same instances."""
    waiting: int
    """Requests that no instance had taken up."""

    def devices_by_degree(self) -> dict[int, int]:
        """How many devices are in instances of each degree."""
        counts: dict[int, int] = {}
        for devices, degree in zip(self.devices, self.degrees, strict=True):
            counts[degree] = counts.get(degree, 0) + len(devices)
        return counts


@dataclass
class ClusterWatch:
    """Samples of `AdminService.WatchCluster`, as long as the server gives them."""

    samples: list[Sample] = field(default_factory=list)
    problem: str | None = None
    """Why there are no samples, or no more: the status and text of the server."""

    def end_s(self, duration_s: float) -> float:
        """How far it has seen of a run of that many seconds: to its end, or to the last sample before a problem."""
        return duration_s if self.problem is None else max((sample.time_s for sample in self.samples), default=0.0)

    async def follow(self, client: AsyncClient, interval_s: float, clock: Callable[[], float]) -> None:
        """Sample until cancelled, or until the server refuses; `clock` gives the seconds since the start. An interval
        of 0 does nothing."""
        if interval_s == 0:
            self.problem = "no one asked for it"
            return
        try:
            async for cluster in client.watch_cluster(interval_s):
                self.samples.append(read_sample(cluster, clock()))
            self.problem = "the server ended it"
        except grpc.aio.AioRpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"


def read_sample(cluster: Cluster, time_s: float) -> Sample:
    """Instances in the order of their first devices."""
    instances = sorted(cluster.instances, key=lambda instance: instance.devices)
    return Sample(
        time_s,
        tuple(instance.devices for instance in instances),
        tuple(instance.tensor_parallel_size for instance in instances),
        cluster.waiting,
    )


def changes_of(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample, and each whose instances are not those of the one before it."""
    changed = [after for before, after in pairwise(samples) if after.devices != before.devices]
    return [*samples[:1], *changed]


def count_transformations(samples: Sequence[Sample]) -> tuple[int, int]:
    """Merges (an instance has the devices of several before) and splits (several have those of one before). What
    came and went between two samples is not seen."""
    merges = splits = 0
    for before, after in pairwise(samples):
        merges += _joined(before.devices, after.devices)
        splits += _joined(after.devices, before.devices)
    return merges, splits


def _joined(parts: Iterable[tuple[int, ...]], wholes: Iterable[tuple[int, ...]]) -> int:
    """How many of `wholes` are made of several of `parts`."""
    part_sets = [set(devices) for devices in parts]
    return sum(sum(part < set(whole) for part in part_sets) > 1 for whole in wholes)


def device_seconds(samples: Sequence[Sample], end_s: float) -> dict[int, float]:
    """Device-seconds at each degree from the start to `end_s`: a sample holds until the next, the first from 0."""
    totals: dict[int, float] = {}
    for place, sample in enumerate(samples):
        start_s = 0.0 if place == 0 else sample.time_s
        until_s = samples[place + 1].time_s if place + 1 < len(samples) else end_s
        for degree, devices in sample.devices_by_degree().items():
            totals[degree] = totals.get(degree, 0.0) + devices * max(min(until_s, end_s) - start_s, 0.0)
    return totals
