"""The cost of steps, kept for the shapes that were asked for before."""

from serving.simulator.batching import Batching
from serving.simulator.step_cost import StepCost, StepShape


class Pricing:
    """A `StepCost` that keeps what it has worked out."""

    def __init__(self, cost: StepCost, batching: Batching, crowding: float = 0.0):
        self.cost, self.batching = cost, batching
        self.crowding = crowding
        """Share of a step's time that each further busy instance adds. Above 0 where devices share a processor."""
        self._fixed: dict[tuple[int, StepShape], float] = {}
        self._context: dict[int, float] = {}
        self._pair: dict[int, float] = {}

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        key = (degree, shape)
        if (seconds := self._fixed.get(key)) is None:
            seconds = self._fixed[key] = self.cost.fixed_s(degree, shape)
        return seconds

    def context_s(self, degree: int) -> float:
        """See `StepCost.context_s`."""
        if (seconds := self._context.get(degree)) is None:
            seconds = self._context[degree] = self.cost.context_s(degree)
        return seconds

    def pair_s(self, degree: int) -> float:
        """See `StepCost.pair_s`."""
        if (seconds := self._pair.get(degree)) is None:
            seconds = self._pair[degree] = self.cost.pair_s(degree)
        return seconds
