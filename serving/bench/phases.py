"""Metrics of parts of a benchmark run: phases of low and high load, priorities, and times of merges and splits."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from serving.bench.burst import HIGH, LOW
from serving.bench.cluster_watch import Sample
from serving.bench.load import Outcome, Record
from serving.bench.metrics import MetricsConfig, compute_metrics, statistics

_RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")


def by_phase(
    records: Sequence[Record], duration_s: float, phase_s: float, load_s: float | None, config: MetricsConfig
) -> dict[str, dict[str, Any]]:
    """Return the metrics of requests by the phase in which they arrived: `low` for low load, `high` for high load.

    Rates of `low` are per second of low phases, and rates of `high` are per second of high phases. The dict is empty if
    the load has no phases.

    Args:
        duration_s: seconds of the run.
        phase_s: seconds of each phase.
        load_s: end of the arrivals, in seconds from the start of the run. The last phase ends there. None: the last
            arrival.
    """
    last_s = max((record.request.arrival_s for record in records), default=0.0)
    end_s = min(duration_s, last_s if load_s is None else load_s)
    found = {}
    for index, phase in enumerate((LOW, HIGH)):
        mine = [record for record in records if record.request.phase == phase]
        if not mine:
            continue
        starts = [n * phase_s for n in range(int(last_s // phase_s) + 1) if n % 2 == index]
        seconds = sum(min(phase_s, end_s - start) for start in starts if start < end_s)
        figures = compute_metrics(mine, duration_s, config)
        for rate in _RATES:
            if figures[rate] is not None:
                figures[rate] = figures[rate] * duration_s / seconds if seconds else None
        found[phase] = figures | {"seconds": seconds}
    return found


def by_priority(records: Sequence[Record], duration_s: float, config: MetricsConfig) -> dict[str, dict[str, Any]]:
    """Return the metrics of the requests of each priority. The most urgent priority comes first.

    The dict is empty if all requests have the same priority.
    """
    priorities = sorted({record.request.priority for record in records})
    if len(priorities) < 2:
        return {}
    return {
        str(priority): compute_metrics([r for r in records if r.request.priority == priority], duration_s, config)
        for priority in priorities
    }


def transition_windows(samples: Sequence[Sample], settle_s: float) -> list[tuple[float, float]]:
    """Return `(start, end)` in seconds of each period in which instances merged or split.

    A period starts at the last sample before a merge or split. It ends `settle_s` seconds after the first sample that
    shows the merge or split. Overlapping periods are joined.
    """
    windows: list[tuple[float, float]] = []
    for before, after in pairwise(samples):
        if before.devices == after.devices:
            continue
        start_s, end_s = before.time_s, after.time_s + settle_s
        if windows and start_s <= windows[-1][1]:
            start_s = windows.pop()[0]
        windows.append((start_s, end_s))
    return windows


def transitions(
    records: Sequence[Record],
    samples: Sequence[Sample],
    changes: int,
    watched_s: float,
    settle_s: float,
    config: MetricsConfig,
) -> dict[str, Any]:
    """Return statistics of TTFT and ITL during merges and splits (key `during`) and at other times (key `outside`).

    Only completed requests count. A latency is in `during` if its interval overlaps a period of `transition_windows`.
    The key `seconds` has the total length of these periods, and `per_hour` the number of merges and splits per hour.

    Args:
        changes: number of merges and splits in the run.
        watched_s: seconds in which the instances were sampled. `per_hour` is relative to this time.
        settle_s: see `transition_windows`.
    """
    windows = transition_windows(samples, settle_s)
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    split: dict[str, dict[str, list[float]]] = {place: {"ttft": [], "itl": []} for place in ("during", "outside")}

    def add(name: str, start_s: float, end_s: float) -> None:
        during = any(start_s < window_end and end_s > window_start for window_start, window_end in windows)
        split["during" if during else "outside"][name].append(end_s - start_s)

    for record in done:
        if record.start_s is not None and record.chunk_times:
            add("ttft", record.start_s, record.chunk_times[0])
        for before, after in pairwise(record.chunk_times):
            add("itl", before, after)
    return {
        "per_hour": changes * 3600 / watched_s if watched_s else None,
        "seconds": sum(end - start for start, end in windows),
        **{
            place: {
                key: value
                for name, values in parts.items()
                for key, value in (
                    statistics(name, values, config.metric_percentiles) | {f"num_{name}": len(values)}
                ).items()
            }
            for place, parts in split.items()
        },
    }
