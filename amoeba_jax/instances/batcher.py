"""What an instance computes next: decodes of all running sequences, and beside them chunks of prompts."""

import math
from collections.abc import Iterator

from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.prompt_turns import PromptTurns
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets

# Decode steps that a chunk of a prompt may take where it is not to hold up what decodes. With one, prompts would wait
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
    """The next step over sequences that have pages for it, or None if none has anything to compute.

    Decodes never wait for prompts. The prompt whose turn it is decides the chunk size, and others join as far as the
    token budget goes. A prompt whose log-probabilities are wanted needs logits at all positions, so it has steps of its
    own, in turn with the others' (`prompt_logits_turn`).

    Where others decode whom a prompt is not to hold up (those of other clients, if it has no higher rank, and those of
    a higher rank), no more of it is computed at once than takes two decode steps, by `pace`, or the smallest chunk.
    """
    active = sorted((s for s in running if s.num_uncomputed_tokens > 0), key=lambda s: s.order)
    decodes = [s for s in active if s.num_uncomputed_tokens == 1 and not s.needs_prompt_logits]
    in_turn = turns.ordered([s for s in active if s.num_uncomputed_tokens > 1 or s.needs_prompt_logits])
    alone = next((s for s in in_turn if s.needs_prompt_logits), None)
    prompts = [s for s in in_turn if not s.needs_prompt_logits]
    if alone is not None and (prompt_logits_turn or not (decodes or prompts)):
        return _prompt_logits_step(alone, buckets)
    if not active:
        return None
    if not prompts:
        return _plan(buckets.step(len(decodes)), decodes, [])
    yields = any(_yields(prompts[0], s) for s in decodes)
    at_most = _STEPS_OF_PROMPT * pace.prompt_tokens_in_a_step if yields else math.inf
    chunk = buckets.chunk_size(prompts[0].num_uncomputed_tokens, at_most)
    most = buckets.most_prompts(len(decodes), len(prompts), chunk)
    taken = prompts[: most if most * chunk <= at_most else 1]
    return _plan(buckets.step(len(decodes), len(taken), chunk), decodes, taken)


def _yields(prompt: Sequence, decoding: Sequence) -> bool:
    """Whether a prompt is not to hold up a sequence that decodes."""
    return decoding.rank < prompt.rank or (decoding.rank == prompt.rank and decoding.client != prompt.client)


def _plan(shape: BatchShape, decodes: list[Sequence], prompts: list[Sequence]) -> StepPlan:
    rows = [Row(index, s, s.num_computed, 1) for index, s in enumerate(decodes)]
    for index, s in enumerate(prompts, first_prompt_row(shape)):
        rows.append(Row(index, s, s.num_computed, min(s.num_uncomputed_tokens, shape.groups[-1][1])))
    return StepPlan(shape, tuple(rows))


def other_plans(running: list[Sequence], buckets: Buckets) -> Iterator[StepPlan]:
    """Steps to compute while the programs of `plan_step`'s are compiled, the most useful first.

    First those that leave no one out (larger shapes; for decodes alone, at last, those with room for a prompt), then
    those without sequences that need the rarer samplers, those without prompts, and those with the first sequences
    alone (smaller shapes).
    """
    active = sorted(
        (s for s in running if s.num_uncomputed_tokens > 0 and not s.needs_prompt_logits), key=lambda s: s.order
    )
    for left_out in ((), ("full",), ("sample", "full")):
        taken = [s for s in active if s.sampling.kind not in left_out]
        if left_out and len(taken) == len(active):
            continue  # those were tried
        decodes, prompts = (
            [s for s in taken if s.num_uncomputed_tokens == 1],
            [s for s in taken if s.num_uncomputed_tokens > 1],
        )
        yield from _by_usefulness(decodes, prompts, buckets)


def _by_usefulness(decodes: list[Sequence], prompts: list[Sequence], buckets: Buckets) -> Iterator[StepPlan]:
    shapes = buckets.all()
    mixed = [s for s in shapes if s.num_tokens > s.num_rows and len(decodes) <= first_prompt_row(s)]
    if prompts:
        wanted = buckets.chunk_size(prompts[0].num_uncomputed_tokens)
        for shape in sorted(mixed, key=lambda s: (s.groups[-1][1] < wanted, abs(s.groups[-1][1] - wanted), s.num_rows)):
            yield _plan(shape, decodes, prompts[: shape.groups[-1][0]])
    if decodes:
        alone = sorted(s.num_rows for s in shapes if s.num_tokens == s.num_rows)
        for rows in (rows for rows in alone if rows >= len(decodes)):
            yield _plan(buckets.step(rows), decodes, [])
        for shape in sorted(mixed, key=lambda s: s.num_tokens):  # what is there for a prompt is padding
            yield _plan(shape, decodes, [])
        for rows in (rows for rows in reversed(alone) if rows < len(decodes)):
            yield _plan(buckets.step(rows), decodes[:rows], [])


def roomy_plans(running: list[Sequence], buckets: Buckets) -> list[StepPlan]:
    """Steps, still without sequences, in which any number of them can go on: one with a prompt, if there is one to
    compute, and one of decodes, of all rows each."""
    prompts = sorted(
        (s for s in running if s.num_uncomputed_tokens > 1 and not s.needs_prompt_logits), key=lambda s: s.order
    )
    decodes = buckets.step(buckets.max_num_seqs)
    if not prompts:
        return [StepPlan(decodes, ())]
    mixed = buckets.step(buckets.mixed_rows[-1] - 1, 1, buckets.chunk_size(prompts[0].num_uncomputed_tokens))
    return [StepPlan(mixed, ()), StepPlan(decodes, ())]


def first_prompt_row(shape: BatchShape) -> int:
    """The row of a step with prompts at which they begin: those before it decode, or are padding."""
    return shape.num_rows - shape.groups[-1][0]


def _prompt_logits_step(sequence: Sequence, buckets: Buckets) -> StepPlan:
    left = len(sequence.prompt) - sequence.num_computed
    chunk = min(buckets.chunk_size(left), buckets.prompt_logits_chunks[-1])
    shape = buckets.step(0, 1, chunk)
    row = Row(first_prompt_row(shape), sequence, sequence.num_computed, min(left, chunk))
    return StepPlan(shape, (row,), "all")
