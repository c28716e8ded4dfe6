"""Sampling settings in JSON, from clients of the Open Inference Protocol."""

import json
import re
from typing import Any

import numpy as np

from amoeba_jax.errors import RequestError
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from amoeba_jax.structured_output import StructuredOutput
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length, checked_params

MAX_JSON_DEPTH = 64
_INTEGERS = frozenset(
    {"n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority"},
)
_NUMBERS = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ttft_slo_s",
        "tpot_slo_s",
    },
)
_FLAGS = frozenset({"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"})
_OTHERS = frozenset({"stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"})
# Names of one setting, with the keys of vLLM. vLLM used the second name first.
_STRUCTURED = ("structured_outputs", "guided_decoding")
_STRUCTURED_KEYS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
KNOWN = _INTEGERS | _NUMBERS | _FLAGS | _OTHERS | set(_STRUCTURED)
# A string, up to the end of the text if it is not closed. The possessive quantifiers avoid backtracking.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
# Change of the nesting depth, by byte.
_DEPTH_CHANGES = np.zeros(256, np.int8)
_DEPTH_CHANGES[list(b"[{")] = 1
_DEPTH_CHANGES[list(b"]}")] = -1


def parse_settings(data: bytes, limits: Limits) -> dict[str, Any]:
    """Return the sampling settings in the JSON object `data`.

    Raises `RequestError` if the text is no JSON object, has a key twice, is too long, or is nested too deep.
    """
    check_length("sampling_parameters", len(data), "max_settings_bytes", limits, "bytes")
    return _parse_object("sampling_parameters", decode_utf8("sampling_parameters", data))


def _parse_object(name: str, text: str) -> dict[str, Any]:
    if (depth := _depth(text)) > MAX_JSON_DEPTH:
        raise RequestError(f"{name} is nested {depth} deep: at most {MAX_JSON_DEPTH} is allowed")
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name} is not valid JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError(f"{name} cannot be read: {shorten(str(error))}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{name} must be a JSON object, not {type(values).__name__}")
    return values


def params_from_settings(values: dict[str, Any], limits: Limits, caller: Caller) -> SamplingParams:
    """Return the sampling settings for `values`, which are settings by name. A number may be given as a string.

    Raises `RequestError` for invalid values.
    """
    unknown = sorted(set(values) - KNOWN)
    if unknown:
        raise RequestError(f"unknown sampling parameters {shorten(unknown)}: known are {', '.join(sorted(KNOWN))}")
    if values.get("prompt_logprobs") is not None:
        raise RequestError("this protocol has no output for prompt_logprobs: use amoeba.v1")
    given = {name: _converted(name, value) for name, value in values.items() if value is not None}
    constraints = [name for name in _STRUCTURED if name in given]
    if len(constraints) > 1:
        raise RequestError(f"{' and '.join(constraints)} are two names of one setting: send one of them")
    for name in constraints:
        given["structured"] = read_structured(name, given.pop(name))
    return checked_params(given, limits, caller)


def decode_utf8(name: str, data: bytes) -> str:
    """Return the text of UTF-8 bytes. Raises `RequestError` for other bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error


def read_structured(name: str, value: Any) -> StructuredOutput:
    """Return a constraint on the generated text. `value` is a dict with vLLM's keys, or the JSON text of this dict.

    Raises `RequestError` for other values.
    """
    if isinstance(value, str):
        value = _parse_object(name, value)
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {shorten(value)}")
    if unknown := sorted(set(value) - set(_STRUCTURED_KEYS)):
        raise RequestError(f"unknown keys {shorten(unknown)} of {name}: known are {', '.join(_STRUCTURED_KEYS)}")
    return StructuredOutput(**{_STRUCTURED_KEYS[key]: it for key, it in value.items() if it is not None})


def _converted(name: str, value: Any) -> Any:
    """Convert a string to the type of the setting `name`. In `logit_bias`, convert the keys to integers.

    Return other values unchanged. They are checked later.
    """
    if name == "logit_bias" and isinstance(value, dict):
        return {_number(name, token, int): bias for token, bias in value.items()}
    if not isinstance(value, str):
        return value
    if name in _INTEGERS:
        return _number(name, value, int)
    if name in _NUMBERS:
        return _number(name, value, float)
    if name in _FLAGS and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise RequestError(f"{name} must be a number, got {text[:50]!r}") from error


def _depth(text: str) -> int:
    """Return the nesting depth of the brackets in a JSON text. Brackets in strings do not count."""
    outside = np.frombuffer(_STRING.sub("", text).encode("utf-8", errors="replace"), np.uint8)
    return int(np.cumsum(_DEPTH_CHANGES[outside], dtype=np.int64).max(initial=0))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise RequestError("sampling_parameters has a key twice")
    return values


def _no_constant(text: str) -> Any:
    raise RequestError(f"sampling_parameters has {text}, which is not JSON: numbers must be finite")
