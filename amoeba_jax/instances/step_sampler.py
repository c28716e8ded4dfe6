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

# Padding, or a chunk that does not end its prompt.
_NO_SAMPLE = StepRow(sampling_row(SamplingParams(temperature=0), 0, 1, ()), NO_SLOT, 0, 0)


class StateLostError(RuntimeError):
    """Error: a failed program has lost the buffers of `SamplingState`. The error of the program is `__cause__`.

    The state of all slots is now zero.
    """


@dataclass(eq=False)
class SamplingState:
    """Arrays of the sampler `sample_full` on one device, with a row for each slot (running sequence).

    A program that changes an array takes the array as a donated argument.

    Attributes:
        flags: `[slots, V]` i32. For each token: whether it is in the prompt, whether it is a stop token, and how often
            it was generated (`sampling.rows.state_rows`).
        bias: `[slots, V]` f32. Values that are added to the logits.
    """

    flags: jax.Array
    bias: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, device: jax.Device) -> "SamplingState":
        shape = (num_slots, vocab_size)
        return cls(jnp.zeros(shape, jnp.int32, device=device), jnp.zeros(shape, jnp.float32, device=device))

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has lost one of the arrays."""
        return is_lost(self.flags) or is_lost(self.bias)

    def replace_lost(self) -> None:
        """Put zeros in place of each array that a failed program has lost."""
        self.flags, self.bias = (
            jnp.zeros(array.shape, array.dtype, device=array.sharding) if is_lost(array) else array
            for array in (self.flags, self.bias)
        )


class SampleCall(NamedTuple):
    """Sampling program of a step, with its inputs.

    Attributes:
        packed: sampling settings of the step's rows, packed into one array.
        masks: allowed tokens of each row, for the program `sample_full`. None for the program `sample`.
    """

    program: jax.stages.Compiled
    packed: np.ndarray
    masks: np.ndarray | None


def sampler_kind(plan: StepPlan) -> SamplerKind:
    """Return the kind of sampler that a step needs: `greedy`, `sample` or `full`.

    The kind `greedy` needs no sampling program, because the head already returns the greedy tokens. The kinds `sample`
    and `full` need the programs `sample` and `sample_full`.
    """
    kinds: set[SamplerKind] = {row.sequence.sampling.kind for row in plan.rows if row.samples}
    if "full" in kinds:
        return "full"
    return "sample" if "sample" in kinds or (kinds and plan.logits_of == "all") else "greedy"


class StepSampler:
    """Launcher of the sampling programs of an instance. Used by the dispatcher thread only.

    Attributes:
        state: sampling state of the first device. Other instances with the same first device share this state.
        num_slots: number of slots of the state.
    """

    def __init__(self, group: SubMesh, state: SamplingState, executables: Executables):
        self.state, self.num_slots = state, state.flags.shape[0]
        self._group, self._executables = group, executables

    def remember(self, sequence: Sequence, slot: int) -> None:
        """Write a sequence's row of the sampling state, if the sampling settings of the sequence need the state.

        If the program that writes the row fails, its error is raised. If the program has also lost the state,
        `StateLostError` is raised instead.
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
        """Return the specs (descriptions) of the sampling programs of a step, for the sampler of the kind `kind`."""
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

        `take_column` takes the logits of one token. `token_logprobs` computes the log-probabilities of given tokens.
        `num_tokens` is the number of tokens of the step.
        """
        return [self._executables.get(spec) for spec in self._column_specs(num_tokens)]

    def prepare(self, kind: SamplerKind, num_rows: int, sampled: list[Row]) -> SampleCall | None:
        """Return the sampling program of a step, with its inputs. Return None if the kind is `greedy`.

        Args:
            kind: kind of sampler that the rows need (`sampler_kind`).
            num_rows: number of rows of the step. 1 if the step computes logits of all tokens.
            sampled: rows whose next token is sampled.
        """
        if kind == "greedy":
            return None
        full = kind == "full"
        rows = [_NO_SAMPLE] * num_rows
        for row in sampled:
            s, position = row.sequence, row.stop
            # The host knows all tokens before this position, or all except the token of the step before.
            pairs = bad_word_pairs(s.sampling, s.output, position > s.num_known)
            rows[row.place] = StepRow(s.sampling, s.slot, position, position - len(s.prompt), pairs)
        packed = pack(rows, num_rows, full=full)
        masks = _masks(sampled, num_rows, self.state.flags.shape[1]) if full else None
        return SampleCall(self._executables.get(self._sample_spec(kind, num_rows)), packed, masks)

    def sample(self, sample: SampleCall, logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Launch the sampling of the next tokens. Return `(last_tokens, result)`.

        `last_tokens` has the new last token of each slot. `result` is an array for the host, with the sampled tokens.
        All arrays are on the first device of the instance.

        Args:
            sample: sampling program and its inputs, from `prepare`.
            logits: logits of the rows to sample.
            tokens: last token of each slot before this step.
        """
        state = self.state
        if sample.masks is not None:
            inputs = state.flags, state.bias, sample.packed, sample.masks
            tokens, state.flags, result = sample.program(logits, tokens, *inputs)
        else:
            tokens, result = sample.program(logits, tokens, sample.packed)
        return tokens, result


def _masks(sampled: list[Row], num_rows: int, vocab_size: int) -> Masks:
    """Return the masks of allowed tokens for the rows of a step.

    Rows without a grammar get a mask of zeros, which the sampler ignores.
    """
    masks = np.zeros((num_rows, mask_words(vocab_size)), np.int32)
    for row in sampled:
        if row.sequence.matcher is not None:
            masks[row.place] = row.sequence.matcher.mask
    return masks
