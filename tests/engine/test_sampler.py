"""The sampler against float64 NumPy: exact distributions, and the exact token for the noise of a seed and a position.

Seeds are fixed or hypothesis's own: nothing is left to chance.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_cases import (
    GREEDY,
    ROWS,
    SLOTS,
    VOCABULARY,
    Case,
    State,
    expected_token,
    filtered,
    gumbel,
    jit_draw,
    jit_draw_full,
    logprobs_of,
    processed,
    random_logits,
    sample,
    sample_full,
)

from amoeba_jax import SamplingParams
from amoeba_jax.engine.sampler import _gumbel
from amoeba_jax.engine.sampling import MAX_LOGPROBS, NO_SLOT, pack, state_rows


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Exactly the possible tokens occur, as often as they should: Pearson's statistic within 6 sigma."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    possible = probabilities > 0
    assert expected[possible].min() > 5, "the test draws too few"
    assert set(np.nonzero(counts)[0]) == set(np.nonzero(possible)[0])
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic <= freedom + 6 * np.sqrt(2 * freedom) + 6


DRAWS = 20000


def flat_logits(seed: int) -> np.ndarray:
    """Twelve tokens of which none is too rare to turn up in thousands of draws."""
    return np.clip(np.random.default_rng(seed).standard_normal(12), -1.5, 1.5).astype(np.float32)


def draw_many(logits: np.ndarray, params: SamplingParams | list[SamplingParams], seeds=0) -> np.ndarray:
    """`DRAWS` tokens of one row's logits, at positions of their own."""
    return sample(np.broadcast_to(logits, (DRAWS, len(logits))), params, seeds, np.arange(DRAWS))


# Drawing.


@pytest.mark.parametrize("vocabulary", [1, 64, 5000])
def test_temperature_zero_takes_the_likeliest(vocabulary: int):
    logits = random_logits(12, vocabulary)
    np.testing.assert_array_equal(sample(logits, GREEDY), logits.argmax(-1))
    # Other settings do not matter then.
    params = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1)
    np.testing.assert_array_equal(sample(logits, params, 7, 3), logits.argmax(-1))


def test_greedy_rows_stay_greedy_beside_drawn_ones():
    logits = random_logits()
    tokens = sample(logits, [GREEDY, SamplingParams(temperature=5.0)] * 256, np.arange(512))
    np.testing.assert_array_equal(tokens[::2], logits.argmax(-1)[::2])
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).any()


def test_greedy_ties_go_to_the_first_token():
    logits = np.round(random_logits())
    np.testing.assert_array_equal(sample(logits, GREEDY), logits.argmax(-1))


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-44}, {"min_p": 1.0}], ids=str)
def test_filters_at_their_tightest_leave_the_likeliest(setting: dict):
    logits = random_logits()
    tokens = sample(logits, SamplingParams(temperature=3.0, **setting), np.arange(512))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("setting", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.1}], ids=str)
def test_filters_keep_tokens_as_likely_as_the_last_one_kept(setting: dict):
    logits = np.array([0.0, 2.0, 1.0, 2.0, 2.0, 1.0, 0.0, 2.0, -1.0, -np.inf, 0.0, 1.0], np.float32)
    tokens = draw_many(logits, SamplingParams(**setting))
    assert_follows(tokens, (logits == 2) / 4)


@pytest.mark.parametrize("top_k", [-1, 0, 64, 1000])
def test_top_k_of_all_changes_nothing(top_k: int):
    logits, seeds = random_logits(), np.arange(512)
    tokens = sample(logits, SamplingParams(top_k=top_k), seeds)
    np.testing.assert_array_equal(tokens, sample(logits, SamplingParams(), seeds))


