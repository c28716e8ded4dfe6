"""Measured durations of steps, merges and splits, as part of a snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_MIN_SEQUENCE_SHARE = 0.75
"""Minimum number of sequences in a measurement of throughput, as a share of the number in the comparison."""


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of the whole cluster, measured while all instances had the same tensor-parallel degree."""

    sequences: float
    """Number of sequences that decoded at the same time."""
    tokens_per_s: float
    """Generated tokens per second, in steps without prompts."""


@dataclass(frozen=True)
class Timing:
    """Measured durations and throughput. A duration is the median of recent measurements.

    If a value was not measured yet, its entry is missing.
    """

    steps_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a decode step, by degree."""
    prompt_tokens_per_s: Mapping[int, float] = field(default_factory=dict)
    """Prompt tokens per second of one instance while it computes prompts, by degree."""
    transformations_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Seconds of a transformation, by (degree before, degree after)."""
    throughput: Mapping[int, Throughput] = field(default_factory=dict)
    """Highest measured throughput, by degree."""

    def step_s(self, degree: int) -> float | None:
        """Return the seconds of a decode step at a tensor-parallel degree, or None if none was measured."""
        return self.steps_s.get(degree)

    def generates_more(self, degree: int, other: int, sequences: int) -> bool:
        """Return whether degree `degree` generates at least as many tokens per second as degree `other`, as measured.

        If a degree was not measured, the result is False. The result is also False if the measurement of `other` had
        too few sequences: clearly fewer than the measurement of `degree`, or clearly fewer than run now. Few sequences
        generate few tokens at any degree.

        Args:
            sequences: number of sequences that run now.
        """
        one, two = self.throughput.get(degree), self.throughput.get(other)
        if one is None or two is None:
            return False
        enough = _MIN_SEQUENCE_SHARE * max(one.sequences, sequences)
        return one.tokens_per_s >= two.tokens_per_s and two.sequences >= enough

    def prompt_s(self, num_tokens: int, degree: int) -> float | None:
        """Return the seconds to compute `num_tokens` prompt tokens at a degree, or None if no prompt was measured."""
        rate = self.prompt_tokens_per_s.get(degree)
        return num_tokens / rate if rate else None

    def transformation_s(self, before: int, after: int) -> float | None:
        """Return the seconds of a merge or split from degree `before` to `after`, or None if none was measured."""
        return self.transformations_s.get((before, after))
