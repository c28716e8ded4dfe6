"""Samples of a server's instances (serving replicas) during a benchmark run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from amoeba_jax.client import AsyncClient, Cluster


@dataclass(frozen=True)
class Sample:
    """Instances and queue of a server at one time. `time_s` is in seconds since the start of the run."""

    time_s: float
    devices: tuple[tuple[int, ...], ...]
    """Devices of each instance."""
    degrees: tuple[int, ...]
    """Degree of each instance."""
    waiting: int
    """Number of requests in the queue."""

    def devices_by_degree(self) -> dict[int, int]:
        """Return the number of devices in instances of each tensor-parallel degree."""
        counts: dict[int, int] = {}
        for devices, degree in zip(self.devices, self.degrees, strict=True):
            counts[degree] = counts.get(degree, 0) + len(devices)
        return counts


@dataclass
class ClusterWatch:
    """Samples of a server's instances, received from `AdminService.WatchCluster` during a run."""

    samples: list[Sample] = field(default_factory=list)
    problem: str | None = None
    """Reason why no further samples arrive, such as a status of the server. None: samples still arrive."""

    def end_s(self, duration_s: float) -> float:
        """Return the end of the sampled part of a run, in seconds from the start of the run.

        If sampling did not fail, this is `duration_s`, the duration of the run. If it failed, this is the time of the
        last sample.
        """
        return duration_s if self.problem is None else max((sample.time_s for sample in self.samples), default=0.0)

    async def follow(self, client: AsyncClient, interval_s: float, clock: Callable[[], float]) -> None:
        """Add samples until this task is cancelled. If the server's stream ends or fails, set `problem` and return.

        Args:
            interval_s: seconds between samples. 0: no samples are taken, and `problem` is set.
            clock: function that returns the seconds since the start of the run.
        """
        if interval_s == 0:
            self.problem = "--watch-interval is 0"
            return
        try:
            async for cluster in client.watch_cluster(interval_s):
                self.samples.append(read_sample(cluster, clock()))
            self.problem = "the server ended the stream"
        except grpc.aio.AioRpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"


def read_sample(cluster: Cluster, time_s: float) -> Sample:
    """Convert the state of a server to a sample. Instances are ordered by their devices."""
    instances = sorted(cluster.instances, key=lambda instance: instance.devices)
    return Sample(
        time_s,
        tuple(instance.devices for instance in instances),
        tuple(instance.tensor_parallel_size for instance in instances),
        cluster.waiting,
    )


def changes_of(samples: Sequence[Sample]) -> list[Sample]:
    """Return the first sample, and each sample whose instances differ from the instances of the sample before it."""
    changed = [after for before, after in pairwise(samples) if after.devices != before.devices]
    return [*samples[:1], *changed]


def count_transformations(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return `(merges, splits)`: how often instances merged and split between consecutive samples."""
    merges = splits = 0
    for before, after in pairwise(samples):
        merges += _joined(before.devices, after.devices)
        splits += _joined(after.devices, before.devices)
    return merges, splits


def _joined(parts: Iterable[tuple[int, ...]], wholes: Iterable[tuple[int, ...]]) -> int:
    """Count the device groups in `wholes` that contain several groups of `parts`, such as (0, 1) with (0,) and (1,)."""
    part_sets = [set(devices) for devices in parts]
    return sum(sum(part < set(whole) for part in part_sets) > 1 for whole in wholes)


def device_seconds(samples: Sequence[Sample], end_s: float) -> dict[int, float]:
    """Return the seconds that devices spent in instances of each tensor-parallel degree, summed over the devices.

    The time from 0 to `end_s` counts. A sample describes the time until the next sample. The first sample also
    describes the time before it.
    """
    totals: dict[int, float] = {}
    for place, sample in enumerate(samples):
        start_s = 0.0 if place == 0 else sample.time_s
        until_s = samples[place + 1].time_s if place + 1 < len(samples) else end_s
        for degree, devices in sample.devices_by_degree().items():
            totals[degree] = totals.get(degree, 0.0) + devices * max(min(until_s, end_s) - start_s, 0.0)
    return totals
