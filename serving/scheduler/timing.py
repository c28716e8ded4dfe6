"""What steps and transformations take, as measured on the running system. Plain data of a snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timing:
    """Recent medians. What has not been measured yet is absent, and a policy decides without it."""

    steps_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a decode step, by the degree of the instance."""
    prompt_tokens_per_s: Mapping[int, float] = field(default_factory=dict)
    """Prompt tokens that an instance computes a second while it computes prompts, by its degree."""
    transformations_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Seconds from the start of a transformation to its end, by the degrees before and after."""

    def step_s(self, degree: int) -> float | None:
        """Seconds of a decode step of an instance; None if none was measured."""
        return self.steps_s.get(degree)

    def prompt_s(self, num_tokens: int, degree: int) -> float | None:
        """Seconds to compute that many prompt tokens; None if nothing was measured at this degree."""
        rate = self.prompt_tokens_per_s.get(degree)
        return num_tokens / rate if rate else None

    def transformation_s(self, before: int, after: int) -> float | None:
        """Seconds of a transformation between two degrees; None if none was measured."""
        return self.transformations_s.get((before, after))
