"""One serving replica: a sub-mesh with its weights view, its share of the KV cache, and its running sequences."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from amoeba_jax.engine.batch import BatchShape, StepBatch
from amoeba_jax.engine.executables import Executables
from amoeba_jax.engine.program import LogitsOf, StepKey
from amoeba_jax.engine.sampler import pack_sampling
from amoeba_jax.engine.sequence import Sequence
from amoeba_jax.engine.weights import WeightStore
from amoeba_jax.models.decoder import SegmentPlan
from kvcache.pages import PagePool
from sharding.mesh import SubMesh, disassemble


class StepResult(NamedTuple):
    """What a step's head returns, the same on every rank. R is the step's rows, or its tokens for `"all"`."""

    likeliest: Int32[Array, " R"]
    logits: Float[Array, "R V"]


class Instance:
    """Launches steps on one sub-mesh. Used by the dispatcher thread only.

    `kv[layer]` is that layer's list of extents, each `[tp * pages, page_elems]` sharded over the ranks. Every step
    donates them and puts the returned arrays (the same memory) in their place.
    """

    def __init__(
        self,
        group: SubMesh,
        pages: PagePool,
        kv: list[list[jax.Array]],
        plans: tuple[SegmentPlan, ...],
        weights: WeightStore,
        executables: Executables,
    ):
        self.id = group.start
        self.group = group
        self.pages = pages
        self.kv = kv
        self.plans = plans
        self.executables = executables
        self.running: list[Sequence] = []
        self._weights = [weights.view(group, plan) for plan in plans]

    @property
    def tp(self) -> int:
        return self.group.tp

    def step_keys(self, shape: BatchShape, logits_of: LogitsOf = "last") -> list[StepKey]:
        """Executables that a step of this shape needs, one per segment."""
        extents = tuple(extent.shape[0] // self.tp for extent in self.kv[0])
        return [
            StepKey(
                self.group.device_indices,
                plan.shape,
                shape,
                extents,
                logits_of if plan.shape.head else "last",
            )
            for plan in self.plans
        ]

    def launch(self, batch: StepBatch, logits_of: LogitsOf = "last") -> StepResult:
        """Dispatch one step without waiting."""
        packed = jax.device_put(batch.packed, self.group.sharded)
        hidden: jax.Array | None = None
        head: tuple[jax.Array, jax.Array] | None = None
        keys = self.step_keys(batch.shape, logits_of)
        # All of them before the first runs: the cache is donated from then on.
        programs = [self.executables.step(key, plan, self.group) for key, plan in zip(keys, self.plans, strict=True)]
        for plan, program, weights in zip(self.plans, programs, self._weights, strict=True):
            layers = plan.layers
            kv, hidden, head = program(weights, self.kv[layers.start : layers.stop], hidden, packed)
            self.kv[layers.start : layers.stop] = kv
        assert head is not None, "the last segment has the head"
        return StepResult(*head)

    def next_tokens(self, result: StepResult, sequences: list[Sequence]) -> jax.Array:
        """Tokens `[R]` that follow the rows of a step, dispatched without waiting.

        Where all want the likeliest, the step has chosen already. Otherwise they are drawn on the first rank: every
        rank has the logits, and one sort is enough.
        """
        if all(sequence.params.temperature == 0 for sequence in sequences):
            return result.likeliest
        rows = [(s.params, s.seed, s.num_tokens) for s in sequences]
        (logits, *_) = disassemble(self.group, result.logits)
        program = self.executables.sampler(self.group.devices[0], logits.shape)
        return program(logits, pack_sampling(rows, logits.shape[0]))

    def release(self) -> None:
        """Drop all device buffers."""
        self.kv.clear()
        self._weights.clear()

    def prefill_batch(self, shape: BatchShape, sequence: Sequence, length: int) -> StepBatch:
        """Inputs that compute the next `length` tokens of one sequence."""
        start = sequence.num_computed
        batch = StepBatch(shape, self.tp)
        tokens = np.zeros(shape.num_tokens, np.int32)
        positions = np.full(shape.num_tokens, -1, np.int32)
        tokens[:length] = sequence.tokens(start, start + length)
        positions[:length] = np.arange(start, start + length)
        batch.set("tokens", tokens)
        batch.set("positions", positions)
        batch.set("last_token", np.array([length - 1]))
        self._fill_rows(batch, [sequence], [start + length])
        return batch

    def decode_batch(self, shape: BatchShape, sequences: list[Sequence]) -> StepBatch:
        """Inputs that compute the last token of each sequence."""
        batch = StepBatch(shape, self.tp)
        rows = shape.num_rows
        tokens, positions = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
        for row, sequence in enumerate(sequences):
            tokens[row] = sequence.output[-1]
            positions[row] = sequence.num_tokens - 1
        batch.set("tokens", tokens)
        batch.set("positions", positions)
        batch.set("last_token", np.arange(rows))
        self._fill_rows(batch, sequences, [sequence.num_tokens for sequence in sequences])
        return batch

    def _fill_rows(self, batch: StepBatch, sequences: list[Sequence], lengths: list[int]) -> None:
        num_pages = np.zeros(batch.shape.num_rows, np.int32)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            assert sequence.pages is not None
            num_pages[row] = used = self.pages.geometry.pages_for(length)
            batch.set_table(row, sequence.pages.table[:, :used])
        batch.set("num_pages", num_pages)
