"""Contents of the next step: a token of each decoding sequence, and chunks of prompts.

`plan_step` is for an instance with one lane. `lane_plans` is for an instance with several lanes. Its steps contain
equally many rows of each lane, or rows of one lane only. Each prompt gets steps of its own, which have the shapes of
steady instances.
"""

import math
from collections.abc import Iterator

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.prompt_turns import PromptTurns
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets

# A chunk that must not delay decoding sequences takes at most this many decode steps. With one, prompts would wait
# longer on accelerators, where a decode step takes about as long as a chunk of 512.
_STEPS_OF_PROMPT = 2


def plan_step(
    running: list[Sequence],
    buckets: Buckets,
    turns: PromptTurns,
    pace: Pace,
    *,
    prompt_logits_turn: bool,
) -> StepPlan | None:
    """Return the next step over sequences that have pages for it; None if there is nothing to compute.

    Decodes never wait for prompts. The first prompt by `turns` sets the chunk size, and others join up to the token
    budget. This prompt must not delay decoding sequences of a better rank, or of other clients with the same rank.
    Beside such sequences, the step computes at most the prompt tokens that take as long as two decode steps, or the
    smallest chunk.

    Args:
        prompt_logits_turn: whether a prompt with requested log-probabilities comes first. It needs logits at all
            positions, so it gets steps of its own, which alternate with other steps.
    """
    active = _active(running)
    decodes = [s for s in active if s.num_uncomputed_tokens == 1 and not s.needs_prompt_logits]
    in_turn = turns.ordered([s for s in active if s.num_uncomputed_tokens > 1 or s.needs_prompt_logits])
    alone = next((s for s in in_turn if s.needs_prompt_logits), None)
    prompts = [s for s in in_turn if not s.needs_prompt_logits]
    if alone is not None and (prompt_logits_turn or not (decodes or prompts)):
        chunk = min(buckets.chunk_size(_prompt_left(alone)), buckets.prompt_logits_chunks[-1])
        return _prompt_step(alone, chunk, buckets)
    if not active:
        return None
    if not prompts:
        return _plan(buckets.step(len(decodes)), decodes, [])
    limited = any(_must_not_delay(prompts[0], s) for s in decodes)
    most_tokens = _STEPS_OF_PROMPT * pace.prompt_tokens_in_a_step if limited else math.inf
    chunk = buckets.chunk_size(prompts[0].num_uncomputed_tokens, most_tokens)
    most = buckets.most_prompts(len(decodes), len(prompts), chunk)
    taken = prompts[: most if most * chunk <= most_tokens else 1]
    return _plan(buckets.step(len(decodes), len(taken), chunk), decodes, taken)


def other_plans(running: list[Sequence], buckets: Buckets) -> Iterator[StepPlan]:
    """Yield steps to compute while the programs of `plan_step`'s step are compiled, the most useful first.

    First come steps of all sequences, in larger shapes, then steps without the sequences that need the rarer samplers.
    Within each group come steps with a prompt, steps of all decodes, and steps of the first decodes only.
    """
    active = [s for s in _active(running) if not s.needs_prompt_logits]
    for left_out in ((), ("full",), ("sample", "full")):
        taken = [s for s in active if s.sampling.kind not in left_out]
        if left_out and len(taken) == len(active):
            continue  # no sequence needs these samplers
        decodes = [s for s in taken if s.num_uncomputed_tokens == 1]
        prompts = [s for s in taken if s.num_uncomputed_tokens > 1]
        yield from _by_usefulness(decodes, prompts, buckets)


def roomy_plans(running: list[Sequence], buckets: Buckets) -> list[StepPlan]:
    """Return steps without rows, in whose shapes any number of sequences can continue.

    One has all rows for decodes. If a prompt is left to compute, another has a prompt beside decodes.
    """
    prompts = [s for s in _active(running) if s.num_uncomputed_tokens > 1 and not s.needs_prompt_logits]
    decodes = StepPlan(buckets.step(buckets.max_num_seqs), ())
    if not prompts:
        return [decodes]
    mixed = buckets.step(buckets.mixed_rows[-1] - 1, 1, buckets.chunk_size(prompts[0].num_uncomputed_tokens))
    return [StepPlan(mixed, ()), decodes]


