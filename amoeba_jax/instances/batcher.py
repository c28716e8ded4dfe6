"""Choice of the next step of an instance.

A step is one pass through the model. Each row of a step is one sequence: one token of a decoding sequence, or a chunk
of a prompt. `plan_step` is for an instance with one lane. `lane_plans` is for an instance with several lanes.

With several lanes, a step either decodes or computes a chunk of one prompt. A step that decodes has rows of one lane
only, or equally many rows for each lane. Several lanes need no further compiled programs, because an instance with one
lane has steps of the same shapes.
"""

import math
from collections.abc import Collection, Iterable, Iterator

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets

# A chunk that must not delay decoding sequences takes at most this many decode steps. With one, prompts would wait
# longer on accelerators, where a decode step takes about as long as a chunk of 512.
_STEPS_OF_PROMPT = 2

# Counters of clients without prompts are kept for this many clients. A prompt may wait long behind prompts of a higher
# rank, while any number of clients come and go.
_MAX_ABSENT = 256


class PromptTurns:
    """Order in which the prompts of an instance are computed.

    Prompts of a higher priority (a lower `Sequence.rank`) come first. Among prompts of equal priority, prompts of the
    client with the lowest counter come first. Each step adds the number of its prompt tokens to the counters of the
    clients that sent the prompts.

    If a client sends a prompt after a time without prompts, its counter becomes at least the lowest counter of the
    clients that have prompts. Without this rule, an absent client could save up turns.

    The counters follow the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024.
    Only prompt tokens are counted. Decodes need no counter, because every decoding sequence has a row in each step.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._present: frozenset[str] = frozenset()

    def ordered(self, prompts: Collection[Sequence]) -> list[Sequence]:
        """Return the prompts in the order in which to compute them.

        Prompts of one client and of equal priority keep their order of arrival. If two clients have equal counters, the
        client whose first prompt has fewer uncomputed tokens comes first.
        """
        if not prompts:
            self._tokens, self._present = {}, frozenset()  # no client waits for another
            return []
        lengths: dict[str, int] = {}
        for sequence in sorted(prompts, key=lambda s: s.order):
            lengths.setdefault(sequence.client, sequence.num_uncomputed_tokens)
        stayed = [self._tokens[client] for client in lengths if client in self._present]
        known = [self._tokens[client] for client in lengths if client in self._tokens]
        least = min(stayed or known, default=0)
        absent = [(client, n) for client, n in self._tokens.items() if client not in lengths and n > least]
        present = {client: max(self._tokens.get(client, least), least) for client in lengths}
        self._tokens, self._present = dict(absent[-_MAX_ABSENT:]) | present, frozenset(lengths)
        return sorted(prompts, key=lambda s: (s.rank, self._tokens[s.client], lengths[s.client], s.order))

    def took(self, rows: Iterable[Row]) -> None:
        """Add the prompt tokens of a launched step to the counters of the clients. `rows` are the rows of the step."""
        for row in rows:
            if row.length > 1:
                client = row.sequence.client
                self._tokens[client] = self._tokens.get(client, 0) + row.length


def plan_step(
    running: list[Sequence],
    buckets: Buckets,
    turns: PromptTurns,
    pace: Pace,
    *,
    prompt_logits_turn: bool,
) -> StepPlan | None:
    """Plan the next step of an instance with one lane. Return None if there is nothing to compute.

    Usually, the step has a row for every decoding sequence, and rows for up to four prompts. The first prompt in the
    order of `turns` determines the size of the chunks. Other prompts join if a step shape has room for them.

    Prompt tokens delay the decoding sequences of a step. A decoding sequence is protected if it has a higher priority
    (a lower `Sequence.rank`) than the first prompt, or the same priority and another client. If any decoding sequence
    is protected, the prompt tokens may take at most as long as two decode steps. One chunk of the smallest size is
    always allowed.

    Args:
        running: running sequences of the lane. They must already have pages for the step.
        buckets: step shapes of the instance.
        turns: order of the prompts.
        pace: durations of recent steps. These durations tell how much time prompt tokens take.
        prompt_logits_turn: whether a prompt with requested log-probabilities comes first. The steps of such a prompt
            have no other rows, because they compute logits at all positions. If False, such a prompt is computed only
            if there is nothing else to compute. The caller should alternate between True and False.
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
    """Yield steps that can replace the best step (`plan_step`) while programs of the best step are missing.

    The steps come in three groups: first steps for all sequences, then steps without sequences that need the sampler
    `full`, then steps with only those sequences that need the sampler `greedy` (`sampler_kind`).

    Each group has the same order: steps with a prompt, steps that decode every decoding sequence, and steps that decode
    only some decoding sequences. No step computes log-probabilities of a prompt.
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
    """Return plans whose step shapes have room for as many sequences as possible.

    The caller compiles programs for these shapes. The plans have no rows. With a prompt to compute, there are two
    plans: for decodes and one prompt, and for decodes only. Without a prompt, there is one plan: for decodes only.
    """
    prompts = [s for s in _active(running) if s.num_uncomputed_tokens > 1 and not s.needs_prompt_logits]
    decodes = StepPlan(buckets.step(buckets.max_num_seqs), ())
    if not prompts:
        return [decodes]
    mixed = buckets.step(buckets.mixed_rows[-1] - 1, 1, buckets.chunk_size(prompts[0].num_uncomputed_tokens))
    return [StepPlan(mixed, ()), decodes]


def lane_plans(lanes: list[Lane], buckets: Buckets, turns: PromptTurns, *, prompt_turn: bool) -> Iterator[StepPlan]:
    """Yield possible next steps of an instance with several lanes, the best step first.

    If programs of the best step are missing, the caller can launch one of the other steps.

    Args:
        lanes: lanes of the instance.
        buckets: step shapes for the sequences of one lane (`Instance.lane_buckets`).
        turns: order of the prompts.
        prompt_turn: whether steps with a prompt come first. If False, steps that decode come first. The caller should
            alternate between True and False.
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
    for plans in (prompt_plans, decode_plans) if prompt_turn else (decode_plans, prompt_plans):
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
    """Return the index of the first prompt row in a step of this shape. All earlier rows are decodes or padding."""
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
    """Return the number of tokens of a sequence that prompt steps must still compute.

    After a preemption, generated tokens count too, because their keys and values must be computed again. If
    log-probabilities of the prompt are still needed, only prompt tokens count.
    """
    if sequence.needs_prompt_logits:
        return len(sequence.prompt) - sequence.num_computed
    return sequence.num_uncomputed_tokens


