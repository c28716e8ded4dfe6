"""One serving replica: a sub-mesh with its weights view, its share of the KV cache, and its running sequences."""

import jax
import numpy as np
from jaxtyping import Int32

from amoeba_jax.engine.batch import BatchShape, StepBatch
from amoeba_jax.engine.executables import Executables
from amoeba_jax.engine.program import Result, StepKey
from amoeba_jax.engine.sequence import Sequence
from amoeba_jax.engine.weights import WeightStore
from amoeba_jax.models.decoder import SegmentPlan
from kvcache.pages import PagePool
from sharding.mesh import SubMesh


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

    def step_keys(self, shape: BatchShape, result: Result = "tokens") -> list[StepKey]:
        """Executables that a step of this shape needs, one per segment."""
        extents = tuple(extent.shape[0] // self.tp for extent in self.kv[0])
        return [
            StepKey(self.group.device_indices, plan.shape, shape, extents, result if plan.shape.head else "tokens")
            for plan in self.plans
        ]

    def launch(self, batch: StepBatch, result: Result = "tokens") -> jax.Array:
        """Dispatch one step without waiting. Returns the sampled tokens `[R]` or the logits `[N, V]`."""
        packed = jax.device_put(batch.packed, self.group.sharded)
        hidden: jax.Array | None = None
        out: jax.Array | None = None
        keys = self.step_keys(batch.shape, result)
        for plan, key, weights in zip(self.plans, keys, self._weights, strict=True):
            program = self.executables.get(key, plan, self.group)
            layers = plan.layers
            kv, hidden, out = program(weights, self.kv[layers.start : layers.stop], hidden, packed)
            self.kv[layers.start : layers.stop] = kv
        assert out is not None, "the last segment has the head"
        return out

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
        rows = batch.shape.num_rows
        num_pages, seeds, top_k = (np.zeros(rows, np.int32) for _ in range(3))
        temperature, min_p = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        top_p = np.ones(rows, np.float32)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            assert sequence.pages is not None
            used = self.pages.geometry.pages_for(length)
            table: Int32[np.ndarray, "tp pages"] = sequence.pages.table[:, :used]
            batch.set_table(row, table)
            num_pages[row], top_k[row] = used, max(sequence.params.top_k, 0)
            seeds[row] = np.uint32(sequence.seed).view(np.int32)
            temperature[row], top_p[row] = sequence.params.temperature, sequence.params.top_p
            min_p[row] = sequence.params.min_p
        for name, values in (
            ("num_pages", num_pages),
            ("seeds", seeds),
            ("top_k", top_k),
            ("temperature", temperature),
            ("top_p", top_p),
            ("min_p", min_p),
        ):
            batch.set(name, values)
