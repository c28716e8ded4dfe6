"""What steps and transformations take, as measured on the running system. Plain data of a snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_AS_MANY = 0.75
"""Share of the sequences for which a throughput is wanted, from which on one that was measured tells something."""


@dataclass(frozen=True)
class Throughput:
    """What all devices together did while all instances had one degree."""

    sequences: float
    """That decoded at once."""
    tokens_per_s: float
    """That they generated, in steps without prompts."""


@dataclass(frozen=True)
class Timing:
    """Recent medians, and the highest throughput. What has not been measured yet is absent, and a policy decides
    without it."""

    steps_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a decode step, by the degree of the instance."""
    prompt_tokens_per_s: Mapping[int, float] = field(default_factory=dict)
    """Prompt tokens that an instance computes a second while it computes prompts, by its degree."""
    transformations_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Seconds from the start of a transformation to its end, by the degrees before and after."""
    throughput: Mapping[int, Throughput] = field(default_factory=dict)
    """The highest so far, by degree."""

    def step_s(self, degree: int) -> float | None:
        """Seconds of a decode step of an instance; None if none was measured."""
        return self.steps_s.get(degree)

    def generates_more(self, degree: int, other: int, sequences: int) -> bool:
        """Whether all devices are known to generate no fewer tokens a second at a degree than at another, at which they
        were seen with about as many sequences at least: with few, steps of a high degree are shorter anyway."""
        one, two = self.throughput.get(degree), self.throughput.get(other)
        if one is None or two is None:
            return False
        return one.tokens_per_s >= two.tokens_per_s and two.sequences >= _AS_MANY * max(one.sequences, sequences)

    def prompt_s(self, num_tokens: int, degree: int) -> float | None:
        """Seconds to compute that many prompt tokens; None if nothing was measured at this degree."""
        rate = self.prompt_tokens_per_s.get(degree)
        return num_tokens / rate if rate else None

    def transformation_s(self, before: int, after: int) -> float | None:
        """Seconds of a transformation between two degrees; None if none was measured."""
        return self.transformations_s.get((before, after))
