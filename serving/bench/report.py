"""Report of a benchmark run as JSON."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from amoeba_jax.client import ModelInfo
from amoeba_jax.errors import ConfigError
from serving.bench.cluster_watch import ClusterWatch, changes_of, count_transformations, device_seconds
from serving.bench.load import LoadConfig, Outcome, Record
from serving.bench.metrics import MetricsConfig, compute_metrics
from serving.bench.phases import by_phase, by_priority, transitions
from serving.bench.workload import WorkloadConfig

TRANSITION_S = 1.0
"""Time after a change of instances that still counts as part of the change, in seconds.

It begins with the first sample that shows the change.
"""


@dataclass(frozen=True)
class Run:
    """Finished benchmark run. Times are in seconds from its start."""

    date: datetime
    model: ModelInfo
    workload: WorkloadConfig
    load: LoadConfig
    num_planned: int
    """Number of requests that the run would have sent if it was not interrupted."""
    records: Sequence[Record]
    duration_s: float
    watch: ClusterWatch
    interrupted: bool


def make_report(run: Run, config: MetricsConfig, label: str | None, detailed: bool) -> dict[str, Any]:
    """Return the report of a run as a dict that JSON can represent. docs/serving.md explains its fields."""
    report = _settings(run, label)
    report["duration"] = run.duration_s
    report |= compute_metrics(run.records, run.duration_s, config)
    report |= _ours(run, config)
    report["phases"] = by_phase(run.records, run.duration_s, run.workload.phase_s, run.workload.duration_s, config)
    report["priorities"] = by_priority(run.records, run.duration_s, config)
    if detailed:
        report |= _details(run.records)
    return report


def _settings(run: Run, label: str | None) -> dict[str, Any]:
    """Return all settings of a run, beginning with the fields of vLLM's report."""
    rate = run.workload.rate
    own_times = run.workload.dataset_name == "trace" and run.workload.request_rate is None
    return {
        "date": run.date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "amoeba",
        "backend": "amoeba",
        "label": label,
        "model_id": run.model.model,
        "tokenizer_id": run.model.model,
        "num_prompts": run.num_planned,
        "request_rate": None if own_times else "inf" if math.isinf(rate) else rate,
        "burstiness": run.workload.burstiness if math.isfinite(run.workload.burstiness) else "inf",
        "max_concurrency": run.load.max_concurrency,
        "server_version": run.model.server_version,
        "max_model_len": run.model.max_model_len,
        "workload": _plain(asdict(run.workload)),
        "temperature": run.load.temperature,
        "ignore_eos": run.load.ignore_eos,
        "request_id_prefix": run.load.request_id_prefix,
    }


def _ours(run: Run, config: MetricsConfig) -> dict[str, Any]:
    records, watch = run.records, run.watch
    unfinished = [r for r in records if r.outcome is not Outcome.COMPLETED]
    kinds = list(dict.fromkeys(record.request.kind for record in records))
    merges, splits = count_transformations(watch.samples)
    seconds = device_seconds(watch.samples, watch.end_s(run.duration_s))
    return {
        "goodput_objectives_ms": config.goodput,
        "interrupted": run.interrupted,
        "interrupted_requests": sum(r.outcome is Outcome.INTERRUPTED for r in records),
        "unfinished_output_tokens": sum(r.output_tokens for r in unfinished),
        "shortened_requests": sum(r.request.shortened for r in records),
        "max_lateness_ms": max((1000 * (r.arrival_s - r.request.arrival_s) for r in records), default=0.0),
        "failures": failures_of(records),
        "classes": {
            kind: compute_metrics([r for r in records if r.request.kind == kind], run.duration_s, config)
            for kind in (kinds if len(kinds) > 1 else ())
        },
        "instances": {
            "problem": watch.problem,
            "merges": merges if watch.samples else None,
            "splits": splits if watch.samples else None,
            "transitions": transitions(
                records, watch.samples, merges + splits, watch.end_s(run.duration_s), TRANSITION_S, config
            )
            if watch.samples
            else None,
            "device_seconds": {str(degree): seconds[degree] for degree in sorted(seconds)},
            "degrees_over_time": [
                {"time_s": sample.time_s, "degrees": sample.degrees} for sample in changes_of(watch.samples)
            ],
        },
    }


def failures_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one entry for each gRPC status of failed requests. The most frequent status comes first.

    An entry has the status, the number of requests with this status, and the error message of the first such request.
    """
    failed = [record for record in records if record.outcome is Outcome.FAILED]
    texts: dict[str, str] = {}
    for record in failed:
        texts.setdefault(record.status, record.error)
    counts = Counter(record.status for record in failed)
    return [{"status": status, "count": count, "text": texts[status]} for status, count in counts.most_common()]


def _details(records: Sequence[Record]) -> dict[str, Any]:
    """Return details of the requests as lists by name, such as `ttfts`. If possible, names are as in vLLM's report.

    Each list has one entry for each request, in the order of arrival. Times are in seconds.
    """
    return {
        "input_lens": [r.request.input_len for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itl_s for r in records],
        "latencies": [r.e2el_s for r in records],
        "start_times": [r.start_s for r in records],
        "queue_times": [r.queue_s for r in records],
        "errors": [f"{r.status}: {r.error}" if r.status else "" for r in records],
        "kinds": [r.request.kind for r in records],
        "phases_of_requests": [r.request.phase for r in records],
        "priorities_of_requests": [r.request.priority for r in records],
        "ttft_slos": [r.request.ttft_slo_s for r in records],
        "tpot_slos": [r.request.tpot_slo_s for r in records],
        "server_queue_times": [r.server_queue_s for r in records],
        "outcomes": [str(r.outcome) for r in records],
    }


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings to values that JSON can represent. Infinity becomes `inf`, and a path becomes its file name."""
    return {
        name: value.name if isinstance(value, Path) else "inf" if value == math.inf else value
        for name, value in settings.items()
    }


def result_path(run: Run, directory: Path | None, filename: str | None) -> Path:
    """Return the path of the report file: `filename` in `directory`.

    The default name has the workload, rate, model and time of the run. The default directory is the current directory.
    """
    rate = run.workload.rate
    name = filename or f"amoeba-{run.workload.dataset_name}-{rate:g}qps-{run.model.model}-{run.date:%Y%m%d-%H%M%S}.json"
    return (directory or Path()) / name


def save_report(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON. Raises `ConfigError` if that fails."""
    try:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the result file {path} cannot be written: {error}") from error
