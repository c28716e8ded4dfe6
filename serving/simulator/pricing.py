"""The cost of steps, kept for the shapes that were asked for before."""

from collections.abc import Mapping

from serving.simulator.batching import Batching
from serving.simulator.step_cost import StepCost, StepShape


class Pricing:
    """A `StepCost` that keeps what it has worked out."""

    def __init__(
        self,
        cost: StepCost,
        batching: Batching,
        crowding: Mapping[int, float] | None = None,
        latency_s: float = 0.0,
        prompt_crowding: Mapping[int, float] | None = None,
    ):
        self.cost, self.batching = cost, batching
        self.crowding = dict(crowding or {})
        """By the number of busy instances: how many times as long their steps take as those of one alone. Where devices
        share a processor; empty elsewhere."""
        self.prompt_crowding = dict(prompt_crowding or self.crowding)
        """The same of steps with a prompt, beside instances that decode."""
        self.latency_s = latency_s
        """Seconds between a step and its tokens' being seen, in which the device goes on."""
        self._fixed: dict[tuple[int, StepShape], float] = {}
        self._context: dict[int, float] = {}
        self._pair: dict[int, float] = {}

    def slowdown(self, busy: int, prompts: bool = False) -> float:
        """How many times as long a step takes while that many instances are busy, its own among them."""
        table = self.prompt_crowding if prompts else self.crowding
        measured = [count for count in table if count <= busy]
        return table[max(measured)] if measured else 1.0

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
