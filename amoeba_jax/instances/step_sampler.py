"""Sampling of the next tokens of a step, on the first device of an instance."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.sampling.rows import (
    NO_SLOT,
    Masks,
    SamplerKind,
    StepRow,
    bad_word_pairs,
    mask_words,
    pack,
    packed_size,
    sampling_row,
    state_rows,
)
from amoeba_jax.sampling_params import SamplingParams
from sharding.mesh import SubMesh, is_lost

# Input for a row that samples nothing: padding, or a chunk that does not end its prompt.
_NO_SAMPLE = StepRow(sampling_row(SamplingParams(temperature=0), 0, 1, ()), NO_SLOT, 0, 0)


class StateLostError(RuntimeError):
    """Error: a failed program has lost buffers of `SamplingState`. `__cause__` is the error of the program.

    The lost buffers are replaced by buffers of zeros.
    """


@dataclass(eq=False)
class SamplingState:
    """Arrays of the program `sample_full` on one device, with a row for each slot. Each running sequence has a slot.

    Programs that change an array take the array as a donated argument.

    Attributes:
        flags: bits for each token of the vocabulary, i32 `[slots, V]`: whether the token is in the prompt, whether it
            is a stop token, and how often it was generated (`sampling.rows.state_rows`).
        bias: values to add to the logits, f32 `[slots, V]`.
    """

    flags: jax.Array
    bias: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, device: jax.Device) -> "SamplingState":
        shape = (num_slots, vocab_size)
        return cls(jnp.zeros(shape, jnp.int32, device=device), jnp.zeros(shape, jnp.float32, device=device))

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has lost at least one of the arrays."""
        return is_lost(self.flags) or is_lost(self.bias)

    def replace_lost(self) -> None:
        """Put zeros in place of each array that a failed program has lost."""
        self.flags, self.bias = (
            jnp.zeros(array.shape, array.dtype, device=array.sharding) if is_lost(array) else array
            for array in (self.flags, self.bias)
        )


class SampleCall(NamedTuple):
    """Sampling program of a step, with the inputs of the program.

    Attributes:
        program: compiled program `sample` or `sample_full`.
        packed: sampling settings of the rows of the step, packed into one array.
        masks: masks of the allowed tokens of each row, for the program `sample_full`. None for the program `sample`.
    """

    program: jax.stages.Compiled
    packed: np.ndarray
    masks: np.ndarray | None


def sampler_kind(plan: StepPlan) -> SamplerKind:
    """Return the kind of sampler that a step needs: `greedy`, `sample` or `full`.

    The kind `greedy` needs no sampling program, because the head already returns the greedy tokens. The kind `sample`
    needs the program `sample`. The kind `full` needs the program `sample_full`.
    """
    kinds: set[SamplerKind] = {row.sequence.sampling.kind for row in plan.rows if row.samples}
    if "full" in kinds:
        return "full"
    return "sample" if "sample" in kinds or (kinds and plan.logits_of == "all") else "greedy"


class StepSampler:
    """Launcher of the sampling programs of an instance. Used by the dispatcher thread only.

    Attributes:
        state: sampling state on the first device of the instance. All instances with this first device share the state.
        num_slots: number of slots in the sampling state.
    """

    def __init__(self, group: SubMesh, state: SamplingState, executables: Executables):
        self.state, self.num_slots = state, state.flags.shape[0]
        self._group, self._executables = group, executables

    def remember(self, sequence: Sequence, slot: int) -> None:
        """Write the row of the slot `slot` in the sampling state. Do nothing if the sequence needs no sampling state.

        Raises the error of the program that writes the row, if this program fails. Raises `StateLostError` instead if
        the failed program has also lost the state.
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
            raise StateLostError(f"the sampling state is lost: {error}") from error

    def state_spec(self, group: SubMesh) -> ProgramSpec:
        """Return the spec (description) of the program that `remember` runs for an instance on `group`."""
        return self._executables.specs.set_state(group, self.num_slots)

    def specs(self, plan: StepPlan, kind: SamplerKind) -> list[ProgramSpec]:
        """Return the specs of the programs that sample or compute log-probabilities in a step, for a sampler kind."""
        every, shape = plan.logits_of == "all", plan.shape
        found = self._column_specs(shape.num_tokens) if every else []
        if kind != "greedy":
            found.append(self._sample_spec(kind, 1 if every else shape.num_rows))
        return found

    def _column_specs(self, num_tokens: int) -> list[ProgramSpec]:
        specs = self._executables.specs
        return [specs.take_column(self._group, num_tokens), specs.token_logprobs(self._group, num_tokens)]

    def _sample_spec(self, kind: SamplerKind, num_rows: int) -> ProgramSpec:
        specs, full = self._executables.specs, kind == "full"
        make = specs.sample_full if full else specs.sample
        return make(self._group, num_rows, self.num_slots, packed_size(num_rows, full=full))

    def column_programs(self, num_tokens: int) -> list[jax.stages.Compiled]:
        """Return two programs, `[take_column, token_logprobs]`, for a step with logits of all tokens.

        `take_column` returns the logits at one token. `token_logprobs` returns the log-probabilities of given tokens.
        `num_tokens` is the number of tokens of the step.
        """
        return [self._executables.get(spec) for spec in self._column_specs(num_tokens)]

    def prepare(self, kind: SamplerKind, num_rows: int, sampled: list[Row]) -> SampleCall | None:
        """Return the sampling program of a step, with the inputs of the program. Return None if the kind is `greedy`.

        Args:
            kind: kind of sampler that the rows need (`sampler_kind`).
            num_rows: number of rows of the step, with padding. Pass 1 if the step computes logits of all tokens,
                because the sampling program then gets the logits of only one token.
            sampled: rows for which a next token is sampled.
        """
        if kind == "greedy":
            return None
        full = kind == "full"
        rows = [_NO_SAMPLE] * num_rows
        for row in sampled:
            s, position = row.sequence, row.stop
            # The host knows all tokens before `position`, except perhaps the token that the previous step samples.
            pairs = bad_word_pairs(s.sampling, s.output, position > s.num_known)
            rows[row.place] = StepRow(s.sampling, s.slot, position, position - len(s.prompt), pairs)
        packed = pack(rows, num_rows, full=full)
        masks = _masks(sampled, num_rows, self.state.flags.shape[1]) if full else None
        return SampleCall(self._executables.get(self._sample_spec(kind, num_rows)), packed, masks)

    def sample(self, sample: SampleCall, logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Launch the sampling of the next tokens. Return `(last_tokens, result)`.

        `last_tokens` has the last token of each slot after the sampling. `result` is an array for the host, with the
        sampled tokens. The program `sample_full` adds log-probabilities to `result`. All arrays are on the first device
        of the instance.

        Args:
            sample: sampling program with the inputs of the program, from `prepare`.
            logits: logits of the rows to sample, `[V, R]`.
            tokens: last token of each slot before the sampling.
        """
        state = self.state
        if sample.masks is not None:
            inputs = state.flags, state.bias, sample.packed, sample.masks
            tokens, state.flags, result = sample.program(logits, tokens, *inputs)
        else:
            tokens, result = sample.program(logits, tokens, sample.packed)
        return tokens, result


def _masks(sampled: list[Row], num_rows: int, vocab_size: int) -> Masks:
    """Return a mask of allowed tokens for each row of a step.

    The mask of a row without a grammar is all zeros, and the sampler ignores this mask.
    """
    masks = np.zeros((num_rows, mask_words(vocab_size)), np.int32)
    for row in sampled:
        if row.sequence.matcher is not None:
            masks[row.place] = row.sequence.matcher.mask
    return masks
