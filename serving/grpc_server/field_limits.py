"""Checks of the lengths of request fields, before anything reads their content."""

from collections.abc import Mapping, Sized
from typing import Any

from amoeba_jax.errors import ContextLengthError, RequestError
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits

# List settings: the limit of the number of elements, and the limit of the characters of one element.
_LISTS = {
    "stop": ("max_stop_strings", "max_stop_string_chars"),
    "stop_token_ids": ("max_stop_token_ids", None),
    "bad_words": ("max_bad_words", "max_bad_word_chars"),
    "logit_bias": ("max_logit_bias", None),
    "allowed_token_ids": ("max_allowed_token_ids", None),
}


def check_length(name: str, length: int, limit_name: str, limits: Limits, what: str = "elements") -> None:
    """Raise `RequestError` if `length`, the length of the field `name`, exceeds a limit.

    `limit_name` is the field of `limits` with the limit. `what` is the unit of `length`, such as "characters".
    """
    limit = getattr(limits, limit_name)
    if length > limit:
        raise RequestError(f"{name} has {length} {what}: at most {limit} may be given ({limit_name})")


def check_lists(values: Mapping[str, Any], limits: Limits) -> None:
    """Raise `RequestError` if a list in sampling settings has too many elements, or if an element is too long."""
    for name, (most, most_chars) in _LISTS.items():
        value = values.get(name)
        if isinstance(value, str):
            value = (value,)
        if not isinstance(value, Sized):
            continue  # missing, or of a wrong type, which `SamplingParams` refuses
        check_length(name, len(value), most, limits)
        if most_chars is not None and not isinstance(value, Mapping):
            for index, text in enumerate(value):  # type: ignore[arg-type]
                if isinstance(text, str):
                    check_length(f"{name}[{index}]", len(text), most_chars, limits, "characters")


def checked_params(values: Mapping[str, Any], limits: Limits, caller: Caller) -> SamplingParams:
    """Return the sampling settings for `values`, which are settings by name.

    Raises `RequestError` for a value that is invalid or over a limit. A caller with the admin token may use any
    priority and any SLO.
    """
    check_lists(values, limits)
    params = SamplingParams(**values)
    if params.priority < limits.min_priority and not caller.has_admin_token:
        raise RequestError(
            f"priority={params.priority} is below {limits.min_priority}, the lowest value that this server allows "
            "without the admin token (min_priority)"
        )
    for name, slo_s in (("ttft_slo", params.ttft_slo_s), ("tpot_slo", params.tpot_slo_s)):
        least_s = getattr(limits, f"min_{name}_ms") / 1e3
        if slo_s is not None and slo_s < least_s and not caller.has_admin_token:
            raise RequestError(
                f"{name}_s={slo_s:g} is below {least_s:g}, the lowest value that this server allows without the admin "
                f"token (min_{name}_ms)"
            )
    return params


def num_chars(value: Any) -> int:
    """Return the size of a JSON value: the characters of its strings and keys, plus 1 for each other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 1 + sum(map(num_chars, value)) + sum(map(num_chars, value.values()))
    return 1 + (sum(map(num_chars, value)) if isinstance(value, list | tuple) else 0)


def check_prompt_text(length: int, limits: Limits, max_model_len: int, longest_token_chars: int) -> None:
    """Raise `RequestError` if a text of `length` characters is over a limit or cannot fit the model's context."""
    check_length("the prompt", length, "max_prompt_chars", limits, "characters")
    limit = max_model_len * longest_token_chars
    if length > limit:
        raise ContextLengthError(
            f"the prompt has {length} characters: at most {limit} fit in {max_model_len} tokens (max_model_len) of "
            "this model"
        )


def check_reply_entries(num_entries: int, limits: Limits) -> None:
    """Raise `RequestError` if a reply would have too many tokens and log-probabilities for one message."""
    if num_entries > (limit := limits.max_reply_entries):
        raise RequestError(
            f"the reply has more than {limit} tokens and log-probabilities (max_reply_entries): ask for a stream"
        )


def check_prompt_entries(num_tokens: int, params: SamplingParams, limits: Limits) -> None:
    """Raise `RequestError` if a request asks for too many log-probabilities of its prompt tokens."""
    if params.prompt_logprobs is None:
        return
    entries = num_tokens * (1 + params.prompt_logprobs)
    if entries > limits.max_prompt_entries:
        raise RequestError(
            f"prompt_logprobs={params.prompt_logprobs} for a prompt of {num_tokens} tokens gives {entries} tokens and "
            f"log-probabilities: at most {limits.max_prompt_entries} are allowed (max_prompt_entries)"
        )
