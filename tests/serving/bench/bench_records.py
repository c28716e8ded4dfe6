"""Made-up records of a benchmark run."""

from datetime import datetime

import numpy as np

from amoeba_jax.client import ModelInfo
from serving.bench.cluster_watch import ClusterWatch, Sample
from serving.bench.load import LoadConfig, Outcome, Record
from serving.bench.report import Run
from serving.bench.workload import PlannedRequest, WorkloadConfig


def make_records(count: int, seed: int = 0, duration_s: float = 20.0) -> list[Record]:
    """Return short and long requests. Most completed, and the rest failed or were interrupted."""
    random = np.random.default_rng(seed)
    records = []
    for index in range(count):
        kind = "long" if index % 5 == 4 else "short"
        arrival_s = float(random.uniform(0, duration_s / 2))
        request = PlannedRequest(index, kind, arrival_s, int(random.integers(1, 3000)), int(random.integers(1, 30)))
        outcome = (Outcome.COMPLETED, Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED, Outcome.INTERRUPTED)
        record = Record(request, arrival_s, outcome=outcome[random.integers(5)])
        records.append(record)
        record.start_s = arrival_s + float(random.uniform(0, 0.5))
        chunks = int(random.integers(record.outcome is Outcome.COMPLETED, 12))
        record.chunk_times = np.sort(random.uniform(record.start_s, duration_s, chunks)).tolist()
        record.chunk_tokens = random.integers(1, 4, chunks).tolist()
        record.end_s = max([record.start_s, *record.chunk_times])
        if record.outcome is Outcome.FAILED:
            record.status, record.error = "UNAVAILABLE", f"text {index}"
    return records


def make_samples(*moments: tuple[float, str]) -> list[Sample]:
    """Return samples from times and degrees in device order: "112" is TP1 on devices 0 and 1, and TP2 on 2 and 3."""
    samples = []
    for time_s, degrees in moments:
        devices, first = [], 0
        for degree in map(int, degrees):
            devices.append(tuple(range(first, first + degree)))
            first += degree
        samples.append(Sample(time_s, tuple(devices), tuple(map(int, degrees)), 0))
    return samples


def make_run(count: int, watch: ClusterWatch) -> Run:
    """Return a run of 20 seconds with `count` requests."""
    model = ModelInfo("tiny", "1.0", 4096, 256, False, False, (), None)
    workload, records = WorkloadConfig(dataset_name="mix"), make_records(count)
    return Run(datetime(2026, 1, 2), model, workload, LoadConfig(), count, records, 20.0, watch, False)
