"""Checks of prompts and of the arguments that belong to them."""

import time
from typing import Any

import numpy as np

from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import RequestMetrics, RequestOutput
from amoeba_jax.shorten import shorten

Prompt = str | list[int]


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """Return `(prompts, alone)`: the prompts as a list, and whether the argument was a single prompt.

    Raises `RequestError` for a wrong type.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts must be a text, token ids, or a list of either, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int | np.integer):
        return [list(prompts)], True
    return list(prompts), len(prompts) == 1


def one_each(name: str, values: Any, kind: type, count: int) -> list[Any]:
    """Return a list with one value for each of `count` prompts. A single value or None is repeated.

    Raises `RequestError` if a list does not have `count` values, or if a value is not of type `kind`. The message
    contains `name`, the name of the argument.
    """
    if values is None or isinstance(values, kind):
        return [values] * count
    if not isinstance(values, list | tuple) or len(values) != count or not all(isinstance(v, kind) for v in values):
        raise RequestError(f"{name} must be one for each of the {count} prompts, got {shorten(values)}")
    return list(values)


def check_tokens(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Return token ids as a tuple.

    Raises `RequestError` if there are no token ids, or if one of them is not an integer in `[0, vocab_size)`.
    """
    if not isinstance(token_ids, list | tuple | np.ndarray) or (
        isinstance(token_ids, np.ndarray) and token_ids.ndim == 0
    ):
        raise RequestError(f"a prompt must be a text or a list of token ids, got {type(token_ids).__name__}")
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return tuple(token_ids)  # fast path for Python integers
    for position, token in enumerate(token_ids):
        is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_integer or not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {shorten(token)} at position {position} is outside the vocabulary: it must be an "
                f"integer in [0, {vocab_size})"
            )
    return tuple(int(token) for token in token_ids)


def failed_output(prompt: Any, request_id: str | None, error: Exception) -> RequestOutput:
    """Return the output of a prompt that failed."""
    tokens = () if isinstance(prompt, str) else tuple(prompt) if isinstance(prompt, list | tuple) else ()
    metrics = RequestMetrics(arrival=time.monotonic())
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id or "", text, tokens, (), metrics, error=str(error))
