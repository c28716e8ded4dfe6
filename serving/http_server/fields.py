"""Fields that several HTTP endpoints share, and their conversion to sampling settings."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from amoeba_jax.errors import RequestError
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length, checked_params
from serving.grpc_server.settings_json import read_structured
from serving.http_server.errors import FieldError, field_error

M = TypeVar("M", bound=BaseModel)
# Pydantic makes an error for each unknown key, and for each invalid element of a list without `FailFast`.
_MAX_KEYS = 100


class Body(BaseModel):
    """Base of all request bodies. It refuses unknown fields and wrong types."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_KEYS:
            text = f"has {len(value)} keys: at most {_MAX_KEYS} are allowed"
            raise PydanticCustomError("too_many_keys", text)  # type: ignore[arg-type]
        return value


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Body):
    """Fields of all endpoints that generate text.

    The fields have the names of OpenAI's API. Fields that OpenAI's API lacks have the names of vLLM. A field that does
    not affect the text is accepted and ignored. `refuse_unsupported` refuses fields that would change the text but are
    not supported.
    """

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Fields without an effect on the text.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    # vLLM's fields.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Any = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    # Fields of this server.
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class Penalties(Body):
    """Fields of both `/v1/completions` and `/v1/chat/completions`."""

    n: int | None = None
    seed: int | None = None
    stop: Any = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None


_DIRECT = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words", "priority", "ttft_slo_s", "tpot_slo_s"),
)


async def read_body(request: Request, kind: type[M]) -> M:
    """Return the body of a request as an object of the class `kind`.

    Raises `RequestError` if the JSON is invalid, does not fit `kind`, has NaN or Infinity, or is nested deeper than 200
    levels (a limit of pydantic).
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Web pages of other sites can send other types without asking the browser.
    if media_type != "application/json":
        raise RequestError(f"the content type must be application/json, got {shorten(media_type)}")
    try:
        values = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {shorten(str(error), 200)}") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise field_error(error) from None


def refuse_unsupported(body: BaseModel, unsupported: dict[str, tuple[Any, ...]]) -> None:
    """Raise `FieldError` if a field asks for a feature that this server does not have.

    `unsupported` has the accepted values of each field to check, by the name of the field. For example,
    `{"length_penalty": (1.0,)}` refuses all values of `length_penalty` except 1.0 and null.
    """
    for name, harmless in unsupported.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise FieldError(name, f"is not supported by this server, got {shorten(value)}")


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,),
}


def sampling_params(body: Any, limits: Limits, caller: Caller, **more: Any) -> SamplingParams:
    """Return the sampling settings in a body. Raises `RequestError` for a value that is invalid or over a limit.

    `more` has settings by name that replace fields of the body. If a setting in `more` is None, it is ignored.
    """
    values = {name: value for name in _DIRECT if (value := getattr(body, name, None)) is not None}
    if (seed := getattr(body, "seed", None)) is not None:
        if not -(2**63) <= seed < 2**63:
            raise FieldError("seed", f"must be an integer of 64 bits, got {shorten(seed)}")
        values["seed"] = seed % 2**32
    if bias := getattr(body, "logit_bias", None):
        if not isinstance(bias, dict):
            raise FieldError("logit_bias", f"must be an object, got {shorten(bias)}")
        check_length("logit_bias", len(bias), "max_logit_bias", limits)
        values["logit_bias"] = {_token_id(token): value for token, value in bias.items()}
    if body.structured_outputs is not None:
        values["structured"] = read_structured("structured_outputs", body.structured_outputs)
    values |= {name: value for name, value in more.items() if value is not None}
    return checked_params(values, limits, caller)


def _token_id(text: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        raise FieldError("logit_bias", f"must have token ids as keys, got {shorten(text)}")
    return int(text)


def check_names(body: Any, limits: Limits) -> None:
    """Raise `RequestError` if a request's id or cache salt is too long, or if the id cannot be in a header."""
    if body.request_id and not (body.request_id.isascii() and body.request_id.isprintable()):
        raise FieldError("request_id", f"must have printable ASCII characters only, got {shorten(body.request_id)}")
    for name, limit in (("request_id", "max_id_chars"), ("cache_salt", "max_salt_chars")):
        check_length(name, len(getattr(body, name) or ""), limit, limits, "characters")


def check_stream(body: Any) -> None:
    """Raise `FieldError` for `stream_options` without a stream, and for fields that a stream does not support."""
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "needs stream=true")
    if body.prompt_logprobs is not None and body.stream:
        raise FieldError("prompt_logprobs", "needs stream=false")
