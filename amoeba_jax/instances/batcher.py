"""Choice of the next step of an instance.

A step is one pass through the model. Each row of a step belongs to one sequence, and has either one token of a decoding
sequence or a chunk of a prompt. `plan_step` plans the steps of an instance with one lane, and `lane_plans` plans the
steps of an instance with several lanes.

With several lanes, a step either only decodes, or only computes a chunk of one prompt. A step that decodes has rows of
one lane only, or equally many rows for each lane. Instances with one lane use all these step shapes too. Therefore,
several lanes need no further compiled programs.
"""

import math
from collections.abc import Collection, Iterable, Iterator

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets

# If a decoding sequence is protected (`plan_step`), the prompt tokens of a step take at most as long as this number of
# decode steps. With 1, prompts would wait longer on accelerators, where a decode step takes about as long as 512 prompt
# tokens.
_STEPS_OF_PROMPT = 2

# Maximum number of clients without prompts whose counters are kept. All counters are dropped only when no prompt waits,
# and a prompt may wait for a long time behind prompts of a higher priority.
_MAX_ABSENT = 256


class PromptTurns:
    """Order in which steps compute the prompts of an instance.

    Prompts of a higher priority (a lower `Sequence.rank`) come first. Among prompts of equal priority, prompts of the
    client with the lowest counter come first. The counter of a client is the number of the client's prompt tokens that
    steps have computed.

    If a client had no prompts for some time and then sends a prompt, its counter is raised to at least the lowest
    counter of the clients that already have prompts. Without this rule, a client without prompts could save up turns.

    The counters follow the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024.
    Decoded tokens are not counted, because every decoding sequence has a row in each step.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._present: frozenset[str] = frozenset()

    def ordered(self, prompts: Collection[Sequence]) -> list[Sequence]:
        """Return the prompts in the order in which steps should compute them.

        `prompts` must have all sequences of the instance with a prompt to compute, because the call also updates the
        counters. Prompts of one client with equal priority stay in the order of arrival. If two clients have equal
        counters, the client whose first prompt has fewer uncomputed tokens comes first.
        """
        if not prompts:
            self._tokens, self._present = {}, frozenset()  # no prompt waits, so all clients are equal again
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
        """Add the prompt tokens of a launched step to the counters of the clients. `rows` has all rows of the step."""
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

    Usually, the step has a row for every decoding sequence, and chunks of up to four prompts. The first prompt in the
    order of `turns` determines the size of all chunks. Further prompts are added if a step shape has room for them.

    Prompt tokens make the step slower for its decoding sequences. A decoding sequence is protected if its priority
    (`Sequence.rank`) is higher than the priority of the first prompt. A decoding sequence is also protected if these
    two priorities are equal and the two clients differ. If any decoding sequence is protected, the prompt tokens may
    take at most as long as two decode steps. Even then, one chunk of the smallest size is allowed.

    Args:
        running: running sequences of the lane. Each sequence must already have pages for all its tokens.
        buckets: step shapes of the instance.
        turns: order of the prompts.
        pace: durations of recent steps, from which the duration of prompt tokens is estimated.
        prompt_logits_turn: whether to prefer a prompt whose log-probabilities are requested. A step with this kind of
            prompt has only one row, because the step computes logits at all positions. If False, this kind of prompt is
            computed only if there is nothing else to compute. The caller should alternate between True and False.
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
    """Yield steps that the caller can launch while programs of the best step (`plan_step`) are not compiled yet.

    The steps come in three groups, by the samplers that their sequences need (`SamplingRow.kind`). The first group is
    for all sequences. The second group is for sequences that need `greedy` or `sample`. The third group is for
    sequences that need `greedy`.

    Each group has the same order: first steps with a prompt, then steps that decode all decoding sequences of the
    group, then steps that decode only some decoding sequences. No step computes log-probabilities of a prompt.
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
    """Return plans whose step shapes have room for as many sequences as possible. The plans have no rows.

    The caller compiles the programs of these plans, and does not launch the plans. If any sequence has a prompt to
    compute, return two plans: the first for decodes and one prompt, the second for decodes only. If no sequence has a
    prompt to compute, return one plan, for decodes only.
    """
    prompts = [s for s in _active(running) if s.num_uncomputed_tokens > 1 and not s.needs_prompt_logits]
    decodes = StepPlan(buckets.step(buckets.max_num_seqs), ())
    if not prompts:
        return [decodes]
    mixed = buckets.step(buckets.mixed_rows[-1] - 1, 1, buckets.chunk_size(prompts[0].num_uncomputed_tokens))
    return [StepPlan(mixed, ()), decodes]


