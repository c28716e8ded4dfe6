"""How a request's tokens are chosen and when it ends."""

import math
from dataclasses import dataclass

from amoeba_jax.errors import RequestError


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
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise RequestError(f"temperature must be finite and at least 0, got {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not isinstance(self.top_k, int) or self.top_k < -1:
            raise RequestError(f"top_k must be an integer of at least 1, or 0 or -1 for all, got {self.top_k!r}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < 2**32):
            raise RequestError(f"seed must be an integer in [0, 2**32), got {self.seed!r}")
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise RequestError(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if not all(isinstance(token, int) and token >= 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be non-negative integers, got {self.stop_token_ids!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
