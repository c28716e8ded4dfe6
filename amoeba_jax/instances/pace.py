"""How fast an instance has decoded, and computed prompts, recently."""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

_NUM_STEPS = 16


class DecodeRate(NamedTuple):
    """Sequences that decoded in each step, on average, and tokens that they generated a second."""

    sequences: float
    tokens_per_s: float


class Pace:
    """Durations of an instance's latest steps: from launch, or from the result of the step before if that came later,
    to the moment in which the host takes the result.

    Attributes:
        taken_at: when the host took the latest result, by the caller's clock, in seconds; 0 before the first.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._rows: deque[int] = deque(maxlen=_NUM_STEPS)
        self._prompts: deque[tuple[int, float, float]] = deque(maxlen=_NUM_STEPS)
        self.taken_at = 0.0

    def take(
        self,
        launched_at: float,
        taken_at: float,
        decodes: bool,
        prompt_tokens: int = 0,
        beside_decodes: bool = False,
        num_rows: int = 0,
    ) -> None:
        """Record a step of that many sequences, in the order of their launches; times are by one clock, in seconds.

        `step_s` is of steps for which `decodes` is true, `prompt_tokens_per_s` of those with prompt tokens, which may
        be beside decodes. Steps of a transformation are neither.
        """
        seconds = taken_at - max(launched_at, self.taken_at)
        if decodes:
            self._seconds.append(seconds)
            self._rows.append(num_rows)
        elif prompt_tokens:
            of_decodes_s = (self.step_s or 0.0) if beside_decodes else 0.0
            self._prompts.append((prompt_tokens, seconds, max(seconds - of_decodes_s, 0.0)))
        self.taken_at = taken_at

    @property
    def step_s(self) -> float | None:
        """Median of the latest 16 decode steps; None before the first."""
        return median(self._seconds) if self._seconds else None

    @property
    def decode_rate(self) -> DecodeRate | None:
        """The rate of the latest 16 decode steps; None before there were as many."""
        if len(self._rows) < _NUM_STEPS or (seconds := sum(self._seconds)) <= 0:
            return None
        return DecodeRate(sum(self._rows) / _NUM_STEPS, sum(self._rows) / seconds)

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens a second in the latest 16 steps that computed some; None before the first."""
        seconds = sum(seconds for _, seconds, _ in self._prompts)
        return sum(tokens for tokens, _, _ in self._prompts) / seconds if seconds > 0 else None

    @property
    def prompt_tokens_in_a_step(self) -> float:
        """How many prompt tokens take as long as a decode step, beside which they are computed, as the latest 16 steps
        with some say; infinite where nothing is known of that."""
        seconds = sum(seconds for _, _, seconds in self._prompts)
        if self.step_s is None or seconds <= 0:
            return math.inf
        return sum(tokens for tokens, _, _ in self._prompts) * self.step_s / seconds
