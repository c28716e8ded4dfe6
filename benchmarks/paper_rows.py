"""Rows of `benchmarks/papers.py`."""

from dataclasses import dataclass

EXACT, PREDICTED, CALIBRATED = "exact arithmetic", "predicted", "calibrated on other rows"


@dataclass(frozen=True)
class Row:
    """Number of a paper and the simulated number. `twin` is None without one; `how` gives its origin or the reason."""

    where: str
    what: str
    paper: float | None
    twin: float | None
    how: str

    @property
    def ratio(self) -> float | None:
        """Simulated number divided by the number of the paper."""
        return None if self.paper in (None, 0) or self.twin is None else self.twin / self.paper
