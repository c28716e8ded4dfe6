"""Order of prompts among clients, and the size of a chunk beside decoding requests."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amoeba_jax import SamplingParams
from amoeba_jax.instances.batcher import PromptTurns, plan_step
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepPlan
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.sampling.rows import sampling_row

BUCKETS = Buckets(max_num_seqs=8, max_num_batched_tokens=512, table_width=1)


def sequence(client: str, number: int, left: int = 300, *, priority: int = 0, beyond: bool = False) -> Sequence:
    """Return a sequence with `left` tokens to compute. If `left` is 1, the sequence decodes."""
    params = SamplingParams(temperature=0, max_tokens=8, priority=priority)
    made = Sequence(
        str(number), (1,) * left, params, sampling_row(params, 0, 211, ()), print, number=number, client=client
    )
    made.beyond_share = beyond
    return made


def plan(running: list[Sequence], turns: PromptTurns | None = None, tokens_in_a_step: float = math.inf) -> StepPlan:
    pace = Pace()
    if tokens_in_a_step < math.inf:
        pace.take(0.0, 1.0, True)
        pace.take(1.0, 2.0, False, prompt_tokens=int(tokens_in_a_step))
        assert pace.prompt_tokens_in_a_step == tokens_in_a_step
    found = plan_step(running, BUCKETS, turns or PromptTurns(), pace, prompt_logits_turn=False)
    assert found is not None
    return found


def prompts(step: StepPlan) -> list[tuple[str, int]]:
    """Return the requests of a step's prompts, and the number of computed tokens of each."""
    return [(row.sequence.request_id, row.length) for row in step.rows if row.length > 1]


def test_a_short_prompt_waits_for_one_step_of_another_client_and_not_for_all_of_its_prompts():
    turns, long = PromptTurns(), [sequence("red", number, 2000) for number in range(4)]
    first = plan(long, turns)
    assert prompts(first) == [("0", 512)]
    turns.took(first.rows)
    second = plan([*long, sequence("blue", 9, 14)], turns)
    assert prompts(second)[0] == ("9", 14)


def test_prompts_of_one_client_come_as_they_did():
    running = [sequence("red", number, 100 - number) for number in range(3)]
    assert [s.number for s in PromptTurns().ordered(running[::-1])] == [0, 1, 2]


def test_what_ranks_first_goes_first_whoever_has_had_least():
    turns = PromptTurns()
    turns.took([Row(0, sequence("red", 0), 0, 500)])
    running = [sequence("blue", 1, beyond=True), sequence("red", 2), sequence("red", 3, priority=-1)]
    assert [s.number for s in turns.ordered(running)] == [3, 2, 1]


@given(lengths=st.dictionaries(st.sampled_from("abcd"), st.integers(2, 512), min_size=2), steps=st.integers(1, 60))
def test_clients_that_always_have_prompts_get_as_many_tokens(lengths: dict[str, int], steps: int):
    turns, computed = PromptTurns(), Counter(dict.fromkeys(lengths, 0))
    for number in range(steps):
        first = turns.ordered([sequence(client, number, length) for client, length in lengths.items()])[0]
        turns.took([Row(0, first, 0, first.num_uncomputed_tokens)])
        computed[first.client] += first.num_uncomputed_tokens
    assert max(computed.values()) - min(computed.values()) <= max(lengths.values())


@given(absent=st.integers(0, 5000), short=st.integers(2, 100))
def test_who_comes_back_has_saved_nothing_and_is_not_let_in_again_and_again(absent: int, short: int):
    """`blue` sends one short prompt at a time. `red` is served in between, with as many tokens."""
    turns, red, computed = PromptTurns(), sequence("red", 0, 512), Counter()
    turns.took([Row(0, sequence("blue", 1), 0, 10)])
    for _ in range(absent // 512):
        turns.ordered([red])
        turns.took([Row(0, red, 0, 512)])
    for number in range(2, 60):
        blue = sequence("blue", number, short)
        waited = 0
        while (first := turns.ordered([red, blue])[0]) is red:
            turns.took([Row(0, red, 0, 512)])
            computed["red"] += 512
            waited += 1
        assert waited <= 1
        turns.took([Row(0, first, 0, short)])
        computed["blue"] += short
        assert computed["blue"] - computed["red"] <= short + 10
        turns.ordered([red])  # while `blue` is away


def test_prompts_whose_log_probabilities_are_wanted_take_turns_by_client_too():
    turns, params = PromptTurns(), SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)
    turns.took([Row(0, sequence("red", 0), 0, 100)])
    with_logprobs = sequence("blue", 1)
    with_logprobs.params = params
    assert with_logprobs.needs_prompt_logits
    running = [sequence("red", 0), with_logprobs]
    for turn, expected in ((True, "1"), (False, "0")):
        step = plan_step(running, BUCKETS, turns, Pace(), prompt_logits_turn=turn)
        assert step is not None
        assert [row.sequence.request_id for row in step.rows] == [expected]