def lane_plans(lanes: list[Lane], buckets: Buckets, turns: PromptTurns, last_was_prompt: bool) -> Iterator[StepPlan]:
    """Yield the next step of several lanes, and then others for the time in which its programs are compiled.

    Args:
        buckets: step shapes of an instance with one of these lanes.
        last_was_prompt: whether the latest step computed a prompt. Then decodes come first.
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
    prompt_plans = iter(()) if first is None else _prompt_plans(first, prompts[first], buckets)
    decode_plans = _lane_decode_plans(decodes, buckets)
    for plans in (decode_plans, prompt_plans) if last_was_prompt else (prompt_plans, decode_plans):
        yield from plans


def _active(running: list[Sequence]) -> list[Sequence]:
    return sorted((s for s in running if s.num_uncomputed_tokens > 0), key=lambda s: s.order)


def _must_not_delay(prompt: Sequence, decoding: Sequence) -> bool:
    return decoding.rank < prompt.rank or (decoding.rank == prompt.rank and decoding.client != prompt.client)


def _plan(shape: BatchShape, decodes: list[Sequence], prompts: list[Sequence]) -> StepPlan:
    rows = [Row(index, s, s.num_computed, 1) for index, s in enumerate(decodes)]
    for index, s in enumerate(prompts, _first_prompt_row(shape)):
        rows.append(Row(index, s, s.num_computed, min(s.num_uncomputed_tokens, shape.groups[-1][1])))
    return StepPlan(shape, tuple(rows))


def _first_prompt_row(shape: BatchShape) -> int:
    """Return the row of the first prompt in a step. The rows before it decode, or are padding."""
    return shape.num_rows - shape.groups[-1][0]


def _by_usefulness(decodes: list[Sequence], prompts: list[Sequence], buckets: Buckets) -> Iterator[StepPlan]:
    shapes = buckets.all()
    mixed = [s for s in shapes if s.num_tokens > s.num_rows and len(decodes) <= _first_prompt_row(s)]
    if prompts:
        wanted = buckets.chunk_size(prompts[0].num_uncomputed_tokens)
        for shape in sorted(mixed, key=lambda s: (s.groups[-1][1] < wanted, abs(s.groups[-1][1] - wanted), s.num_rows)):
            yield _plan(shape, decodes, prompts[: shape.groups[-1][0]])
    if decodes:
        sizes = sorted(s.num_rows for s in shapes if s.num_tokens == s.num_rows)
        for rows in (rows for rows in sizes if rows >= len(decodes)):
            yield _plan(buckets.step(rows), decodes, [])
        for shape in sorted(mixed, key=lambda s: s.num_tokens):  # its prompt row is padding
            yield _plan(shape, decodes, [])
        for rows in (rows for rows in reversed(sizes) if rows < len(decodes)):
            yield _plan(buckets.step(rows), decodes[:rows], [])


def _prompt_left(sequence: Sequence) -> int:
    """Return the tokens of a prompt that steps must still compute. Steps with prompt logits end with the prompt."""
    if sequence.needs_prompt_logits:
        return len(sequence.prompt) - sequence.num_computed
    return sequence.num_uncomputed_tokens


def _prompt_step(sequence: Sequence, chunk: int, buckets: Buckets, lane: int | None = None) -> StepPlan:
    """Return the step of a chunk of one prompt. It has logits of all tokens if the sequence needs prompt logits."""
    shape = buckets.step(0, 1, chunk)
    row = Row(_first_prompt_row(shape), sequence, sequence.num_computed, min(_prompt_left(sequence), chunk))
    return StepPlan(shape, (row,), "all" if sequence.needs_prompt_logits else "last", lane)


def _prompt_plans(sequence: Sequence, lane: int, buckets: Buckets) -> Iterator[StepPlan]:
    """Yield steps of a chunk of a lane's prompt, the best size first."""
    best = buckets.chunk_size(_prompt_left(sequence))
    sizes = buckets.prompt_logits_chunks if sequence.needs_prompt_logits else buckets.chunk_sizes
    for chunk in sorted(sizes, key=lambda size: (size < best, abs(size - best))):
        yield _prompt_step(sequence, chunk, buckets, lane)


def _lane_decode_plans(decodes: list[list[Sequence]], buckets: Buckets) -> Iterator[StepPlan]:
    """Yield steps of all decoding sequences, with the fewest rows first. If only one lane decodes, it is alone."""
    busy = [number for number, sequences in enumerate(decodes) if sequences]
    if not busy:
        return
    lane = busy[0] if len(busy) == 1 else None
    blocks = decodes if lane is None else [decodes[lane]]
    for size in (size for size in buckets.decode_sizes if size >= max(map(len, blocks))):
        rows = [
            Row(number * size + index, s, s.num_computed, 1)
            for number, sequences in enumerate(blocks)
            for index, s in enumerate(sequences)
        ]
        yield StepPlan(BatchShape(((size * len(blocks), 1),), buckets.table_width), tuple(rows), lane=lane)
