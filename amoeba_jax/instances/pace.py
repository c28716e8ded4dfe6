"""How fast an instance has decoded lately."""

from collections import deque
from statistics import median

_NUM_STEPS = 16


class Pace:
    """Durations of an instance's latest decode steps: from launch, or from the result of the step before if that came
    later, to the moment in which the host takes the result."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._taken_at = 0.0

    def take(self, launched_at: float, taken_at: float, decodes: bool) -> None:
        """Take note of a step, in the order of their launches; times are by one clock, in seconds.

        Only those that `decodes` is true for count: others are as long as their prompts, or a transformation, are.
        """
        if decodes:
            self._seconds.append(taken_at - max(launched_at, self._taken_at))
        self._taken_at = taken_at

    @property
    def step_s(self) -> float | None:
        """Median of the latest 16 decode steps; None before the first."""
        return median(self._seconds) if self._seconds else None
