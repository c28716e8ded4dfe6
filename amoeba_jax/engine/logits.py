"""Logits of a whole sequence, computed with the paged KV cache. For checks and teaching."""

from functools import partial

import numpy as np

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.lane import Lane
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.work import Blocks
from kvcache.geometry import PageGeometry
from kvcache.pages import SequencePages
from sharding.placement import Home


def sequence_logits(engine: Engine, tokens: tuple[int, ...], decode_from: int) -> np.ndarray:
    """Compute the f32 logits `[len(tokens), V]` at every position of a sequence.

    Positions before `decode_from` are computed in chunks, and the others one token at a time. Runs in the dispatcher
    thread. Raises `RequestError` if the sequence is too long, or running requests leave too few pages.
    """
    engine.check_request(len(tokens), 0)
    steady = [instance for instance in engine.instances if instance.transition is None]
    if not steady:
        raise RequestError("logits cannot be computed while all devices are being transformed: wait until then")
    lanes = [(instance, number, lane) for instance in steady for number, lane in enumerate(instance.lanes)]
    instance, number, lane = max(lanes, key=lambda it: (it[2].cache.num_available_pages, -it[0].id, -it[1]))
    cache, microbatch = lane.cache, number if len(instance.lanes) > 1 else None
    if (need := engine.dims.pages.pages_for(len(tokens))) > cache.num_available_pages:
        raise RequestError(
            f"logits of {len(tokens)} tokens need {need} KV pages, and running requests leave "
            f"{cache.num_available_pages}: wait for them to finish"
        )
    pages = SequencePages(lane.pages)
    cache.reserve(pages, len(tokens))
    rows, start = [], 0
    try:
        while start < len(tokens):
            chunk = instance.lane_buckets.chunk_size(decode_from - start) if start < decode_from else 1
            stop = min(start + chunk, decode_from) if start < decode_from else start + 1
            shape = instance.lane_buckets.step(0, 1, chunk) if start < decode_from else instance.lane_buckets.step(1)
            batch_at = partial(_batch_at, engine.dims.pages, lane, pages, tokens[start:stop], start)
            head = instance.launcher.launch_batch(shape, microbatch, batch_at, "all")
            first = shape.num_rows - 1  # rows before the sequence's are padding, of one token each
            rows.append(np.asarray(head.logits)[:, first : first + stop - start].T)
            start = stop
    finally:
        cache.release(pages)
    return np.concatenate(rows)


def _batch_at(
    geometry: PageGeometry,
    lane: Lane,
    pages: SequencePages,
    tokens: tuple[int, ...],
    start: int,
    home: Home,
    _: Blocks | None,
    shape: BatchShape,
) -> StepBatch:
    """Return the inputs of a step that computes tokens of one sequence from `start` on and samples nothing."""
    batch = StepBatch(shape, home.degree)
    row = shape.num_rows - 1
    padding = (row, shape.num_tokens - len(tokens) - row)
    batch.set("tokens", np.pad(tokens, padding))
    batch.set("positions", np.pad(np.arange(start, start + len(tokens)), padding, constant_values=-1))
    if home in lane.ranks:
        used = geometry.pages_for(start + len(tokens))
        batch.set_table(row, lane.table(pages, home)[:, :used])
        batch.set("num_pages", np.pad([used], (row, 0)))
    return batch
