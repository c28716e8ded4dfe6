"""Sampling settings and limits of a request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from amoeba_jax.errors import RequestError
from amoeba_jax.shorten import shorten
from amoeba_jax.structured_output import StructuredOutput
from amoeba_jax.valid_text import check_unicode

MAX_LOGPROBS = 20
"""Limit for `logprobs` and `prompt_logprobs`."""

MAX_SLO_S = 86_400.0
"""Largest value of `ttft_slo_s` and `tpot_slo_s`, in seconds."""

_SMALLEST_F32 = 1.1754943508222875e-38
_LARGEST_F32 = 3.4028234663852886e38

# Smallest and largest value of each integer setting.
_INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, 128),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings and limits of one request.

    Raises `RequestError` if a value is out of range. The message has the value and its range. Lists are stored as
    tuples, and numbers as Python numbers, so that `SamplingParams` can be hashed and compared.
    """

    n: int = 1
    """Number of samples, 1 to 128. It must be 1 if temperature is 0, because all samples would be equal."""
    temperature: float = 1.0
    """Divisor of the logits before sampling, at least 0. At 0 the most probable token is chosen."""
    top_p: float = 1.0
    """Share of the probability to sample from, in (0, 1].

    Tokens are drawn from the smallest set of most probable tokens whose probabilities add up to at least `top_p`.
    """
    top_k: int = 0
    """Number of most probable tokens to sample from. 0 or -1: all."""
    min_p: float = 0.0
    """Minimum probability of a token, as a fraction of the highest probability. In [0, 1]."""
    presence_penalty: float = 0.0
    """Value subtracted from the logit of each token that was already generated. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Value subtracted from the logit of a token for each time that it was generated. In [-2, 2]."""
    repetition_penalty: float = 1.0
    """Penalty for tokens that occur in the prompt or output, above 0. 1: no penalty.

    The positive logits of these tokens are divided by the penalty. Their negative logits are multiplied by the penalty.
    """
    seed: int | None = None
    """Seed of the random numbers, in [0, 2**32). Sample `i` has the seed `(seed + i) % 2**32`.

    The result does not depend on other requests in the batch. Default: different seeds, derived from the engine's seed.
    """
    stop: str | Sequence[str] = ()
    """Stop strings: one string or several. Stored as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Stop tokens, in addition to the end-of-sequence tokens of the model."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string that ended it."""
    ignore_eos: bool = False
    """Whether to continue after an end-of-sequence token."""
    max_tokens: int = 16
    """Limit for generated tokens, 1 to 2**31 - 1."""
    min_tokens: int = 0
    """Number of tokens that must come before a stop token or end-of-sequence token. At most `max_tokens`."""
    logprobs: int | None = None
    """Number of most probable tokens to report with each generated token, 0 to 20. None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report with each prompt token, 0 to 20. None: no log-probabilities."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Values to add to the logits, by token id, in [-100, 100]. Stored as pairs, sorted by id."""
    allowed_token_ids: Sequence[int] | None = None
    """Tokens that may be generated. None: all."""
    bad_words: Sequence[str] = ()
    """Words that must not be generated. Each word is banned in two forms: without and with a space before the word.

    The tokens that spell exactly the word are banned. The word can still occur if its last token has further text, such
    as the last letter of the word and a newline. All words together may have at most 256 forms of several tokens. Forms
    of one token are not limited.
    """
    skip_special_tokens: bool = True
    """Whether the text omits special tokens."""
    priority: int = 0
    """Priority of the request. Lower values are served first."""
    ttft_slo_s: float | None = None
    """Target for the time to the first token, in seconds: above 0, at most 86400. None: the target of the server.

    A request that misses its target continues. docs/scheduling.md describes the effect on each policy.
    """
    tpot_slo_s: float | None = None
    """Target for the mean time per token after the first, in seconds, up to 86400. None: the target of the server."""
    structured: StructuredOutput | None = None
    """Constraint on the text, such as a JSON schema. None: free text. docs/serving.md describes the effect on other
    settings."""

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature <= _LARGEST_F32):
            raise RequestError(f"temperature must be finite and at least 0, got {shorten(self.temperature)}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p must be in (0, 1], got {shorten(self.top_p)}")
        if not (_is_integer(self.top_k) and -1 <= self.top_k < 2**31):
            raise RequestError(
                f"top_k must be an integer from 1 to 2**31 - 1, or 0 or -1 for all, got {shorten(self.top_k)}"
            )
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError(f"min_p must be in [0, 1], got {shorten(self.min_p)}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (_is_number(value) and -2 <= value <= 2):
                raise RequestError(f"{name} must be in [-2, 2], got {shorten(value)}")
        # A value that float32 rounds to 0 would turn masked logits into NaN.
        if not (_is_number(self.repetition_penalty) and _SMALLEST_F32 <= self.repetition_penalty <= _LARGEST_F32):
            raise RequestError(f"repetition_penalty must be above 0 and finite, got {shorten(self.repetition_penalty)}")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 2**32):
            raise RequestError(f"seed must be an integer in [0, 2**32), got {shorten(self.seed)}")
        for name, (smallest, largest) in _INTEGERS.items():
            value = getattr(self, name)
            if not (_is_integer(value) and smallest <= value <= largest):
                raise RequestError(f"{name} must be an integer from {smallest} to {largest}, got {shorten(value)}")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {shorten(self.min_tokens)}"
            )
        if self.temperature == 0 and self.n > 1:
            raise RequestError(
                f"n must be 1 if temperature is 0, because all samples would be equal, got {shorten(self.n)}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and 0 <= value <= MAX_LOGPROBS):
                raise RequestError(f"{name} must be None or an integer from 0 to {MAX_LOGPROBS}, got {shorten(value)}")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= MAX_SLO_S):
                raise RequestError(
                    f"{name} must be None or seconds above 0 and at most {MAX_SLO_S:g}, got {shorten(value)}"
                )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise RequestError(f"{name} must be True or False, got {shorten(getattr(self, name))}")
        if not isinstance(self.structured, StructuredOutput | None):
            raise RequestError(f"structured must be a StructuredOutput or None, got {shorten(self.structured)}")
        self._normalize()

    def _normalize(self) -> None:
        """Check the settings that are lists or mappings. Convert all values to Python numbers and tuples."""
        values: dict[str, Any] = {
            "stop": _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": _biases(self.logit_bias),
        }
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not values["allowed_token_ids"]:
                shown = shorten(self.allowed_token_ids)
                raise RequestError(f"allowed_token_ids={shown} must name a token, or be None")
        for name, value in vars(self).items():
            if isinstance(value, bool | np.bool_):
                values[name] = bool(value)
            elif _is_integer(value):
                values[name] = int(value)
            elif _is_number(value):
                values[name] = float(value)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` if a setting has a token id outside `[0, vocab_size)`."""
        named = {
            "logit_bias": dict(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab_size:
                    raise RequestError(f"{name} names token id {token}, outside the vocabulary [0, {vocab_size})")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number of Python or NumPy. NaN counts too: range checks refuse NaN later."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    """Check that all values are non-empty strings, and return the strings as a tuple. None gives an empty tuple.

    If `name` is "bad_words", blank strings are refused too.
    """
    strings = () if values is None else tuple(values) if _is_collection(values) else None
    if strings is None or not all(isinstance(text, str) for text in strings):
        raise RequestError(f"{name} must be a sequence of strings, got {shorten(values)}")
    if not all(text.strip() if name == "bad_words" else text for text in strings):
        raise RequestError(f"{name} must not have an empty string, got {shorten(values)}")
    return tuple(check_unicode(text, f"{name}[{index}]") for index, text in enumerate(strings))


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    tokens = () if values is None else tuple(values) if _is_collection(values) else None
    if tokens is None or not all(_is_integer(token) and token >= 0 for token in tokens):
        raise RequestError(f"{name} must be non-negative integers, got {shorten(values)}")
    return tuple(int(token) for token in tokens)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    """Check biases and return them as pairs `(token id, bias)`, sorted by token id.

    `values` is a mapping from token ids to biases, a sequence of pairs, or None. None gives an empty tuple.
    """
    try:
        biases = dict(values or ())
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias must map token ids to numbers, got {shorten(values)}") from error
    for token, bias in biases.items():
        if not (_is_integer(token) and token >= 0):
            raise RequestError(f"logit_bias must have non-negative integers for token ids, got {shorten(token)}")
        if not (_is_number(bias) and -100 <= bias <= 100):
            raise RequestError(f"logit_bias must be in [-100, 100], got {shorten(bias)} for token id {token}")
    return tuple(sorted((int(token), float(bias)) for token, bias in biases.items()))


def _is_collection(values: Any) -> bool:
    """Return whether a value is a collection, but neither a string nor a mapping."""
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
