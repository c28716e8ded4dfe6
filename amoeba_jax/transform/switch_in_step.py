"""The switch of a segment inside a step: the step's programs run the last phases of its page exchange.

    merge   layers 8-11 at 4 x TP1 | their first phases | layers 12-15 and phase n-1, layers 16-19 and phase n
    split   their first phases | layers 0-3 and phase n-1, layers 4-7 and phase n | layers 8-11 at 4 x TP1

A backend with asynchronous collectives exchanges pages while it computes. The CPU backend does not.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amoeba_jax.instances.site import ExchangePart
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.transform.movers import InPlaceMover, PlacedExchange

if TYPE_CHECKING:
    from amoeba_jax.transform.transition import Transition


@dataclass(eq=False)
class SwitchInStep:
    """A switch that the next step launches around the layers at the higher degree.

    In a merge, the layers of `segment` have run at the lower degree before `begin`. In a split, they run there after
    `end`.

    Attributes:
        shape: shape of the step for which `parts` was made.
        first: exchanges that run by themselves, before `parts`.
        parts: exchanges inside the programs of other segments, by segment.
        all: all exchanges, each by itself, for a step of another shape.
    """

    transition: "Transition"
    segment: SegmentPlan
    shape: BatchShape
    first: list[PlacedExchange]
    parts: dict[SegmentPlan, ExchangePart]
    all: list[PlacedExchange]
    _begin_s: float = field(default=0.0, init=False)

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """Launch the first exchanges. Return the exchanges that must run with segments.

        Args:
            shape: shape of a step of all lanes; None for a step of one lane.
        """
        start, fits = time.perf_counter(), shape == self.shape
        self.transition.begin_in_step(self.segment, self.first if fits else self.all)
        self._begin_s = time.perf_counter() - start
        return self.parts if fits else {}

    def end(self) -> None:
        """Give the segment to the new layout."""
        self.transition.end_in_step(self.segment, self._begin_s)

    def run_alone(self) -> None:
        """Switch without a step."""
        self.begin(None)
        self.end()


def switch_in_step(
    transition: "Transition",
    mover: InPlaceMover,
    segment: SegmentPlan,
    beside: Sequence[SegmentPlan],
    step: StepPlan,
) -> SwitchInStep | None:
    """Return the switch of `segment` inside a step, or None if there are no programs for it.

    Args:
        beside: segments that the step computes at the higher degree.
    """
    if step.lane is not None or not step.decodes or not beside:
        return None
    first, last = mover.divided(len(beside))
    parts: dict[SegmentPlan, ExchangePart] = {}
    for other, (kind, send, receive) in zip(beside, last, strict=False):
        program = transition.programs.step_with_exchange(other, step.shape, len(segment.layers), kind.distance)
        if program is None:
            return None
        parts[other] = ExchangePart(program, segment.layers, send, receive)
    return SwitchInStep(transition, segment, step.shape, first, parts, mover.exchanges) if parts else None
