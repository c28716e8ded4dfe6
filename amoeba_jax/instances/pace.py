"""Durations of an instance's recent steps, and the speed that follows from them."""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

_NUM_STEPS = 16


class DecodeRate(NamedTuple):
    """Speed at which an instance decodes.

    Attributes:
        sequences: mean number of sequences in a decode step.
        tokens_per_s: tokens generated per second, of all sequences together.
    """

    sequences: float
    tokens_per_s: float


class _PromptStep(NamedTuple):
    """Measured step that computed prompt tokens.

    Attributes:
        tokens: number of prompt tokens in the step.
        step_s: duration of the step, in seconds.
        prompt_s: seconds that the prompt tokens took. If the step also decoded, this is `step_s` minus the duration of
            a decode step.
    """

    tokens: int
    step_s: float
    prompt_s: float


class Pace:
    """Durations of an instance's latest 16 decode steps, and of its latest 16 steps with prompts.

    A step starts with its launch, or with the result of the previous step if that result comes later. The step ends
    when the host takes its result. Steps during a transformation (change of degree or placement) count only in
    `busy_s`.

    Attributes:
        taken_at: time of the latest result, by the caller's clock, in seconds. 0 before the first result.
        busy_s: total seconds of all steps so far.
    """

    def __init__(self) -> None:
        self._decodes: deque[tuple[float, int]] = deque(maxlen=_NUM_STEPS)  # seconds, rows
        self._prompts: deque[_PromptStep] = deque(maxlen=_NUM_STEPS)
        self.taken_at = self.busy_s = 0.0

    def take(
        self,
        launched_at: float,
        taken_at: float,
        decodes: bool,
        prompt_tokens: int = 0,
        beside_decodes: bool = False,
        num_rows: int = 0,
    ) -> None:
        """Record a step. Steps must be recorded in the order of their launches.

        Args:
            launched_at, taken_at: times of the launch and of the result, in seconds. Both are from the same clock.
            decodes: whether all rows of the step decode. False if layers change their degree or home during the step.
            prompt_tokens: number of prompt tokens in the step. 0 for a step during a transformation.
            beside_decodes: whether the step computes prompts and also decodes.
            num_rows: number of sequences in the step.
        """
        seconds = taken_at - max(launched_at, self.taken_at)
        self.busy_s += seconds
        if decodes:
            self._decodes.append((seconds, num_rows))
        elif prompt_tokens:
            decode_s = (self.step_s or 0.0) if beside_decodes else 0.0
            self._prompts.append(_PromptStep(prompt_tokens, seconds, max(seconds - decode_s, 0.0)))
        self.taken_at = taken_at

    @property
    def step_s(self) -> float | None:
        """Median duration of the latest 16 decode steps, in seconds. None before the first decode step."""
        return median(seconds for seconds, _ in self._decodes) if self._decodes else None

    @property
    def decode_rate(self) -> DecodeRate | None:
        """Speed of the latest 16 decode steps. None before there are 16 decode steps."""
        seconds, rows = sum(seconds for seconds, _ in self._decodes), sum(rows for _, rows in self._decodes)
        if len(self._decodes) < _NUM_STEPS or seconds <= 0:
            return None
        return DecodeRate(rows / _NUM_STEPS, rows / seconds)

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens per second in the latest 16 steps with prompts. None before the first such step."""
        seconds = sum(step.step_s for step in self._prompts)
        return sum(step.tokens for step in self._prompts) / seconds if seconds > 0 else None

    @property
    def prompt_tokens_in_a_step(self) -> float:
        """Number of prompt tokens whose computation takes as long as a decode step.

        Infinity if there are no durations of decode steps or of prompts yet.
        """
        seconds = sum(step.prompt_s for step in self._prompts)
        if self.step_s is None or seconds <= 0:
            return math.inf
        return sum(step.tokens for step in self._prompts) * self.step_s / seconds
