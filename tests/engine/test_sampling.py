"""Sampling's host side: settings, state, bad words, packed steps and results."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import logprobs_of

from amoeba_jax import SamplingParams
from amoeba_jax.engine.sampling import (
    ANY_TOKEN,
    NO_SLOT,
    StepRow,
    bad_word_ids,
    bad_word_pairs,
    logprob_entry,
    pack,
    pair_bucket,
    sampling_row,
    state_rows,
)
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import Logprob
from amoeba_jax.tokenizer import Tokenizer


def test_state_rows_hold_prompt_stops_and_counts():
    params = SamplingParams(
        logit_bias={3: 1.5, 4: -2}, allowed_token_ids=[1, 3, 4, 6], stop_token_ids=[1], min_tokens=1, ignore_eos=True
    )
    row = sampling_row(params, 0, 8, (7, 500), bad_words=((6,), (1, 3)))
    flags, bias = state_rows(row, prompt=[0, 5, 5], output=[5, 2, 5])
    np.testing.assert_array_equal(flags, [1, 2, 4, 0, 0, 1 + 8, 0, 2])
    np.testing.assert_array_equal(bias, [-np.inf, 0, -np.inf, 1.5, -2, -np.inf, -np.inf, -np.inf])
    assert (flags.dtype, bias.dtype) == (np.int32, np.float32)


# Bad words.


def matches(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> set[int]:
    """What vLLM bans after `output`, but for words of one token."""
    found = set()
    for word in words:
        prefix = len(word) - 1
        if 0 < prefix <= len(output) and tuple(output[-prefix:]) == word[:-1]:
            found.add(word[-1])
    return found


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    output=st.lists(st.integers(0, 2), max_size=6),
)
def test_pairs_ban_what_would_complete_a_word(words: tuple, output: list[int]):
    row = sampling_row(SamplingParams(), 0, 8, (), words)
    pairs = bad_word_pairs(row, output, in_flight=False)
    assert {last for last, _ in pairs} <= {ANY_TOKEN}
    assert {banned for _, banned in pairs} == matches(words, output)
    if output:
        pairs = bad_word_pairs(row, output[:-1], in_flight=True)
        assert {banned for last, banned in pairs if last == output[-1]} == matches(words, output)


def test_pairs_in_flight_name_the_token_they_wait_for():
    row = sampling_row(SamplingParams(), 0, 8, (), bad_words=((1, 2), (3, 4, 5), (6,), (7, 4, 5)))
    assert bad_word_pairs(row, [0, 3], in_flight=True) == [(1, 2), (4, 5)]
    assert bad_word_pairs(row, [0, 3], in_flight=False) == []
    assert bad_word_pairs(row, [3, 4], in_flight=False) == [(ANY_TOKEN, 5)]
    assert bad_word_pairs(row, [], in_flight=True) == [(1, 2)]


@pytest.mark.parametrize(
    ("pairs", "size"), [(0, 64), (1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (1000, 1024)]
)
def test_pairs_are_padded_to_a_power_of_two(pairs: int, size: int):
    assert pair_bucket(pairs) == size


class LetterTokenizer(Tokenizer):
    """A token for each letter, which a space before it makes another one. Knows no digits."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) + 1000 * (text[:1] == " ") for c in text.lstrip() if not c.isdigit()]


class SpacelessTokenizer(LetterTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.lstrip(), add_special_tokens)


def test_bad_words_have_tokens_with_and_without_a_space():
    assert bad_word_ids(["ab", " c"], LetterTokenizer()) == ((97, 98), (1097, 1098), (99,), (1099,))
    assert bad_word_ids(["ab", "ab"], SpacelessTokenizer()) == ((97, 98),)
    assert bad_word_ids([], LetterTokenizer()) == ()
    with pytest.raises(RequestError, match=r"bad_words.*'12'"):
        bad_word_ids(["a", "12"], LetterTokenizer())


# Packing.


@pytest.mark.parametrize(
    ("params", "words", "kind", "uses_state"),
    [
        ({"temperature": 0}, (), "greedy", False),
        ({"temperature": 0, "top_k": 5, "prompt_logprobs": 3, "ignore_eos": True, "stop": "x"}, (), "greedy", False),
        ({}, (), "draw", False),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3, "n": 2}, (), "draw", False),
        ({"temperature": 0, "logprobs": 0}, (), "full", False),
        ({}, ((1, 2),), "full", False),
        ({}, ((1,),), "full", True),
        ({"presence_penalty": 0.1}, (), "full", True),
        ({"frequency_penalty": 0.1}, (), "full", True),
        ({"repetition_penalty": 1.1}, (), "full", True),
        ({"logit_bias": {1: 0.0}}, (), "full", True),
        ({"allowed_token_ids": [1]}, (), "full", True),
        ({"min_tokens": 1}, (), "full", True),
    ],
    ids=str,
)
def test_settings_decide_the_program_and_the_state(params: dict, words: tuple, kind: str, uses_state: bool):
    row = sampling_row(SamplingParams(**params), 0, 8, (), words)
    assert (row.kind, row.uses_state) == (kind, uses_state)


def test_packed_settings_arrive_bit_for_bit():
    """Floats travel as integers: not representable in fewer bits, subnormal, or at the edge of a range."""
    edge = float(np.nextafter(np.float32(1), np.float32(0)))
    params = [
        SamplingParams(temperature=0.1, top_p=1 / 3, min_p=0.7, top_k=5, presence_penalty=-1 / 7),
        SamplingParams(temperature=1e-45, top_p=edge, top_k=-1, repetition_penalty=1.1, frequency_penalty=0.3),
        SamplingParams(temperature=3.4e38, top_p=1e-30, min_p=1.0, top_k=10**6),
    ]
    seeds = [0, 2**32 - 1, 2**31]
    rows = [
        StepRow(sampling_row(p, s, 8, ()), i, 131071 + i, 0) for i, (p, s) in enumerate(zip(params, seeds, strict=True))
    ]
    packed = pack(rows, 5).reshape(11, 5)
    np.testing.assert_array_equal(packed[0], [0, 1, 2, NO_SLOT, NO_SLOT])
    np.testing.assert_array_equal(packed[1, :3], [131071, 131072, 131073])
    np.testing.assert_array_equal(packed[3, :3].view(np.uint32), seeds)
    np.testing.assert_array_equal(packed[4, :3], [5, -1, 10**6])
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    for field, name in zip(packed[5:], floats, strict=True):
        expected = np.array([getattr(p, name) for p in params], np.float32)
        np.testing.assert_array_equal(field[:3], expected.view(np.int32), err_msg=name)
    assert (packed[1:, 3:] == 0).all(), "padding"


def test_entry_has_the_token_and_the_likeliest():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    logprobs = logprobs_of(logits, np.zeros(1))

    def close(entry: dict[int, Logprob], expected: dict[int, tuple[float, int]]) -> None:
        assert list(entry) == list(expected)
        for token, (probability, rank) in expected.items():
            assert entry[token].rank == rank
            assert entry[token].logprob == pytest.approx(math.log(probability), abs=1e-5)
            assert entry[token].decoded_token is None

    close(logprob_entry(logprobs, 0, 0, 0), {0: (0.1, 4)})
    close(logprob_entry(logprobs, 0, 0, 2), {0: (0.1, 4), 1: (0.4, 1), 3: (0.3, 2)})
    # The token is among the likeliest here, and the vocabulary has no twenty tokens.
    everything = {0: (0.1, 4), 1: (0.4, 1), 3: (0.3, 2), 2: (0.2, 3)}
    close(logprob_entry(logprobs, 0, 0, 20), everything)
