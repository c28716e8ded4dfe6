"""What an instance computes next while its layers change their homes: a token of every sequence that decodes, in turn
with chunks of prompts.

A step is of all lanes, a block of as many rows each, or of one lane. Prompts are of one lane, so that their steps have
the shapes that instances of both degrees have.
"""

from collections.abc import Iterator

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.prompt_turns import PromptTurns
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets


def lane_plans(lanes: list[Lane], buckets: Buckets, turns: PromptTurns, last_was_prompt: bool) -> Iterator[StepPlan]:
    """The next step, and others to compute while its programs are compiled, the most useful first.

    Args:
        buckets: of instances of the lower degree.
        last_was_prompt: the step before computed a prompt: if anything decodes, it is its turn.
    """
    decodes = [
        [s for s in lane.running if s.num_uncomputed_tokens == 1 and not s.needs_prompt_logits] for lane in lanes
    ]
    prompts = {
        s: number
        for number, lane in enumerate(lanes)
        for s in lane.running
        if s.num_uncomputed_tokens > 1 or (s.num_uncomputed_tokens and s.needs_prompt_logits)
    }
    first = next(iter(turns.ordered(prompts)), None)
    of_prompt = iter(()) if first is None else _prompt_plans(first, prompts[first], buckets)
    of_decodes = _decode_plans(decodes, buckets)
    for plans in (of_decodes, of_prompt) if last_was_prompt else (of_prompt, of_decodes):
        yield from plans


def _decode_plans(decodes: list[list[Sequence]], buckets: Buckets) -> Iterator[StepPlan]:
    """Steps of all that decode: in as few rows as there are, or in more."""
    busy = [number for number, sequences in enumerate(decodes) if sequences]
    most = max((len(sequences) for sequences in decodes), default=0)
    for size in buckets.decode_sizes:
        if most and size >= most:
            yield _blocks(decodes, size, buckets, busy[0] if len(busy) == 1 else None)


def _blocks(decodes: list[list[Sequence]], size: int, buckets: Buckets, lane: int | None) -> StepPlan:
    """Make a step of all lanes, or of one that has `size` rows to itself."""
    blocks = decodes if lane is None else [decodes[lane]]
    rows = [
        Row(number * size + index, s, s.num_computed, 1)
        for number, sequences in enumerate(blocks)
        for index, s in enumerate(sequences)
    ]
    shape = BatchShape(((size * len(blocks), 1),), buckets.table_width)
    return StepPlan(shape, tuple(rows), lane=lane)


def _prompt_plans(sequence: Sequence, lane: int, buckets: Buckets) -> Iterator[StepPlan]:
    """Steps of a chunk of a prompt, of the best size and of others."""
    every = sequence.needs_prompt_logits
    left = len(sequence.prompt) - sequence.num_computed if every else sequence.num_uncomputed_tokens
    best = buckets.chunk_size(left)
    sizes = buckets.prompt_logits_chunks if every else buckets.chunk_sizes
    for chunk in sorted(sizes, key=lambda size: (size < best, abs(size - best))):
        shape = buckets.step(0, 1, chunk)
        row = Row(shape.num_rows - 1, sequence, sequence.num_computed, min(left, chunk))
        yield StepPlan(shape, (row,), "all" if every else "last", lane)