def _prompt_step(sequence: Sequence, chunk: int, buckets: Buckets, lane: int | None = None) -> StepPlan:
    """Return a step that computes only one chunk of one prompt. `chunk` is the size of the chunk in tokens.

    If the sequence needs log-probabilities of the prompt, the step computes logits of all tokens of the chunk.
    Otherwise, the step computes logits of the last token only.
    """
    shape = buckets.step(0, 1, chunk)
    row = Row(_first_prompt_row(shape), sequence, sequence.num_computed, min(_prompt_left(sequence), chunk))
    return StepPlan(shape, (row,), "all" if sequence.needs_prompt_logits else "last", lane)


def _prompt_plans(sequence: Sequence, lane: int, buckets: Buckets) -> Iterator[StepPlan]:
    """Yield steps that compute one chunk of a prompt. The step with the best chunk size comes first.

    `lane` is the index of the sequence's lane.
    """
    best = buckets.chunk_size(_prompt_left(sequence))
    sizes = buckets.prompt_logits_chunks if sequence.needs_prompt_logits else buckets.chunk_sizes
    for chunk in sorted(sizes, key=lambda size: (size < best, abs(size - best))):
        yield _prompt_step(sequence, chunk, buckets, lane)


def _lane_decode_plans(decodes: list[list[Sequence]], buckets: Buckets) -> Iterator[StepPlan]:
    """Yield steps that decode all decoding sequences of all lanes. The step with the fewest rows comes first.

    `decodes` lists the decoding sequences of each lane. If only one lane has decoding sequences, the steps have rows of
    this lane only.
    """
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
