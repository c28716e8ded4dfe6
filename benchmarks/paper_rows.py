"""Rows of `benchmarks/papers.py`."""

from dataclasses import dataclass

EXACT, PREDICTED, CALIBRATED = "exact arithmetic", "predicted", "calibrated on other rows"


@dataclass(frozen=True)
class Row:
    """Published number and simulated number.

    Attributes:
        where: table or figure of a paper.
        what: name of the number.
        paper: published number; None if the paper states no number.
        twin: simulated number; None if there is no simulation.
        how: origin of the simulated number, or the reason why there is no simulation.
    """

    where: str
    what: str
    paper: float | None
    twin: float | None
    how: str

    @property
    def ratio(self) -> float | None:
        """Simulated number divided by the number of the paper."""
        return None if self.paper in (None, 0) or self.twin is None else self.twin / self.paper

    @property
    def differs(self) -> bool:
        """Whether the numbers differ by more than 15%."""
        return self.ratio is not None and not 0.85 <= self.ratio <= 1.15
