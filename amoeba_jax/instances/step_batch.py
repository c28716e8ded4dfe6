"""The inputs of one step, or of a lane's block of it, from the sequences that it computes."""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row
from amoeba_jax.programs.batch import BatchShape, StepBatch
from kvcache.geometry import PageGeometry


def step_batch(
    shape: BatchShape,
    tp: int,
    rows: Iterable[Row],
    table_of: Callable[[Sequence], Int32[np.ndarray, "tp pages"]] | None,
    geometry: PageGeometry,
) -> StepBatch:
    """Return the inputs of a step for the ranks of one home.

    Args:
        table_of: returns the pages of a sequence on these ranks; None for a step without attention.
    """
    batch = StepBatch(shape, tp)
    first_token = np.cumsum([0, *(length for count, length in shape.groups for _ in range(count))])
    tokens, sources = np.zeros(shape.num_tokens, np.int32), np.full(shape.num_tokens, -1, np.int32)
    positions = np.full(shape.num_tokens, -1, np.int32)
    last_token, slots, num_pages = (np.zeros(shape.num_rows, np.int32) for _ in range(3))
    slots -= 1
    for row in rows:
        place, sequence, start, length = row
        first, stop = first_token[place], start + length
        positions[first : first + length] = np.arange(start, stop)
        if stop > sequence.num_known:  # only ever the last token is not known
            sources[first + length - 1] = sequence.slot
        known = sequence.tokens(start, stop)
        tokens[first : first + len(known)] = known
        last_token[place] = first + length - 1
        if stop == sequence.num_tokens:
            slots[place] = sequence.slot
        if table_of is not None:
            num_pages[place] = used = geometry.pages_for(stop)
            batch.set_table(place, table_of(sequence)[:, :used])
    batch.set("tokens", tokens)
    batch.set("sources", sources)
    batch.set("positions", positions)
    batch.set("last_token", last_token)
    batch.set("slots", slots)
    batch.set("num_pages", num_pages)
    return batch
