"""Penalties, masks, bias, bad words and filters together, against float64 NumPy that applies them one by one."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_cases import (
    EOS,
    ROWS,
    VOCABULARY,
    Case,
    State,
    assert_follows,
    expected_token,
    filtered,
    flat_logits,
    processed,
    random_logits,
    sample_full,
)

from amoeba_jax import SamplingParams

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


def is_served(case: Case) -> bool:
    """Return whether the settings leave a token. Other settings are refused."""
    params = case.params
    masked = {word[0] for word in case.words if len(word) == 1}
    masked |= {*EOS, *params.stop_token_ids} if params.min_tokens else set()
    return not masked.issuperset(params.allowed_token_ids or range(VOCABULARY))


sequences = st.builds(
    Case,
    params=sampling_params(),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    output=st.lists(few_tokens, max_size=8),
    words=st.lists(st.lists(few_tokens, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    seed=st.integers(0, 2**32 - 1),
).filter(is_served)


@settings(max_examples=150)
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


@settings(max_examples=50)
@given(case=sequences, logits_seed=st.integers(0, 2**31))
def test_token_in_flight_makes_no_difference(case: Case, logits_seed: int):
    """The result is the same, whether the host or the device compares the last token."""
    assume(case.output)
    logits = random_logits(ROWS, seed=logits_seed)
    known = sample_full(logits, [case])
    case.in_flight = True
    assert sample_full(logits, [case]) == known


@settings(max_examples=50)
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
    """Each allowed token is a bad word, or would complete one."""
    logits = random_logits(ROWS)
    params = SamplingParams(temperature=temperature, allowed_token_ids=[2, 3])
    token = sample_full(logits, [Case(params, output=[1], words=((3,), (1, 2)), seed=5)])
    assert token == sample_full(logits, [Case(SamplingParams(temperature=temperature), output=[1], seed=5)])


def test_tiny_repetition_penalty_keeps_the_most_probable_apart():
    logits = np.full((ROWS, VOCABULARY), -1.0, np.float32)
    logits[0, 7] = 30
    params = SamplingParams(temperature=0, repetition_penalty=1.2e-38, allowed_token_ids=[6, 7])
    assert sample_full(logits, [Case(params, prompt=[6, 7])]) == 7
