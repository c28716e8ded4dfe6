"""What computes an instance's steps while its layers are in two layouts."""

from collections.abc import Collection
from typing import Protocol

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import StepPlan
from amoeba_jax.programs.batch import StepBatch
from amoeba_jax.programs.step_program import HeadOutput


class StepRunner(Protocol):
    """Has pages of its own for the instance's sequences, beside those of the instance."""

    def reserve(self, sequence: Sequence, num_tokens: int) -> Collection[Sequence]:
        """Give a sequence pages for that many tokens. Returns none, or, where they do not fit, all sequences that hold
        pages it could have."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's pages."""
        ...

    def run(self, plan: StepPlan, batch: StepBatch) -> HeadOutput:
        """Dispatch a step without waiting."""
        ...
