"""Percentiles over the requests of several runs, with bootstrap intervals.

A phase of a short run has about ten requests, which are too few for a 90th percentile. So the requests of several runs
are pooled. The bootstrap draws whole runs, because requests of the same run wait for each other. With fewer than five
runs, there are no intervals. With only five runs, the intervals are somewhat too narrow.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

DRAWS, FEWEST_RUNS = 2_000, 5


@dataclass(frozen=True)
class Figure:
    """Percentile, or ratio of two percentiles. `low` and `high` are its 95% interval; None if there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, factor: float = 1.0, digits: int = 2) -> str:
        """Return the figure with its interval, for tables."""
        value = f"{factor * self.value:.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} ({factor * self.low:.{digits}f} to {factor * self.high:.{digits}f})"


class Pool:
    """Values of one field for the completed requests of several runs.

    Args:
        reports: reports of `amoeba bench --save-detailed`, one for each run.
        field: name of a list in the reports that has one value for each request.
        phase: phase whose requests count, `low` or `high`.
    """

    def __init__(self, reports: list[dict[str, Any]], field: str, phase: str):
        self.seeds = [report["workload"]["seed"] for report in reports]
        self._runs = []
        for report in reports:
            columns = zip(report[field], report["outcomes"], report["phases_of_requests"], strict=True)
            kept = [it for it, outcome, of in columns if it is not None and outcome == "completed" and of == phase]
            self._runs.append(np.array(kept))

    @property
    def size(self) -> int:
        """Number of counted requests."""
        return sum(map(len, self._runs))

    def percentile(self, percent: float) -> Figure:
        """Return a percentile over all requests."""
        return _figure(self._of(range(len(self._runs)), percent), self._drawn(percent))

    def ratio(self, other: "Pool", percent: float) -> Figure:
        """Divide a percentile of this pool by the same percentile of `other`.

        Raises `ValueError` if the seeds differ.
        """
        if self.seeds != other.seeds:
            raise ValueError(f"runs with the seeds {self.seeds} cannot be compared with those of {other.seeds}")
        every = range(len(self._runs))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(np.divide(self._of(every, percent), other._of(every, percent)))
            return _figure(value, self._drawn(percent) / other._drawn(percent))

    @cache  # noqa: B019 - a script's few pools
    def _drawn(self, percent: float) -> np.ndarray:
        """Return the percentile of each bootstrap draw; an empty array if there are too few runs.

        Pools with the same number of runs have the same draws.
        """
        num_runs = len(self._runs)
        draws = np.random.default_rng(0).integers(0, num_runs, (DRAWS if num_runs >= FEWEST_RUNS else 0, num_runs))
        return np.array([self._of(draw, percent) for draw in draws])

    def _of(self, runs: Any, percent: float) -> float:
        values = np.concatenate([self._runs[run] for run in runs])
        return float(np.percentile(values, percent)) if len(values) else float("nan")


def _figure(value: float, drawn: np.ndarray) -> Figure:
    if not len(drawn):
        return Figure(value)
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return Figure(value, float(low), float(high))
