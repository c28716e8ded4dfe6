"""Logits of a whole sequence, computed with the paged KV cache. For checks and teaching."""

import numpy as np

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan
from amoeba_jax.sampling.rows import sampling_row
from amoeba_jax.sampling_params import SamplingParams
from kvcache.pages import SequencePages


def sequence_logits(engine: Engine, tokens: tuple[int, ...], decode_from: int) -> np.ndarray:
    """Return the logits at every position of `tokens`, as f32 `[len(tokens), V]`. V is the size of the vocabulary.

    Positions before `decode_from` are computed in chunks. All other positions are computed one token at a time. Runs in
    the dispatcher thread.

    Raises `RequestError` if `tokens` is too long, if running requests leave too few pages, or if every instance is in a
    transition.
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
    params = SamplingParams(temperature=0)
    sequence = Sequence("logits", tokens, params, sampling_row(params, 0, 1, ()), lambda update: None)
    sequence.pages = SequencePages(lane.pages)
    cache.reserve(sequence.pages, len(tokens))
    lane.running.append(sequence)  # the sequence has no slot, so `Runner.last_tokens` does not change
    rows, start = [], 0
    try:
        while start < len(tokens):
            chunk = instance.lane_buckets.chunk_size(decode_from - start) if start < decode_from else 1
            stop = min(start + chunk, decode_from) if start < decode_from else start + 1
            shape = instance.lane_buckets.step(0, 1, chunk) if start < decode_from else instance.lane_buckets.step(1)
            first = shape.num_rows - 1  # earlier rows are padding, with one token each
            plan = StepPlan(shape, (Row(first, sequence, start, stop - start),), "all", microbatch)
            head = instance.runner.run(instance.runner.prepare(plan, instance.lanes))
            rows.append(np.asarray(head.logits)[:, first : first + stop - start].T)
            start = stop
    finally:
        lane.running.remove(sequence)
        cache.release(sequence.pages)
    return np.concatenate(rows)
