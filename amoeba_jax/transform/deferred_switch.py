"""The switch of a segment within a step: the last phases of its exchange are parts of the step's programs.

    merge   layers 8-11 at 4 x TP1 | their first phases | layers 12-15 and phase n-1, layers 16-19 and phase n
    split   their first phases | layers 0-3 and phase n-1, layers 4-7 and phase n | layers 8-11 at 4 x TP1

Where a backend can, devices trade pages while they compute. None does so on CPU.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from amoeba_jax.instances.site import ExchangePart
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.movers import InPlaceMover, PlacedExchange

Begin = Callable[[SegmentPlan, list[PlacedExchange]], None]
End = Callable[[SegmentPlan, float], None]


class DeferredSwitch:
    """See `StepSwitch`.

    Args:
        segment: the layers that switch.
        first: exchanges that run by themselves, in order.
        parts: what follows them, by the segments in whose programs it runs, of steps of `shape`.
        every: all of it, to run by itself where the step is another one.
        begin: takes the segment's extents, and launches some exchanges.
        end: has the segment be where it is to be, given the seconds that it took until then.
    """

    def __init__(
        self,
        segment: SegmentPlan,
        shape: BatchShape,
        first: list[PlacedExchange],
        parts: dict[SegmentPlan, ExchangePart],
        every: list[PlacedExchange],
        begin: Begin,
        end: End,
    ):
        self.segment, self.parts = segment, parts
        self._shape, self._first, self._every = shape, first, every
        self._begin, self._end = begin, end
        self._begin_s = 0.0

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """See `StepSwitch`."""
        start, fits = time.perf_counter(), shape == self._shape
        self._begin(self.segment, self._first if fits else self._every)
        self._begin_s = time.perf_counter() - start
        return self.parts if fits else {}

    def end(self) -> None:
        """See `StepSwitch`."""
        self._end(self.segment, self._begin_s)

    def run_alone(self) -> None:
        """Switch now: there is no such step."""
        self.begin(None)
        self.end()


def deferred_switch(
    programs: TransitionPrograms,
    mover: InPlaceMover,
    segment: SegmentPlan,
    beside: Sequence[SegmentPlan],
    step: StepPlan,
    begin: Begin,
    end: End,
) -> DeferredSwitch | None:
    """The switch of a segment in a step that computes the segments `beside` at the higher degree; None where that step
    has no programs for it."""
    if step.lane is not None or not step.decodes or not beside:
        return None
    first, last = mover.divided(len(beside))
    parts: dict[SegmentPlan, ExchangePart] = {}
    for other, (kind, send, receive) in zip(beside, last, strict=False):
        program = programs.step_with_exchange(other, step.shape, len(segment.layers), kind.distance)
        if program is None:
            return None
        parts[other] = ExchangePart(program, segment.layers, send, receive)
    return DeferredSwitch(segment, step.shape, first, parts, mover.exchanges, begin, end) if parts else None
