"""How a request's tokens are chosen and when it ends."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from amoeba_jax.errors import RequestError

_LARGEST_F32 = 3.4028234663852886e38


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request. Raises `RequestError` for a value out of range, naming it and the range."""

    temperature: float = 1.0
    """0 takes the likeliest token; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum. In (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest. In [0, 1]."""
    seed: int | None = None
    """Makes sampling repeatable, whatever else is in the batch."""
    max_tokens: int = 16
    """Most tokens to generate."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the request, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if not (_is_number(self.temperature) and 0 <= self.temperature <= _LARGEST_F32):
            raise RequestError(f"temperature must be finite and at least 0, got {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not (_is_integer(self.top_k) and -1 <= self.top_k < 2**31):
            raise RequestError(f"top_k must be an integer from 1 to 2**31 - 1, or 0 or -1 for all, got {self.top_k!r}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 2**32):
            raise RequestError(f"seed must be an integer in [0, 2**32), got {self.seed!r}")
        if not _is_integer(self.max_tokens) or self.max_tokens < 1:
            raise RequestError(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if not all(_is_integer(token) and token >= 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be non-negative integers, got {self.stop_token_ids!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A real number, NumPy's included; comparisons with NaN are false, so ranges refuse it."""
    return isinstance(value, Real) and not isinstance(value, bool)
