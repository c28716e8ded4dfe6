"""Chooses the next tokens of a step's rows, on the first device of an instance."""

from typing import NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, SamplingState, StateLostError, StepPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.sampling.rows import (
    NO_SLOT,
    SamplerKind,
    StepRow,
    bad_word_pairs,
    pack,
    packed_size,
    sampling_row,
    state_rows,
)
from amoeba_jax.sampling_params import SamplingParams
from sharding.mesh import SubMesh

# A row that samples nothing: padding, or a chunk in mid-prompt.
_NO_SAMPLE = StepRow(sampling_row(SamplingParams(temperature=0), 0, 1, ()), NO_SLOT, 0, 0)


class SampleCall(NamedTuple):
    """`sampler.sample`, or `sample_full`, and the settings that it gets."""

    program: jax.stages.Compiled
    packed: np.ndarray
    full: bool


def sampler_kind(plan: StepPlan) -> SamplerKind:
    """Choose the program that samples a step's rows: `greedy`, the step itself, where all rows want the argmax."""
    kinds: set[SamplerKind] = {row.sequence.sampling.kind for row in plan.rows if row.samples}
    if "full" in kinds:
        return "full"
    return "sample" if "sample" in kinds or (kinds and plan.logits_of == "all") else "greedy"


class StepSampler:
    """Used by the dispatcher thread only.

    Attributes:
        state: what the device remembers of its sequences.
        num_slots: sequences that it has room for.
    """

    def __init__(self, group: SubMesh, state: SamplingState, executables: Executables):
        self.state, self.num_slots = state, state.flags.shape[0]
        self._group, self._executables = group, executables

    def remember(self, sequence: Sequence, slot: int) -> None:
        """Write a sequence's row of the state, if its settings need one.

        Raises whatever its program does, or `StateLostError`.
        """
        if not sequence.sampling.uses_state:
            return
        rows = state_rows(sequence.sampling, sequence.prompt, sequence.output)
        program, state = self._executables.get(self.state_spec(self._group)), self.state
        try:
            state.flags, state.bias = program(state.flags, state.bias, np.int32(slot), *rows)
        except Exception as error:
            if not state.is_lost:
                raise
            state.replace_lost()
            raise StateLostError(f"what sampling remembers is lost: {error}") from error

    def state_spec(self, group: SubMesh) -> ProgramSpec:
        """What `remember` launches, for an instance on `group`."""
        return self._executables.specs.set_state(group, self.num_slots)

    def specs(self, shape: BatchShape, kind: SamplerKind, *, every: bool) -> list[ProgramSpec]:
        """What a step needs; `every`: logits of all of its tokens are computed."""
        specs, found = self._executables.specs, []
        if every:
            found.append(specs.take_column(self._group, shape.num_tokens))
            found.append(specs.token_logprobs(self._group, shape.num_tokens))
        if kind != "greedy":
            found.append(self._sample_spec(kind, 1 if every else shape.num_rows))
        return found

    def _sample_spec(self, kind: SamplerKind, num_rows: int) -> ProgramSpec:
        specs, full = self._executables.specs, kind == "full"
        make = specs.sample_full if full else specs.sample
        return make(self._group, num_rows, self.num_slots, packed_size(num_rows, full=full))

    def column_programs(self, num_tokens: int) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        """What takes one column of a step's logits, and the log-probabilities of all."""
        specs = self._executables.specs
        take_column, token_logprobs = (
            specs.take_column(self._group, num_tokens),
            specs.token_logprobs(self._group, num_tokens),
        )
        return self._executables.get(take_column), self._executables.get(token_logprobs)

    def prepare(self, plan: StepPlan, sampled: list[Row]) -> SampleCall | None:
        """What chooses the next tokens of a step; None where the step itself does."""
        kind = sampler_kind(plan)
        if kind == "greedy":
            return None
        num_rows, full = 1 if plan.logits_of == "all" else plan.shape.num_rows, kind == "full"
        rows = [_NO_SAMPLE] * num_rows
        for row in sampled:
            s = row.sequence
            # Tokens in flight are those of the step before: one at most.
            pairs = bad_word_pairs(s.sampling, s.output, s.num_in_flight > 0)
            rows[row.place] = StepRow(s.sampling, s.slot, s.num_tokens, s.num_generated, pairs)
        packed = pack(rows, num_rows, full=full)
        return SampleCall(self._executables.get(self._sample_spec(kind, num_rows)), packed, full)

    def sample(self, sample: SampleCall, logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose tokens: the new last tokens of all slots, and the array for the host to read.

        All arrays are those of the first rank: every rank has the logits, and one sample is enough.
        """
        state = self.state
        if sample.full:
            tokens, state.flags, result = sample.program(logits, tokens, state.flags, state.bias, sample.packed)
        else:
            tokens, result = sample.program(logits, tokens, sample.packed)
        return tokens, result
