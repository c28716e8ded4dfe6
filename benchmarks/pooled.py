"""Percentiles over the requests of several runs together, with intervals by the bootstrap.

A phase of a short run has about ten requests, of which a 90th percentile is no more than the longest but one. Runs are
drawn with replacement, not requests, as those of one run wait for each other. With fewer than five runs nothing is said
of how sure a figure is; with five, such intervals are rather too narrow.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

DRAWS, FEWEST_RUNS = 2_000, 5


@dataclass(frozen=True)
class Figure:
    """A percentile in the unit of what was measured, or a ratio of two; `low` to `high` is its 95% interval, if any."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, factor: float = 1.0, digits: int = 2) -> str:
        """As tables have it."""
        value = f"{factor * self.value:.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} ({factor * self.low:.{digits}f} to {factor * self.high:.{digits}f})"


class Pool:
    """What the completed requests of several runs took, by their detailed reports (`amoeba bench --save-detailed`).

    Args:
        reports: one for each seed.
        field: a list of the report with an entry for each request.
        phase: the requests of these phases alone count.
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
        """Requests that count."""
        return sum(map(len, self._runs))

    def percentile(self, percent: float) -> Figure:
        """A percentile of all requests together."""
        return _figure(self._of(range(len(self._runs)), percent), self._drawn(percent))

    def ratio(self, other: "Pool", percent: float) -> Figure:
        """A percentile as a part of that of other runs. Raises `ValueError` unless both have the same seeds."""
        if self.seeds != other.seeds:
            raise ValueError(f"runs with the seeds {self.seeds} cannot be compared with those of {other.seeds}")
        every = range(len(self._runs))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(np.divide(self._of(every, percent), other._of(every, percent)))
            return _figure(value, self._drawn(percent) / other._drawn(percent))

    @cache  # noqa: B019 - a script's few pools
    def _drawn(self, percent: float) -> np.ndarray:
        """The percentile in draws of runs, which are the same for pools of as many runs."""
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
