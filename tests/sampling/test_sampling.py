"""Host side of sampling: settings, state, bad words, packed steps and results."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import logprobs_of

from amoeba_jax import SamplingParams
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import Logprob
from amoeba_jax.sampling.rows import (
    ANY_TOKEN,
    FIELDS,
    MAX_BAD_WORD_PAIRS,
    NO_SLOT,
    SamplingRow,
    StepRow,
    bad_word_ids,
    bad_word_pairs,
    logprob_entry,
    pack,
    sample_seed,
    sampling_row,
    state_rows,
)
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


def test_tokens_outside_the_vocabulary_have_no_state():
    """A tokenizer may have more tokens than the model has logits, and a config may name an end that is no token."""
    params = SamplingParams(min_tokens=1)
    row = sampling_row(params, 0, 8, (-1, 7, 8, 500), bad_words=((8,), (1, 8), (8, 1), (3,), (3, 7)))
    assert (row.banned, row.bad_words) == ((3,), ((3, 7),))
    flags, bias = state_rows(row, prompt=[7], output=[])
    np.testing.assert_array_equal(flags, [0, 0, 0, 0, 0, 0, 0, 1 + 2])
    np.testing.assert_array_equal(bias, [0, 0, 0, -np.inf, 0, 0, 0, 0])


def test_words_that_cannot_come_need_no_state():
    row = sampling_row(SamplingParams(max_tokens=2), 0, 8, (), bad_words=((8,), (9, 1), (1, 2, 3)))
    assert (row.kind, row.uses_state) == ("sample", False)


def test_client_stop_tokens_are_told_from_ends_of_generation():
    row = sampling_row(SamplingParams(stop_token_ids=[3, 900]), 0, 8, (7,))
    assert row.stop_ids == {3, 900}
    assert row.held_back == (3, 7)


# Seeds.


def test_rows_of_one_request_differ_in_their_seed_alone():
    words = ((1,), (1, 2), (3, 4, 5))
    first = sampling_row(SamplingParams(top_p=0.5, top_k=3, min_tokens=2), 7, 8, (2,), words)
    for seed in (0, 2**31, 2**32 - 1):
        other, made = first.with_seed(seed), sampling_row(first.params, seed, 8, (2,), words)
        np.testing.assert_array_equal(other.settings, made.settings)
        assert (other.endings, other.two_tokens) == (first.endings, first.two_tokens)
    np.testing.assert_array_equal(first.settings, sampling_row(first.params, 7, 8, (2,), words).settings)


def test_samples_of_all_requests_have_seeds_of_their_own():
    seeds = [sample_seed(*numbers) for numbers in product([0, 1, 2**32, -1], range(50), range(16))]
    assert len(set(seeds)) == 4 * 50 * 16
    assert all(0 <= seed < 2**32 for seed in seeds)
    bits = np.unpackbits(np.array(seeds, np.uint32).view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 6 * 0.5 / np.sqrt(len(seeds))


# Bad words.


def pairs_of(row: SamplingRow, output: Sequence[int], in_flight: bool) -> list[list[int]]:
    return bad_word_pairs(row, output, in_flight).T.tolist()


def matches(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> set[int]:
    """Return the tokens that vLLM bans after `output`, except for words of one token."""
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
    pairs = pairs_of(row, output, in_flight=False)
    assert {last for last, _ in pairs} <= {ANY_TOKEN}
    assert {banned for _, banned in pairs} == matches(words, output)
    if output:
        pairs = pairs_of(row, output[:-1], in_flight=True)
        assert {banned for last, banned in pairs if last == output[-1]} == matches(words, output)


def test_pairs_in_flight_name_the_token_they_wait_for():
    row = sampling_row(SamplingParams(), 0, 8, (), bad_words=((1, 2), (3, 4, 5), (6,), (7, 4, 5)))
    assert pairs_of(row, [0, 3], in_flight=True) == [[1, 2], [4, 5]]
    assert pairs_of(row, [0, 3], in_flight=False) == []
    assert pairs_of(row, [3, 4], in_flight=False) == [[ANY_TOKEN, 5]]
    assert pairs_of(row, [], in_flight=True) == [[1, 2]]
    assert pairs_of(row, [], in_flight=False) == []


class WatchedOutput(list[int]):
    """List that counts its reads."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_token_is_compared_with_the_few_words_that_it_can_go_on_with(in_flight: bool):
    words = tuple((100 + i, 300 + i, 5) for i in range(100)) + tuple((7, i, 6) for i in range(3))
    row = sampling_row(SamplingParams(), 0, 1000, (), words)
    for last, candidates in ((7, 3), (120, 1), (900, 0)):
        output = WatchedOutput([1, 2, last] if in_flight else [1, 2, last, 4])
        bad_word_pairs(row, output, in_flight)
        assert output.reads <= 6 * (candidates + 1), "of 103 words; checks of shapes read it too"


def test_more_bad_words_than_a_row_has_room_for_are_refused():
    words = tuple((first, second) for first in range(20) for second in range(20))
    row = sampling_row(SamplingParams(), 0, 20, (), words[:MAX_BAD_WORD_PAIRS] * 2 + ((5,), (1, 20)))
    packed = pack([StepRow(row, 0, 0, 0, bad_word_pairs(row, [3], in_flight=True))], 1, full=True)
    assert packed[len(FIELDS) :].reshape(2, -1).T.tolist() == [list(word) for word in words[:MAX_BAD_WORD_PAIRS]]
    message = rf"bad_words have {MAX_BAD_WORD_PAIRS + 1} forms of several tokens, .* limit of {MAX_BAD_WORD_PAIRS}"
    with pytest.raises(RequestError, match=message):
        sampling_row(SamplingParams(), 0, 20, (), words[: MAX_BAD_WORD_PAIRS + 1])


