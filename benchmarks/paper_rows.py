"""Rows of `benchmarks/papers.py`."""

from dataclasses import dataclass

EXACT, PREDICTED, CALIBRATED = "exact arithmetic", "predicted", "calibrated on other rows"


@dataclass(frozen=True)
class Row:
    """One number of a paper, and the twin's. `twin` is None where there is none, and `how` says why."""

    where: str
    what: str
    paper: float | None
    twin: float | None
    how: str

    @property
    def ratio(self) -> float | None:
        """Twin over paper."""
        return None if self.paper in (None, 0) or self.twin is None else self.twin / self.paper