@pytest.mark.parametrize("vocabulary", [200, 2080])
def test_every_top_k_by_every_way_to_it(vocabulary: int):
    """Small ones, those of which a batch has a larger one, and larger ones, of vocabularies of few and many blocks."""
    logits, seeds = random_logits(12, vocabulary, seed=3), range(12)
    larger = [1, 2, 63, 64, 65, 66, 100, 128, vocabulary - 2, vocabulary - 1, vocabulary, vocabulary + 1]
    for top_ks in ([1, 2, 3, 5, 8, 63, 64, 10, 20, 30, 40, 50], larger):
        params = [SamplingParams(top_k=k, temperature=30.0) for k in top_ks]
        tokens = sample(logits, params, list(seeds))
        for row, k in enumerate(top_ks):
            kept = logits[row] >= np.sort(logits[row])[::-1][min(k, vocabulary) - 1]
            scores = np.where(kept, logits[row].astype(np.float64) / 30 + gumbel(row, 0, vocabulary), -np.inf)
            assert tokens[row] == scores.argmax(), f"top_k={k}"


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_tokens_follow_the_softmax_over_seeds(temperature: float):
    logits, params = flat_logits(seed=1), SamplingParams(temperature=temperature)
    tokens = sample(np.broadcast_to(logits, (DRAWS, 12)), params, np.arange(DRAWS), positions=5)
    assert_follows(tokens, filtered(logits, params))


def test_tokens_follow_the_softmax_over_the_positions_of_one_request():
    logits, params = flat_logits(seed=2) / 2, SamplingParams()
    tokens = draw_many(logits, params, seeds=1234)
    p = filtered(logits, params)
    assert_follows(tokens, p)
    # Successive tokens are independent.
    assert_follows((tokens[:-1] * 12 + tokens[1:])[::2], np.outer(p, p).ravel())


FILTERS = [
    {"top_k": 3},
    {"top_k": 9, "temperature": 0.5},
    {"top_p": 0.3},
    {"top_p": 0.75},
    {"top_p": 0.97, "temperature": 2.0},
    {"min_p": 0.2},
    {"min_p": 0.5, "temperature": 1.5},
    {"top_k": 5, "top_p": 0.8},  # 0.8 of the five, not of all
    {"top_k": 4, "top_p": 0.55, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.25},  # 0.9 of what min-p leaves
    {"top_k": 6, "top_p": 0.9, "min_p": 0.15, "temperature": 1.3},
]


@pytest.mark.parametrize("setting", FILTERS, ids=str)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_filtered_tokens_follow_the_filtered_distribution(setting: dict, seed: int):
    logits, params = flat_logits(seed), SamplingParams(**setting)
    assert_follows(draw_many(logits, params, seed), filtered(logits, params))


def test_filters_of_different_rows_do_not_mix():
    logits, settings = flat_logits(seed=6), [SamplingParams(**setting) for setting in FILTERS]
    tokens = draw_many(logits, [settings[row % len(settings)] for row in range(DRAWS)])
    for index, params in enumerate(settings):
        assert_follows(tokens[index :: len(settings)], filtered(logits, params))


def test_noise_is_that_of_jax_random():
    seeds, positions = np.array([0, 1, 2**31, 2**32 - 1]), np.array([0, 7, 131071, 2**31 - 1], np.int32)
    packed_seeds = jnp.asarray(seeds.astype(np.uint32).view(np.int32))
    noise = np.asarray(jax.jit(_gumbel, static_argnums=2)(packed_seeds, jnp.asarray(positions), 5000))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        np.testing.assert_allclose(noise[:, row], gumbel(seed, position, 5000), rtol=1e-6, atol=1e-6)


def test_seed_and_position_both_matter():
    logits, rows, params = np.zeros((512, 64), np.float32), np.arange(512), SamplingParams()
    base = sample(logits, params, rows, 7)
    np.testing.assert_array_equal(base, sample(logits, params, rows, 7))
    assert (base != sample(logits, params, rows, 8)).mean() > 0.9
    assert (base != sample(logits, params, rows + 512, 7)).mean() > 0.9
    assert (base != sample(logits, params, 7, rows)).mean() > 0.9, "they are not interchangeable"