@pytest.mark.parametrize(
    ("params", "words", "message"),
    [
        ({"allowed_token_ids": [3]}, ((3,),), r"allowed_token_ids=\(3\) and bad_words leave no token"),
        ({"allowed_token_ids": [3, 4, 3]}, ((4,), (3,), (3, 1)), "and bad_words leave no token"),
        ({}, tuple((token,) for token in range(8)), r"^bad_words leave no token"),
        ({"allowed_token_ids": [7], "min_tokens": 5}, (), r"allowed_token_ids=\(7\) and min_tokens=5 leave no token"),
        ({"allowed_token_ids": [7], "min_tokens": 5, "ignore_eos": True}, (), "min_tokens=5 leave no token"),
        ({"allowed_token_ids": [7, 2, 3], "min_tokens": 1, "stop_token_ids": [2]}, ((3,),), "nor can bad_words"),
        ({"min_tokens": 1, "stop_token_ids": range(7)}, (), "^min_tokens=1 leave no token"),
    ],
)
def test_settings_that_leave_no_token_are_refused(params: dict, words: tuple, message: str):
    with pytest.raises(RequestError, match=message):
        sampling_row(SamplingParams(**params), 0, 8, (7,), words)
    # One more allowed token, or longer words, leave a token.
    one_more = params | {"allowed_token_ids": [*params.get("allowed_token_ids", ()), 6], "stop_token_ids": [2]}
    assert sampling_row(SamplingParams(**one_more), 0, 8, (7,), tuple(word for word in words if word != (6,)))
    assert sampling_row(SamplingParams(**params | {"min_tokens": 0}), 0, 8, (7,), tuple((*word, 1) for word in words))


class LetterTokenizer(Tokenizer):
    """Tokenizer with a token for each letter, and another token for a letter after a space. It knows no digits."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        spaced = 1000 * (text.removeprefix("\n")[:1] == " ")
        return [ord(c) + spaced for c in text.lstrip() if not c.isdigit()]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]


class SpacelessTokenizer(LetterTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.lstrip(), add_special_tokens)


def test_bad_words_have_tokens_with_and_without_a_space():
    assert bad_word_ids(["ab", " c"], LetterTokenizer()) == ((97, 98), (1097, 1098), (99,), (1099,))
    assert bad_word_ids(["ab", "ab"], SpacelessTokenizer()) == ((97, 98),)
    assert bad_word_ids([], LetterTokenizer()) == ()
    with pytest.raises(RequestError, match=r"bad_words.*'12'"):
        bad_word_ids(["a", "12"], LetterTokenizer())


def test_words_that_are_refused_are_named_in_short():
    with pytest.raises(RequestError) as error:
        bad_word_ids(["1" * 10**6], LetterTokenizer())
    assert len(str(error.value)) < 300


# Packing.


@pytest.mark.parametrize(
    ("params", "words", "kind", "uses_state"),
    [
        ({"temperature": 0}, (), "greedy", False),
        ({"temperature": 0, "top_k": 5, "prompt_logprobs": 3, "ignore_eos": True, "stop": "x"}, (), "greedy", False),
        ({}, (), "sample", False),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3, "n": 2}, (), "sample", False),
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
    """Floats travel as integers. Some floats here need all bits, are subnormal, or are at the edge of a range."""
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
    packed = pack(rows, 5).reshape(len(FIELDS), 5)
    np.testing.assert_array_equal(packed[0], [0, 1, 2, NO_SLOT, NO_SLOT])
    np.testing.assert_array_equal(packed[1, :3], [131071, 131072, 131073])
    np.testing.assert_array_equal(packed[FIELDS.index("seed"), :3].view(np.uint32), seeds)
    np.testing.assert_array_equal(packed[FIELDS.index("top_k"), :3], [5, -1, 10**6])
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    for field, name in zip(packed[FIELDS.index("temperature") :], floats, strict=True):
        expected = np.array([getattr(p, name) for p in params], np.float32)
        np.testing.assert_array_equal(field[:3], expected.view(np.int32), err_msg=name)
    assert (packed[1:, 3:] == 0).all(), "padding"


def test_each_row_has_its_own_pairs():
    plain, worded = (sampling_row(SamplingParams(), 0, 9, (), words) for words in ((), ((1, 2), (3, 4, 5), (6, 7))))
    rows = [StepRow(row, 0, 9, 2, bad_word_pairs(row, [0, 3], in_flight=True)) for row in (plain, worded)]
    packed = pack(rows, 3, full=True)
    size = len(FIELDS) * 3
    fields, pairs = packed[:size].reshape(-1, 3), packed[size:].reshape(2, 3, MAX_BAD_WORD_PAIRS)
    np.testing.assert_array_equal(fields[FIELDS.index("num_pairs")], [0, 3, 0])
    np.testing.assert_array_equal(pairs[:, 1, :3], [[1, 6, 4], [2, 7, 5]])
    assert pack([], 3, full=True).size == packed.size


def test_entry_has_the_token_and_the_most_probable():
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
    # The token is among the most probable tokens here, and the vocabulary has fewer than twenty tokens.
    everything = {0: (0.1, 4), 1: (0.4, 1), 3: (0.3, 2), 2: (0.2, 3)}
    close(logprob_entry(logprobs, 0, 0, 20), everything)
