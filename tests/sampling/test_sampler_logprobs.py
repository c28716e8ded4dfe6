"""Log-probabilities and ranks of sampled and prompt tokens against float64 NumPy."""

import math

import numpy as np
import pytest
from sampling_cases import (
    ROWS,
    VOCABULARY,
    Case,
    State,
    logprobs_of,
    random_logits,
)

from amoeba_jax import SamplingParams
from amoeba_jax.sampling.rows import MAX_LOGPROBS


def exact_logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.first_by_default
@pytest.mark.parametrize("vocabulary", [1, 5, 64])
def test_logprobs_are_those_of_the_logits_as_given(vocabulary: int):
    """Bias and temperature do not change log-probabilities."""
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


def test_most_probable_of_many_tokens_are_in_the_order_of_their_ids_where_equal():
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
