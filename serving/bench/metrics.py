"""Metrics of a benchmark run, with vLLM's definitions and names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amoeba_jax.errors import ConfigError
from serving.bench.load import Outcome, Record
from serving.bench.statistics import statistics

METRICS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "client_queue_time": "Queue (client)",
    "server_queue_time": "Queue (server)",
}
"""Metrics by name, with their titles in tables. E2EL is the end-to-end latency."""
PEAK_WINDOW_S = 5.0
"""Length of the windows for `peak_output_throughput`, in seconds. A shorter run is one window."""
_OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class MetricsConfig:
    """Choice of the metrics to report for a benchmark. Raises `ConfigError` for an invalid value."""

    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    """Names of the `METRICS` for which mean, median, standard deviation and percentiles are reported."""
    metric_percentiles: tuple[float, ...] = (99.0,)
    """Percentiles to report, from 0 to 100."""
    goodput: dict[str, float] = field(default_factory=dict)
    """Limits in milliseconds of `ttft`, `tpot` and `e2el`. Empty: no goodput."""

    def __post_init__(self) -> None:
        for name in self.percentile_metrics:
            if name not in METRICS:
                raise ConfigError(f"percentile_metrics has {name!r}: each must be one of {', '.join(METRICS)}")
        for value in self.metric_percentiles:
            if not 0 <= value <= 100:
                raise ConfigError(f"metric_percentiles has {value:g}: each must be from 0 to 100")
        for name, value in self.goodput.items():
            if name not in _OBJECTIVES:
                raise ConfigError(f"goodput has {name!r}: each must be one of {', '.join(_OBJECTIVES)}")
            if not 0 <= value < math.inf:
                raise ConfigError(f"goodput has {name}:{value:g}: milliseconds must be finite and at least 0")

    @classmethod
    def from_text(cls, percentile_metrics: str, metric_percentiles: str, goodput: Sequence[str]) -> "MetricsConfig":
        """Parse the options of the command line: texts such as "ttft,tpot", "50,99" and ["ttft:10000", "tpot:100"].

        Raises `ConfigError` for an invalid text.
        """
        names = tuple(name.strip() for name in percentile_metrics.split(",") if name.strip())
        try:
            percentiles = tuple(float(value) for value in metric_percentiles.split(",") if value.strip())
        except ValueError:
            raise ConfigError(
                f"metric_percentiles={metric_percentiles!r} must be numbers with commas between"
            ) from None
        limits: dict[str, float] = {}
        for objective in goodput:
            name, _, value = objective.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                raise ConfigError(
                    f"goodput has {objective!r}: it must be a name and milliseconds, such as ttft:10000"
                ) from None
        return cls(names, percentiles, limits)


def latencies_s(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the values of each latency metric (`METRICS`) over all completed requests, in seconds.

    `itl` has a value for each message after the first message of a request. The other metrics have at most one value
    for each request.
    """
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    return {
        "ttft": [value for r in done if (value := r.ttft_s) is not None],
        "tpot": [value for r in done if (value := r.tpot_s) is not None],
        "itl": [value for r in done for value in r.itl_s],
        "e2el": [value for r in done if (value := r.e2el_s) is not None],
        "client_queue_time": [value for r in done if (value := r.queue_s) is not None],
        "server_queue_time": [value for r in done if (value := r.server_queue_s) is not None],
    }


def compute_metrics(records: Sequence[Record], duration_s: float, config: MetricsConfig) -> dict[str, Any]:
    """Return the metrics of requests by name, with vLLM's names. Rates are per second of `duration_s`.

    Totals, throughput and latencies count completed requests only. The peaks of throughput and of concurrent requests
    count all requests. A latency is None if no completed request has a value for it.

    `request_goodput` is the number of requests per second that meet their latency limits. It is None if neither
    `config` nor a request sets a limit.
    """
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    input_tokens = sum(record.request.input_len for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    good = sum(meets(record, config.goodput) for record in done)
    window_s = min(PEAK_WINDOW_S, duration_s)
    figures: dict[str, Any] = {
        "completed": len(done),
        "failed": sum(record.outcome is Outcome.FAILED for record in records),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "request_goodput": good / duration_s if config.goodput or any(map(own_objectives_ms, records)) else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "preemptions": sum(record.preemptions for record in done),
        "peak_output_throughput": max(tokens_per_bin(records, duration_s, window_s), default=0.0) / window_s,
        "max_output_tokens_per_s": max(tokens_per_bin(records, duration_s, 1.0), default=0.0),
        "max_concurrent_requests": max_concurrency(records),
    }
    for name, values in latencies_s(records).items():
        if name in config.percentile_metrics:
            figures |= statistics(name, values, config.metric_percentiles)
    return figures


def meets(record: Record, objectives_ms: dict[str, float]) -> bool:
    """Return whether a request met all its latency limits. `objectives_ms` has the general limits in milliseconds.

    The keys are `ttft`, `tpot` and `e2el`. A limit that the request itself sets replaces the general limit. A request
    with one token meets any TPOT limit. A request without a token meets no limits.
    """
    objectives_ms = objectives_ms | own_objectives_ms(record)
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(
        value is not None and value * 1000 <= objectives_ms.get(name, math.inf) for name, value in values.items()
    )


def own_objectives_ms(record: Record) -> dict[str, float]:
    """Return the latency limits (SLOs) that a request itself sets, in milliseconds. The keys are `ttft` and `tpot`."""
    slos_s = {"ttft": record.request.ttft_slo_s, "tpot": record.request.tpot_slo_s}
    return {name: slo_s * 1000 for name, slo_s in slos_s.items() if slo_s is not None}


def max_concurrency(records: Sequence[Record]) -> int:
    """Return the largest number of requests that were in flight at once, including failed requests."""
    events = []
    for record in records:
        if record.start_s is not None and record.end_s is not None:
            events += [(record.start_s, 1), (record.end_s, -1)]
    running = most = 0
    for _, change in sorted(events):  # At equal times, ends come first.
        running += change
        most = max(most, running)
    return most


def tokens_per_bin(records: Sequence[Record], duration_s: float, width_s: float) -> list[float]:
    """Return the number of output tokens in each interval of `width_s` seconds, including tokens of failed requests."""
    counts = np.zeros(math.ceil(duration_s / width_s) or 1)
    for record in records:
        for time_s, tokens in zip(record.chunk_times, record.chunk_tokens, strict=True):
            counts[min(int(time_s / width_s), len(counts) - 1)] += tokens
    return counts.tolist()