def test_clients_that_are_gone_are_forgotten():
    turns = PromptTurns()
    for number in range(100):
        gone = sequence(f"client {number}", number, 10)
        turns.ordered([gone])
        turns.took([Row(0, gone, 0, 10)])
    last = sequence("last", 100)
    for _ in range(2):
        turns.ordered([last])
        turns.took([Row(0, last, 0, 10)])
    turns.ordered([last])
    assert len(turns._tokens) == 1


def test_what_is_remembered_of_clients_has_a_limit():
    """Clients that come one after the other are forgotten. While a request waits, the latest clients are kept."""
    turns = PromptTurns()
    for number in range(1000):
        one = sequence(f"client {number}", number, 10)
        turns.ordered([one])
        turns.took([Row(0, one, 0, 10)])
        turns.ordered([])
    assert not turns._tokens
    waiting = sequence("waiting", 0, beyond=True)
    for number in range(1000):
        one = sequence(f"client {number}", number, 10)
        assert turns.ordered([waiting, one])[0] is one
        turns.took([Row(0, one, 0, 10)])
    turns.ordered([waiting])
    assert len(turns._tokens) <= 257
    assert turns._tokens["client 999"] == 10


@pytest.mark.parametrize(
    ("decoding", "prompt", "held"),
    [
        (sequence("blue", 0, 1), sequence("red", 1), True),
        (sequence("red", 0, 1), sequence("red", 1), False),
        (sequence("red", 0, 1), sequence("red", 1, beyond=True), True),
        (sequence("red", 0, 1, priority=-1), sequence("red", 1), True),
        (sequence("blue", 0, 1), sequence("red", 1, priority=-1), False),
        (sequence("blue", 0, 1, beyond=True), sequence("red", 1), False),
    ],
    ids=["another client", "its own", "beyond its share", "urgent", "an urgent prompt", "the other beyond its share"],
)
def test_a_prompt_holds_up_others_by_no_more_than_two_steps(decoding: Sequence, prompt: Sequence, held: bool):
    for tokens_in_a_step, chunk in ((math.inf, 300), (256.0, 300), (255.0, 128), (40.0, 32), (1.0, 32)):
        step = plan([decoding, prompt], tokens_in_a_step=tokens_in_a_step)
        assert prompts(step) == [("1", chunk if held else 300)]


def test_several_prompts_together_hold_up_others_by_no_more_than_two_steps():
    running = [sequence("blue", 0, 1), *(sequence("red", number, 30) for number in range(1, 5))]
    assert len(prompts(plan(running, tokens_in_a_step=64.0))) == 4
    assert len(prompts(plan(running, tokens_in_a_step=63.0))) == 1


def test_prompt_tokens_in_a_step_are_known_from_what_prompts_added_to_steps():
    pace = Pace()
    pace.take(0.0, 1.0, False, prompt_tokens=100)
    assert pace.prompt_tokens_in_a_step == math.inf, "no decode step was seen"
    pace = Pace()
    pace.take(0.0, 1.0, True)
    assert pace.prompt_tokens_in_a_step == math.inf, "no prompt was seen"
    pace.take(1.0, 4.0, False, prompt_tokens=100, beside_decodes=True)  # 2 s more than decodes take
    assert pace.prompt_tokens_in_a_step == 50.0
    pace.take(4.0, 8.0, False, prompt_tokens=300)  # alone: all of 4 s
    assert pace.prompt_tokens_in_a_step == pytest.approx(400 / 6)
    pace = Pace()
    pace.take(0.0, 1.0, True)
    pace.take(1.0, 1.5, False, prompt_tokens=100, beside_decodes=True)
    assert pace.prompt_tokens_in_a_step == math.inf, "they cost nothing"
