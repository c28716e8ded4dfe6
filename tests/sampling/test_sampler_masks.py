"""Masks of constrained rows on the device, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sampling_cases import EOS, ROWS, VOCABULARY, Case, State, expected_token, jit_draw_full, random_logits

from amoeba_jax import SamplingParams, StructuredOutput
from amoeba_jax.sampling.rows import NO_ALLOWED_TOKEN, NO_TOKEN, mask_words, pack, unpack_result
from amoeba_jax.sampling.sampler import allowed_tokens

ANYTHING = StructuredOutput(regex=".*")


def packed_masks(allowed: np.ndarray) -> np.ndarray:
    """Return `[R, V]` flags as packed bits."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def choose(logits: np.ndarray, cases: list[Case], allowed: np.ndarray):
    """Return the result of the sampler for cases, each in the slot of its index."""
    state = State(logits.shape[1], len(logits) + 2)
    for slot, case in enumerate(cases):
        case.slot = slot
        state.admit(case)
    rows = [case.row(logits.shape[1]) for case in cases]
    packed = jnp.asarray(pack(rows, len(logits), full=True))
    masks = jnp.asarray(packed_masks(allowed))
    x = jnp.asarray(logits.T, jnp.float32)
    *_, result = jit_draw_full(x, state.last_tokens, state.flags, state.bias, packed, masks)
    return unpack_result(np.array(result))


@given(data=st.data(), vocab_size=st.sampled_from([1, 31, 32, 33, 100]))
@settings(max_examples=20)
def test_packed_bits_are_the_allowed_tokens(data: st.DataObject, vocab_size: int):
    allowed = data.draw(hnp.arrays(bool, (3, vocab_size)))
    masks = packed_masks(allowed)
    assert masks.shape == (3, mask_words(vocab_size))
    found = jax.jit(allowed_tokens, static_argnums=1)(masks, vocab_size)
    np.testing.assert_array_equal(np.asarray(found).T, allowed)


@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.02, 0.3, 0.9]))
@settings(max_examples=8)
def test_constrained_rows_choose_among_their_tokens(seed: int, share: float):
    """Other rows have no constraint. Some rows draw, and some have penalties, banned words or minimum lengths."""
    random = np.random.default_rng(seed)
    logits = random_logits(ROWS, seed=seed)
    allowed = random.random((ROWS, VOCABULARY)) < share
    options = [
        {},
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 1.5, "logit_bias": {3: 2.0}},
        {"temperature": 0, "min_tokens": 2},
        {"temperature": 0, "allowed_token_ids": range(0, VOCABULARY, 2)},
        {"temperature": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0},
        {},
    ]
    cases = []
    for row, given_options in enumerate(options):
        structured = ANYTHING if row < 6 else None
        params = SamplingParams(structured=structured, **given_options)
        cases.append(Case(params, prompt=[1, 4], output=[7], words=((7, 9), (11,)) if row == 1 else (), seed=row))
    allowed[6] = False  # rows without a constraint ignore their masks
    result = choose(logits, cases, allowed)
    allowed[6:] = True
    for row, case in enumerate(cases):
        if (count := tokens_left(allowed[row], case).sum()) < 2:
            only = np.flatnonzero(tokens_left(allowed[row], case))
            assert result.tokens[row] == (only[0] if count else NO_ALLOWED_TOKEN)
            continue
        masked = np.where(allowed[row], logits[row], -np.inf).astype(np.float32)
        try:
            wanted = expected_token(masked, case)
        except AssertionError:  # two tokens are equally good
            continue
        assert result.tokens[row] == wanted


def tokens_left(allowed: np.ndarray, case: Case) -> np.ndarray:
    """Return the tokens that the mask and the options leave."""
    left = allowed.copy()
    params = case.params
    if params.allowed_token_ids is not None:
        left &= np.isin(np.arange(len(left)), params.allowed_token_ids)
    if params.min_tokens > len(case.output):
        left[list(EOS)] = False
    for word in case.words:
        if list(word[:-1]) == list(case.output)[len(case.output) - len(word) + 1 :]:
            left[word[-1]] = False
    return left


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_an_allowed_token_is_reported_alone(temperature: float):
    logits = random_logits(ROWS)
    logits[2, 5] = np.nan
    params = SamplingParams(temperature=temperature, structured=ANYTHING)
    allowed = np.ones((ROWS, VOCABULARY), bool)
    allowed[1:3] = False
    cases = [Case(params, seed=row) for row in range(ROWS)]
    result = choose(logits, cases, allowed)
    alone = choose(logits, cases, np.ones_like(allowed))
    assert result.tokens[1] == NO_ALLOWED_TOKEN
    assert result.tokens[2] == NO_TOKEN
    np.testing.assert_array_equal(np.delete(result.tokens, [1, 2]), np.delete(alone.tokens, [1, 2]))


def test_log_probabilities_ignore_the_constraint():
    logits = random_logits(ROWS)
    allowed = np.zeros((ROWS, VOCABULARY), bool)
    allowed[:, 9] = True
    cases = [Case(SamplingParams(structured=ANYTHING, logprobs=3), seed=row) for row in range(ROWS)]
    result = choose(logits, cases, allowed)
    assert (result.tokens == 9).all()
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs.logprob, expected[:, 9], rtol=1e-4)
    np.testing.assert_array_equal(result.logprobs.top_ids[:, :3], np.argsort(-logits, axis=1)[:, :3])
