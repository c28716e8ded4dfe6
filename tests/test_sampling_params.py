"""Settings at their limits, just beyond their limits, and with a wrong type."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from amoeba_jax import SamplingParams, StructuredOutput
from amoeba_jax.errors import RequestError
from amoeba_jax.shorten import shorten

NAN, INF = float("nan"), float("inf")
LARGEST_F32 = float(np.finfo(np.float32).max)


def above(value: float) -> float:
    return float(np.nextafter(value, INF))


def below(value: float) -> float:
    return float(np.nextafter(value, -INF))


NOT_NUMBERS = ["1", None, True, NAN, INF, -INF, 1j, [1]]
NOT_INTEGERS = ["1", True, 1.0, NAN, [1]]
# Setting: accepted values at the limits, refused values beyond them or of a wrong type.
RANGES = {
    "n": ([1, 2, 128], [0, -1, 129, None, *NOT_INTEGERS]),
    "temperature": ([0, 0.0, 1e-45, 1, LARGEST_F32], [below(0), -1, 2 * LARGEST_F32, 10**400, *NOT_NUMBERS]),
    "top_p": ([1e-30, 0.5, 1, 1.0], [0, 0.0, -0.5, above(1), *NOT_NUMBERS]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, None, *NOT_INTEGERS]),
    "min_p": ([0, 0.5, 1], [below(0), above(1), *NOT_NUMBERS]),
    "presence_penalty": ([-2, 0, 2.0], [below(-2), above(2), *NOT_NUMBERS]),
    "frequency_penalty": ([-2, 0, 2.0], [below(-2), above(2), *NOT_NUMBERS]),
    "repetition_penalty": ([1e-37, 1, 2, LARGEST_F32], [0, -1, 1e-39, 2 * LARGEST_F32, *NOT_NUMBERS]),
    "seed": ([None, 0, 2**32 - 1], [-1, 2**32, *NOT_INTEGERS]),
    "max_tokens": ([1, 2**31 - 1], [0, -1, None, 2**31, 2**200, *NOT_INTEGERS]),
    "min_tokens": ([0, 16], [-1, 17, None, 2**31, 2**200, *NOT_INTEGERS]),
    "logprobs": ([None, 0, 20], [-1, 21, *NOT_INTEGERS]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21, *NOT_INTEGERS]),
    "priority": ([-(2**31), 0, 2**31 - 1], [-(2**31) - 1, 2**31, None, *NOT_INTEGERS]),
    "ttft_slo_s": ([None, 1e-9, 1, 86_400.0], [0, -1.0, above(86_400), INF, NAN, "1", True]),
    "tpot_slo_s": ([None, 1e-9, 1, 86_400.0], [0, -1.0, above(86_400), INF, NAN, "1", True]),
    "structured": ([None, StructuredOutput(regex="a")], [{"regex": "a"}, "a", False]),
    "include_stop_str_in_output": ([False, True], [0, 1, None, "yes"]),
    "ignore_eos": ([False, True], [0, 1, None, "yes"]),
    "skip_special_tokens": ([False, True], [0, 1, None, "yes"]),
    "stop": (["a", ["a", " "], ("a",), (), None], ["", ["a", ""], [1], [None], 1, b"a", {"a": 1}]),
    "bad_words": ([["a", " b"], (), None], ["a", [""], ["a", " "], [1], [None], 1, {"a": 1}]),
    "stop_token_ids": ([(), None, [0, 5], {7}, range(3)], [[-1], ["1"], [1.0], [True], [None], 5, "12"]),
    "allowed_token_ids": ([None, [0], (3, 1), range(3)], [[], (), [-1], ["1"], [1.0], [True], 5, "12"]),
    "logit_bias": (
        [None, {}, (), {0: 100, 7: -100.0}, [(3, 1)]],
        [{-1: 1}, {"1": 1}, {1.0: 1}, {True: 1}, 5, "ab", [3], [(1, 2, 3)]],
    ),
}
ACCEPTED = [(name, value) for name, (values, _) in RANGES.items() for value in values]
REFUSED = [(name, value) for name, (_, values) in RANGES.items() for value in values]


def test_every_setting_is_covered():
    assert set(RANGES) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=str)
def test_settings_at_their_limits(name: str, value: object):
    hash(SamplingParams(**{name: value}))


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_settings_out_of_range_are_named_with_their_value(name: str, value: object):
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})
    shown = next(iter(value)) if isinstance(value, dict) and name == "logit_bias" else value
    assert shorten(shown) in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("bias", [100.5, -101, NAN, INF, "1", None, True])
def test_bias_out_of_range_is_named_with_its_token(bias: object):
    with pytest.raises(RequestError, match=r"logit_bias must be in \[-100, 100\].*token id 7") as error:
        SamplingParams(logit_bias={3: 1, 7: bias})
    assert repr(bias) in str(error.value)


def test_defaults():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature) == (1, 16, 1.0)
    assert (params.stop, params.stop_token_ids, params.bad_words, params.logit_bias) == ((), (), (), ())
    assert params.logprobs is params.prompt_logprobs is params.allowed_token_ids is params.seed is None


def test_greedy_has_one_continuation():
    SamplingParams(temperature=0, n=1)
    with pytest.raises(RequestError, match=r"n must be 1 if temperature is 0.*got 2"):
        SamplingParams(temperature=0, n=2)


def test_fewest_tokens_are_at_most_the_most():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens=5, got 6"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_sequences_become_tuples():
    params = SamplingParams(
        stop="end", stop_token_ids=[4, 2], bad_words=["x"], allowed_token_ids=range(2), logit_bias={9: 1, 3: -2}
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4, 2)
    assert params.bad_words == ("x",)
    assert params.allowed_token_ids == (0, 1)
    assert params.logit_bias == ((3, -2.0), (9, 1.0))
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b"), "an iterator is read once"


def test_settings_can_be_replaced_compared_and_hashed():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, allowed_token_ids=[1], temperature=0.5)
    again = dataclasses.replace(params, temperature=0.7)
    assert again != params
    assert {dataclasses.replace(again, temperature=0.5)} == {params}


def test_numpy_scalars_become_pythons_own():
    """Arithmetic with NumPy scalars would overflow in their few bits."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        top_k=np.int64(5),
        seed=np.uint32(2**32 - 1),
        max_tokens=np.int8(100),
        logprobs=np.int16(3),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.arange(3, dtype=np.uint8),
        logit_bias={np.int32(4): np.float16(0.5)},
        priority=np.int8(-1),
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        seed=2**32 - 1,
        max_tokens=100,
        logprobs=3,
        ignore_eos=True,
        stop_token_ids=(0, 1, 2),
        logit_bias={4: 0.5},
        priority=-1,
    )
    assert params.max_tokens + 1000 == 1100
    assert {type(params.temperature), type(params.top_p)} == {float}
    assert {type(params.max_tokens), type(params.stop_token_ids[0]), type(params.seed)} == {int}
    assert type(params.ignore_eos) is bool


@pytest.mark.parametrize("setting", [{"logit_bias": {5: 1.0, 99: 1.0}}, {"allowed_token_ids": [1, 99]}])
def test_token_ids_outside_the_vocabulary_are_named(setting: dict):
    ((name, _),) = setting.items()
    params = SamplingParams(**setting)
    params.check_vocabulary(100)
    with pytest.raises(RequestError, match=rf"{name} names token id 99, outside the vocabulary \[0, 99\)"):
        params.check_vocabulary(99)


def test_stop_tokens_outside_the_vocabulary_are_named():
    SamplingParams(stop_token_ids=[0, 99]).check_vocabulary(100)
    with pytest.raises(RequestError, match=r"stop_token_ids names token id 100, outside the vocabulary \[0, 100\)"):
        SamplingParams(stop_token_ids=[0, 100]).check_vocabulary(100)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_that_are_no_unicode_are_named_with_their_position(name: str):
    with pytest.raises(RequestError, match=rf"^{name}\[1\] must be valid Unicode: character 1 is .* U\+D800$"):
        SamplingParams(**{name: ["fine", "a\ud800"]})