def lane_plans(lanes: list[Lane], buckets: Buckets, turns: PromptTurns, *, prompt_turn: bool) -> Iterator[StepPlan]:
    """Yield possible next steps of an instance with several lanes, the best step first.

    If programs of the best step are not compiled yet, the caller can launch one of the other steps.

    Args:
        lanes: lanes of the instance.
        buckets: step shapes for batches with sequences of one lane (`Instance.lane_buckets`).
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
    """Return the index of the first row with a prompt in a step of this shape. Earlier rows are decodes or padding."""
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
        for shape in sorted(mixed, key=lambda s: s.num_tokens):  # the prompt rows of these steps are padding
            yield _plan(shape, decodes, [])
        for rows in (rows for rows in reversed(sizes) if rows < len(decodes)):
            yield _plan(buckets.step(rows), decodes[:rows], [])


def _prompt_left(sequence: Sequence) -> int:
    """Return the number of tokens of a sequence that are left to compute in prompt chunks.

    As long as log-probabilities of the prompt are needed, a chunk has only prompt tokens: only uncomputed prompt tokens
    count. Otherwise, all uncomputed tokens count. After a preemption, generated tokens are uncomputed too.
    """
    if sequence.needs_prompt_logits:
        return len(sequence.prompt) - sequence.num_computed
    return sequence.num_uncomputed_tokens


def _prompt_step(sequence: Sequence, chunk: int, buckets: Buckets, lane: int | None = None) -> StepPlan:
    """Return a step that computes only one chunk of one prompt. `chunk` is the size of the chunk in tokens.

    If the sequence needs log-probabilities of the prompt, the step computes logits of all tokens of the chunk. If not,
    the step computes logits of only the last token of the chunk.
    """
    shape = buckets.step(0, 1, chunk)
    row = Row(_first_prompt_row(shape), sequence, sequence.num_computed, min(_prompt_left(sequence), chunk))
    return StepPlan(shape, (row,), "all" if sequence.needs_prompt_logits else "last", lane)


def _prompt_plans(sequence: Sequence, lane: int, buckets: Buckets) -> Iterator[StepPlan]:
    """Yield alternatives for the next step. Each alternative computes only one chunk of a sequence's prompt.

    The alternatives differ in the chunk size. The size that `Buckets.chunk_size` returns comes first. Larger sizes
    follow in ascending order, then smaller sizes in descending order. `lane` is the index of the sequence's lane.
    """
    best = buckets.chunk_size(_prompt_left(sequence))
    sizes = buckets.prompt_logits_chunks if sequence.needs_prompt_logits else buckets.chunk_sizes
    for chunk in sorted(sizes, key=lambda size: (size < best, abs(size - best))):
        yield _prompt_step(sequence, chunk, buckets, lane)


def _lane_decode_plans(decodes: list[list[Sequence]], buckets: Buckets) -> Iterator[StepPlan]:
    """Yield alternatives for the next step. Each alternative decodes all decoding sequences of all lanes.

    The alternatives differ only in the number of padding rows. The alternative with the fewest padding rows comes
    first. If only one lane has decoding sequences, all rows are for this lane. Otherwise, each lane has equally many
    rows, with padding. `decodes` has a list of decoding sequences for each lane.
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