def test_all_32_bits_of_a_seed_count():
    seeds = [1, 1 + 2**16, 1 + 2**31, 2**32 - 1] * 3
    tokens = sample(np.zeros((12, 5000), np.float32), SamplingParams(), seeds)
    assert len(set(tokens.tolist())) == 4


def test_shifting_all_logits_changes_nothing():
    logits, seeds, params = np.round(4 * random_logits()) / 4, np.arange(512), SamplingParams(top_p=0.9)
    np.testing.assert_array_equal(sample(logits + 64, params, seeds), sample(logits, params, seeds))


@pytest.mark.parametrize("temperature", [1e-20, 1e-37, 1e-45, 1e-60])
def test_tiny_temperature_is_greedy(temperature: float):
    """Any temperature above 0 is allowed: dividing logits by a tiny one must not overflow."""
    logits = random_logits()
    tokens = sample(logits, SamplingParams(temperature=temperature, top_p=0.9), np.arange(512))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_huge_temperature_is_uniform():
    assert_follows(draw_many(flat_logits(seed=7), SamplingParams(temperature=3e38)), np.full(12, 1 / 12))


def test_impossible_tokens_never_come():
    logits = flat_logits(seed=8)
    logits[[0, 5, 11]] = -np.inf
    params = SamplingParams(temperature=1e30)
    assert_follows(draw_many(logits, params), np.isfinite(logits) / 9)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_broken_logits_still_give_a_token_and_harm_no_other_row(broken: float, whole_row: bool):
    logits = random_logits()
    whole = sample(logits, SamplingParams(top_p=0.9, top_k=20), np.arange(512))
    logits[0, :: 1 if whole_row else 9] = broken
    tokens = sample(logits, SamplingParams(top_p=0.9, top_k=20), np.arange(512))
    assert 0 <= tokens[0] < VOCABULARY
    np.testing.assert_array_equal(tokens[1:], whole[1:])
    case = Case(SamplingParams(repetition_penalty=1.5, logprobs=3), prompt=[1])
    assert 0 <= sample_full(logits[:ROWS], [case])[0] < VOCABULARY


@pytest.mark.parametrize("vocabulary", [64, 5000])
def test_row_gets_the_same_token_whatever_its_batch_and_place(vocabulary: int):
    rows, random = 12, np.random.default_rng(8)
    logits = random_logits(rows, vocabulary, seed=8)
    params = [
        SamplingParams(
            temperature=random.choice([0.0, 0.7, 1.0, 2.0]),
            top_k=random.choice([0, 5, 40, 200]),
            top_p=random.choice([0.6, 0.9, 1.0]),
            min_p=random.choice([0.0, 0.05]),
        )
        for _ in range(rows)
    ]
    seeds, positions = random.integers(0, 2**32, rows), random.integers(0, 4096, rows)

    def at(index: np.ndarray) -> np.ndarray:
        return sample(logits[index], [params[i] for i in index], seeds[index], positions[index])

    whole = at(np.arange(rows))
    for row in range(rows):
        assert at(np.array([row])) == whole[row], "alone"
    for _ in range(5):
        order = random.permutation(rows)
        np.testing.assert_array_equal(at(order), whole[order])
    large = random.integers(0, rows, 512)
    np.testing.assert_array_equal(at(large), whole[large])
    # Through the other program too.
    cases = [
        Case(p, prompt=[0] * n, seed=s) for p, s, n in zip(params, seeds.tolist(), positions.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(sample_full(logits, cases), whole)


# All options.

few_tokens = st.integers(0, 7)
optional = st.sampled_from


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = 16
    return SamplingParams(
        temperature=draw(optional([0.0, 0.5, 1.0, 1.7])),
        top_p=draw(optional([1.0, 0.37, 0.83])),
        top_k=draw(optional([0, 1, 4, 30])),
        min_p=draw(optional([0.0, 0.013, 0.21])),
        presence_penalty=draw(optional([0.0, -1.3, 2.0])),
        frequency_penalty=draw(optional([0.0, -0.7, 1.1])),
        repetition_penalty=draw(optional([1.0, 0.6, 1.9])),
        stop_token_ids=draw(st.lists(few_tokens, max_size=2)),
        ignore_eos=draw(st.booleans()),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 8)),
        logprobs=draw(optional([None, 0, 5])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)),
    )


