"""What an instance computes in one step, and the step once it is launched."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.step_program import LogitsOf
from sharding.mesh import is_lost


class Row(NamedTuple):
    """A sequence's part in a step: its tokens `start .. start + length` in row `place` of the bucket."""

    place: int
    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the sequence's last, so that the next one follows from it."""
        return self.start + self.length == self.sequence.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """What an instance computes next.

    Attributes:
        lane: whose step it is; None for one of all lanes, each with a block of as many rows.
    """

    shape: BatchShape
    rows: tuple[Row, ...]
    logits_of: LogitsOf = "last"
    lane: int | None = None

    @property
    def decodes(self) -> bool:
        """Whether it computes a token of each of its rows, and no prompt."""
        return self.shape.num_tokens == self.shape.num_rows

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that it computes; 0 if it only decodes."""
        return 0 if self.decodes else _prompt_tokens(self.rows)


def _prompt_tokens(rows: tuple[Row, ...]) -> int:
    return sum(row.length for row in rows if row.length > 1)


@dataclass(eq=False)
class SamplingState:
    """What a device remembers of its sequences for `sample_full`, in programs' donated buffers. See sampling/rows.py.

    Attributes:
        flags: `[slots, V]` i32.
        bias: `[slots, V]` f32.
    """

    flags: jax.Array
    bias: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, device: jax.Device) -> "SamplingState":
        shape = (num_slots, vocab_size)
        return cls(jnp.zeros(shape, jnp.int32, device=device), jnp.zeros(shape, jnp.float32, device=device))

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has taken its buffers along."""
        return is_lost(self.flags) or is_lost(self.bias)

    def replace_lost(self) -> None:
        """Put zeros in the place of buffers that a failed program has taken along."""
        self.flags, self.bias = (
            jnp.zeros(array.shape, array.dtype, device=array.sharding) if is_lost(array) else array
            for array in (self.flags, self.bias)
        )


class StateLostError(RuntimeError):
    """A program has failed, for the reason that is its cause, and taken the rows of all of a device's sequences in
    `SamplingState` along. They are zeros now."""


class StepNotLaunchedError(RuntimeError):
    """A step could not be prepared, for the reason that is its cause. Nothing has changed."""


@dataclass(eq=False)
class PendingStep:
    """A launched step whose results the host has not taken yet.

    Attributes:
        rows: all of them.
        sampled: rows whose next token the step chooses.
        result: what the sampler returned, in flight to the host; read after all else.
        decodes: it computes no prompt, but a token of each of its rows, and no layers change beside it.
        prompt_row: a row whose prompt log-probabilities it computes, with those in flight.
        launched_at: by `time.perf_counter()`.
    """

    rows: tuple[Row, ...]
    sampled: list[Row]
    result: "Future[np.ndarray]"
    decodes: bool
    prompt_row: Row | None = None
    prompt_result: "Future[np.ndarray] | None" = None
    launched_at: float = field(default_factory=time.perf_counter)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that it computes; 0 if it only decodes."""
        return 0 if self.decodes else _prompt_tokens(self.rows)

    @property
    def beside_decodes(self) -> bool:
        """Whether it computes a prompt, and tokens of sequences that decode."""
        return not self.decodes and any(row.length == 1 for row in self.rows)

    @property
    def done(self) -> bool:
        return self.result.done()  # the last thing that the step's reader reads
