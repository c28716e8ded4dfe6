"""Durations of an instance's latest steps, and the resulting speeds of decoding and of computing prompts."""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

_NUM_STEPS = 16


class DecodeRate(NamedTuple):
    """Measured decoding speed of an instance.

    Attributes:
        sequences: mean number of sequences in a decode step.
        tokens_per_s: number of tokens decoded per second, of all sequences together.
    """

    sequences: float
    tokens_per_s: float


class _PromptStep(NamedTuple):
    """Measured durations of one step that computed prompt tokens.

    Attributes:
        tokens: number of prompt tokens in the step.
        step_s: duration of the step, in seconds.
        prompt_s: part of `step_s` that the prompt tokens took, in seconds. If the step also decoded, this is `step_s`
            minus the median duration of a decode step.
    """

    tokens: int
    step_s: float
    prompt_s: float


class Pace:
    """Measured durations of the latest 16 decode steps and of the latest 16 steps with prompts, for one instance.

    A decode step computes no prompt. The duration of a step starts at the launch of the step, or when the host takes
    the result of the previous step, whichever is later. The duration ends when the host takes the result of the step.
    Steps during a transition (change of degree or placement) count only in `busy_s`.

    Attributes:
        taken_at: time at which the host took the latest result, in seconds of the caller's clock. 0: no result yet.
        busy_s: total duration of all steps so far, in seconds.
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
        """Record the duration of a step. Steps must be recorded in the order of their launches.

        Args:
            launched_at: time of the launch, in seconds.
            taken_at: time at which the host took the result, in seconds of the same clock as `launched_at`.
            decodes: whether the step only decodes. Must be False for a step during a transition.
            prompt_tokens: number of prompt tokens in the step. Must be 0 for a step during a transition.
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
        """Median duration of the latest decode steps (at most 16), in seconds. None before the first decode step."""
        return median(seconds for seconds, _ in self._decodes) if self._decodes else None

    @property
    def decode_rate(self) -> DecodeRate | None:
        """Decoding speed in the latest 16 decode steps. None before 16 decode steps have been recorded."""
        seconds, rows = sum(seconds for seconds, _ in self._decodes), sum(rows for _, rows in self._decodes)
        if len(self._decodes) < _NUM_STEPS or seconds <= 0:
            return None
        return DecodeRate(rows / _NUM_STEPS, rows / seconds)

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens per second in the latest 16 steps with prompts. None before the first step with a prompt."""
        seconds = sum(step.step_s for step in self._prompts)
        return sum(step.tokens for step in self._prompts) / seconds if seconds > 0 else None

    @property
    def prompt_tokens_in_a_step(self) -> float:
        """Number of prompt tokens that take as long to compute as one decode step takes.

        Infinity if no decode step, or no step with a prompt, has been recorded yet.
        """
        seconds = sum(step.prompt_s for step in self._prompts)
        if self.step_s is None or seconds <= 0:
            return math.inf
        return sum(step.tokens for step in self._prompts) * self.step_s / seconds