sequences = st.builds(
    Case,
    params=sampling_params(),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    output=st.lists(few_tokens, max_size=8),
    words=st.lists(st.lists(few_tokens, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=300, deadline=None)
@given(cases=st.lists(sequences, min_size=1, max_size=ROWS), logits_seed=st.integers(0, 2**31))
def test_any_options_together_give_the_expected_token(cases: list[Case], logits_seed: int):
    logits = random_logits(ROWS, seed=logits_seed)
    tokens = sample_full(logits, cases)
    for token, row, case in zip(tokens, logits, cases, strict=False):
        try:
            expected = expected_token(row, case)
        except AssertionError:
            continue
        assert token == expected, case


@settings(max_examples=100, deadline=None)
@given(case=sequences, logits_seed=st.integers(0, 2**31))
def test_token_in_flight_makes_no_difference(case: Case, logits_seed: int):
    """The host decides by the last token, or the device does: the same comes of it."""
    assume(case.output)
    logits = random_logits(ROWS, seed=logits_seed)
    known = sample_full(logits, [case])
    case.in_flight = True
    assert sample_full(logits, [case]) == known


@settings(max_examples=100, deadline=None)
@given(cases=st.lists(sequences, min_size=2, max_size=ROWS), logits_seed=st.integers(0, 2**31))
def test_rows_with_options_do_not_touch_each_other(cases: list[Case], logits_seed: int):
    logits = random_logits(ROWS, seed=logits_seed)
    together = sample_full(logits, cases)
    for row, case in enumerate(cases):
        assert sample_full(np.roll(logits, -row, axis=0), [case]) == together[row]


OPTIONS = {
    "repetition": Case(SamplingParams(repetition_penalty=1.5), prompt=[0, 4], output=[11]),
    "presence": Case(SamplingParams(presence_penalty=1.0), prompt=[0, 1], output=[4, 11, 11]),
    "frequency": Case(SamplingParams(frequency_penalty=0.5), prompt=[0, 1], output=[4, 11, 11]),
    "bias": Case(SamplingParams(logit_bias={4: 1, 5: -0.5})),
    "allowed": Case(SamplingParams(allowed_token_ids=[1, 4, 7, 9])),
    "min_tokens": Case(SamplingParams(min_tokens=3, stop_token_ids=[7]), output=[1, 1]),
    "bad words": Case(SamplingParams(), output=[1, 2], words=((6,), (2, 3), (1, 2, 4), (2, 2, 5))),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_changes_the_distribution_as_it_should(option: str):
    case, logits = OPTIONS[option], flat_logits(seed=9)
    reference = filtered(processed(logits, case), SamplingParams())
    assert np.abs(reference - filtered(logits, SamplingParams())).max() > 0.02, "the option does nothing here"
    state = State(12)
    state.admit(case)
    row, draws = case.row(12), 4000
    rows = [row._replace(position=position) for position in range(draws)]
    assert_follows(state.step(np.broadcast_to(logits, (draws, 12)), rows).tokens, reference)


def test_stop_tokens_wait_for_min_tokens():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    logits[:, [2, 5, 9, 20]] = 8, 7, 6, 5
    for ignore_eos in (False, True):
        params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[9], ignore_eos=ignore_eos)
        outputs = [[1] * count for count in range(5)]
        cases = [Case(params, output=output) for output in outputs]
        np.testing.assert_array_equal(sample_full(logits, cases), [20, 20, 20, 2, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_no_token_are_put_aside(temperature: float):
    """Here all that is allowed is a bad word or must wait."""
    logits = random_logits(ROWS)
    params = SamplingParams(temperature=temperature, allowed_token_ids=[2, 3], min_tokens=4)
    token = sample_full(logits, [Case(params, words=((3,),), seed=5)])
    assert token == sample_full(logits, [Case(SamplingParams(temperature=temperature), seed=5)])


def test_tiny_repetition_penalty_keeps_the_likeliest_apart():
    logits = np.full((ROWS, VOCABULARY), -1.0, np.float32)
    logits[0, 7] = 30
    params = SamplingParams(temperature=0, repetition_penalty=1.2e-38, allowed_token_ids=[6, 7])
    assert sample_full(logits, [Case(params, prompt=[6, 7])]) == 7


# State.


def test_device_counts_tokens_as_a_readmitted_sequence_would():
    params = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.2)
    logits = np.round(random_logits(ROWS, seed=4))
    case, state = Case(params, prompt=[3, 9], slot=4), State()
    state.admit(case)
    for _ in range(12):
        token = int(state.step(logits, [case.row()]).tokens[0])
        case.output = [*case.output, token]
        flags, bias = state_rows(case.row().row, case.prompt, case.output)
        np.testing.assert_array_equal(state.flags[4], flags)
        np.testing.assert_array_equal(state.bias[4], bias)
        assert state.last_tokens[4] == token
    assert max(case.output.count(token) for token in case.output) < 12, "penalties had an effect"


def test_only_rows_that_use_state_touch_it_and_only_their_own():
    state = State()
    counted, uncounted = Case(SamplingParams(temperature=0, presence_penalty=1), slot=3), Case(GREEDY, slot=5)
    unrecorded = Case(SamplingParams(temperature=0, presence_penalty=1), slot=SLOTS)
    state.admit(counted)
    flags, bias, last_tokens = (np.array(x) for x in (state.flags, state.bias, state.last_tokens))
    logits = random_logits(ROWS, seed=2)
    rows = [uncounted.row(), counted.row(), unrecorded.row(), unrecorded.row()._replace(slot=NO_SLOT)]
    result = state.step(logits, rows)
    np.testing.assert_array_equal(result.tokens[[0, 1, 4, 5, 6, 7]], logits.argmax(-1)[[0, 1, 4, 5, 6, 7]])
    token = result.tokens[1]
    flags[3, token] += 4
    last_tokens[3], last_tokens[5] = token, result.tokens[0]
    np.testing.assert_array_equal(state.flags, flags)
    np.testing.assert_array_equal(state.bias, bias)
    np.testing.assert_array_equal(state.last_tokens, last_tokens)


def test_draw_records_last_tokens_of_real_rows_only():
    logits = random_logits(ROWS, seed=2)
    rows = [Case(GREEDY, slot=7).row(), Case(GREEDY, slot=SLOTS).row(), Case(SamplingParams(), slot=0).row()]
    before = jnp.arange(100, 100 + SLOTS, dtype=jnp.int32)
    last_tokens, result = jit_draw(jnp.asarray(logits.T), before, jnp.asarray(pack(rows, ROWS)))
    expected = np.array(before)
    expected[[7, 0]] = result[0, 0], result[2, 0]
    np.testing.assert_array_equal(last_tokens, expected)


def test_rows_without_state_ignore_what_is_in_their_slot():
    logits = random_logits(ROWS)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=5), GREEDY, SamplingParams(logprobs=2)]
    cases = [Case(p, seed=index) for index, p in enumerate(params)]
    tokens = sample(logits, [*params, *[GREEDY] * 4], [0, 1, 2, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(sample_full(logits, cases), tokens[:4])
    # Beside a row that has state, which makes the program read it.
    cases.append(Case(SamplingParams(min_tokens=1)))
    np.testing.assert_array_equal(sample_full(logits, cases)[:4], tokens[:4])


def test_state_is_updated_in_place():
    vocabulary = 5000
    state = State(vocabulary)
    packed = jnp.asarray(pack([], ROWS, 8))
    x = jnp.zeros((vocabulary, ROWS))
    compiled = jit_draw_full.lower(x, state.last_tokens, state.flags, state.bias, packed).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= state.flags.nbytes
    copies = [
        line for line in compiled.as_text().splitlines() if f"s32[{SLOTS},{vocabulary}]" in line and " copy(" in line
    ]
    assert not copies


# Log-probabilities.


def exact_logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocabulary", [1, 5, 64])
def test_logprobs_are_those_of_the_logits_as_given(vocabulary: int):
    """Of masked, biased and heated rows too."""
    logits = random_logits(ROWS, vocabulary, seed=6)
    options = {"logprobs": 20, "temperature": 3.0, "logit_bias": {0: 5}, "min_tokens": 0}
    cases = [Case(SamplingParams(**options), seed=row, slot=row) for row in range(ROWS)]
    state = State(vocabulary)
    for case in cases:
        state.admit(case)
    tokens, logprobs = state.step(logits, [case.row(vocabulary) for case in cases])
    assert logprobs is not None
    expected = exact_logprobs(logits)
    chosen = np.take_along_axis(expected, tokens[:, None], 1)
    np.testing.assert_allclose(logprobs.logprob, chosen[:, 0], atol=1e-5)
    np.testing.assert_array_equal(logprobs.rank, (expected >= chosen).sum(-1))
    top = min(MAX_LOGPROBS, vocabulary)
    order = np.argsort(-expected, axis=-1)[:, :top]
    np.testing.assert_array_equal(logprobs.top_ids[:, :top], order)
    np.testing.assert_allclose(logprobs.top_logprobs[:, :top], np.take_along_axis(expected, order, 1), atol=1e-5)
    assert (logprobs.top_ids[:, top:] == -1).all()
    assert np.isneginf(logprobs.top_logprobs[:, top:]).all()


def test_logprobs_of_prompt_tokens():
    logits = random_logits(ROWS, seed=7)
    logits[0, 3:] = -np.inf
    logits[1] = 2.0
    targets = np.arange(ROWS, dtype=np.int32) * 5
    logprobs = logprobs_of(logits, targets)
    expected = exact_logprobs(logits)
    np.testing.assert_allclose(logprobs.logprob, expected[np.arange(ROWS), targets], atol=1e-5)
    np.testing.assert_allclose(logprobs.top_logprobs, -np.sort(-expected, axis=-1)[:, :MAX_LOGPROBS], atol=1e-5)
    assert logprobs.rank[1] == VOCABULARY, "all are as likely"
    np.testing.assert_allclose(logprobs.logprob[1], -math.log(VOCABULARY), atol=1e-6)
    assert (logprobs.top_ids >= 0).all()


def test_likeliest_of_many_tokens_are_in_the_order_of_their_ids_where_equal():
    logits = np.round(random_logits(ROWS, 5000, seed=8))
    logprobs = logprobs_of(logits, np.zeros(ROWS))
    order = np.argsort(-logits, axis=-1, kind="stable")
    np.testing.assert_array_equal(logprobs.top_ids, order[:, :MAX_LOGPROBS])
    expected = np.take_along_axis(exact_logprobs(logits), order[:, :MAX_LOGPROBS], 1)
    np.testing.assert_allclose(logprobs.top_logprobs, expected, atol=1e-5)
    np.testing.assert_array_equal(logprobs.rank, (logits >= logits[:, :1]).sum(-1))


def test_rows_that_want_no_logprobs_get_zeros():
    cases = [Case(SamplingParams(logprobs=0)), Case(SamplingParams())]
    logprobs = State().step(random_logits(ROWS), [case.row() for case in cases]).logprobs
    assert logprobs is not None
    assert logprobs.rank[0] > 0
    assert not any(np.any(field[1:].view(np.int32)) for field in logprobs)
