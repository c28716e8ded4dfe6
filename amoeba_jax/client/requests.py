"""Conversion from arguments of client calls to protobuf messages."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.errors import RequestError
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from amoeba_jax.structured_output import StructuredOutput
from amoeba_jax.valid_text import check_unicode

Messages = Sequence[Mapping[str, str]]
"""A conversation: messages with `role` and `content`."""
Prompt = str | Sequence[int] | Messages

_DEFAULTS = SamplingParams()
_LayersRequest = TypeVar("_LayersRequest", pb.ReplicateRequest, pb.EvictRequest, pb.MigrateRequest)
_INDEX_LIMIT = 2**31


def params_message(params: SamplingParams) -> pb.SamplingParams:
    """Convert sampling settings to a message. Settings with their default value are left out."""
    message = pb.SamplingParams()
    for field in fields(params):
        value = getattr(params, field.name)
        if value == getattr(_DEFAULTS, field.name):
            continue
        if field.name == "logit_bias":
            message.logit_bias.update(dict(value))
        elif field.name == "allowed_token_ids":
            message.allowed_token_ids.ids.extend(value)
        elif isinstance(value, StructuredOutput):
            message.structured.CopyFrom(_structured(value))
        elif isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    return message


def _structured(structured: StructuredOutput) -> pb.StructuredOutput:
    if structured.choice is not None:
        return pb.StructuredOutput(choice=pb.Choices(texts=structured.choice))
    return pb.StructuredOutput(**{structured.kind: getattr(structured, structured.kind)})


def generate_request(
    prompt: Prompt, params: SamplingParams | None, request_id: str, cache_salt: str
) -> pb.GenerateRequest:
    """Return the message of a generation request. The prompt is a text, a list of token ids or a conversation.

    Raises:
        RequestError: the prompt has another type, or a text is not valid Unicode.
    """
    message = pb.GenerateRequest(
        request_id=check_unicode(request_id, "request_id"),
        params=params_message(params or _DEFAULTS),
        cache_salt=check_unicode(cache_salt, "cache_salt"),
    )
    if isinstance(prompt, str):
        message.text = check_unicode(prompt, "the prompt")
    elif prompt and isinstance(prompt[0], Mapping):
        message.chat.CopyFrom(chat(prompt))  # type: ignore[arg-type]
    else:
        message.token_ids.SetInParent()
        try:
            message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise RequestError(f"a prompt must be a text, token ids or messages: {error}") from error
    return message


def chat(messages: Messages) -> pb.Chat:
    """Convert a conversation to a message.

    Raises `RequestError` if a role or content is missing or is not valid Unicode.
    """
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise RequestError(f"messages[{index}] needs a text as role and a text as content")
            check_unicode(message[key], f"messages[{index}].{key}")
    return pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])


def tokenize_request(text: str | Messages) -> pb.TokenizeRequest:
    """Return the message for a request to tokenize a text or a conversation.

    Raises `RequestError` if the text or a message is not valid.
    """
    if isinstance(text, str):
        return pb.TokenizeRequest(text=check_unicode(text, "the text"))
    return pb.TokenizeRequest(chat=chat(text))


_ENUMS = {
    "running": ("RUNNING_REQUESTS_", list(pb.RunningRequests.keys())),
    "order": ("CHANGE_ORDER_", list(pb.ChangeOrder.keys())),
    "modules": ("PLACEMENT_MODULES_", list(pb.PlacementModules.keys())),
}


def _enum_name(kind: str, value: str) -> str:
    prefix, names = _ENUMS[kind]
    if prefix + value.upper() not in names:
        known = ", ".join(name.removeprefix(prefix).lower() for name in names)
        raise RequestError(f"{kind}={value!r} is not known: it must be one of {known}")
    return prefix + value.upper()


def transform_request(
    tensor_parallel_size: int,
    devices: Sequence[int] | None,
    variant: str,
    release_weights: bool,
    layers_per_step: int | None,
    wait_for_programs: bool,
    running: str,
    order: str,
) -> pb.TransformRequest:
    """Return the message for a request to transform instances. The arguments are as in `Client.transform`.

    Raises `RequestError` for an unknown `variant`, `running` or `order`.
    """
    name = f"TRANSFORM_VARIANT_{variant.upper()}"
    if name not in pb.TransformVariant.keys() or variant == "unspecified":  # noqa: SIM118  (no mapping)
        known = [key.removeprefix("TRANSFORM_VARIANT_").lower() for key in pb.TransformVariant.keys()[1:]]
        raise RequestError(f"variant={variant!r} is not known: it must be one of {', '.join(known)}")
    return pb.TransformRequest(
        tensor_parallel_size=tensor_parallel_size,
        devices=devices,
        variant=name,
        release_weights=release_weights,
        layers_per_step=layers_per_step or 0,
        wait_for_programs=wait_for_programs,
        running=_enum_name("running", running),
        order=_enum_name("order", order),
    )


def layers_request(
    message: type[_LayersRequest], layers: range, device: int, instance: int, modules: str
) -> _LayersRequest:
    """Return a message of the type `message`: a request to replicate, evict or migrate layers.

    The other arguments are as in `Client.replicate`.

    Raises `RequestError` if an index is below 0, `layers` is not a range of consecutive layers, or `modules` is
    unknown.
    """
    if not isinstance(layers, range) or layers.step != 1 or not layers:
        raise RequestError("layers must be a range of at least one layer, such as range(5, 15)")
    return message(
        layers=pb.LayerRange(first=index("layers", layers.start), end=index("layers", layers.stop)),
        device=index("device", device),
        instance=index("instance", instance),
        modules=_enum_name("modules", modules),
    )


def index(name: str, value: int) -> int:
    """Check the index of a device, an instance or a layer, and return the index.

    `name` is used in the error message. Raises `RequestError` if the index is below 0 or too large.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INDEX_LIMIT:
        raise RequestError(f"{name}={shorten(value)} must be an integer from 0 to {_INDEX_LIMIT - 1}")
    return value
