"""Conversion between protobuf messages of amoeba.v1 and the objects of the engine."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.structured_output import StructuredOutput
from amoeba_jax.transform.options import PlacementModules
from amoeba_jax.transform.report import PlacementReport
from amoeba_jax.views import PlacementStatus
from serving.grpc_server.callers import Caller
from serving.grpc_server.calls import Chat, Prompt
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length, check_lists, checked_params
from sharding.placement import Placement

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
_MODULES: dict[int, PlacementModules] = {
    pb.PLACEMENT_MODULES_LAYER: "layer",
    pb.PLACEMENT_MODULES_ATTENTION: "attention",
    pb.PLACEMENT_MODULES_FFN: "ffn",
    pb.PLACEMENT_MODULES_KV: "kv",
}
_MODULE_NUMBERS = {name: number for number, name in _MODULES.items()}

# Most tokens and log-probabilities in one message: about 2 ms of work for the event loop, and 64 KiB.
_MAX_ENTRIES = 2048


def read_params(message: pb.SamplingParams, limits: Limits, caller: Caller) -> SamplingParams:
    """Return the sampling settings in a message.

    Raises `RequestError` for a value out of range or a list over its limit.
    """
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "allowed_token_ids" in values:
        values["allowed_token_ids"] = values["allowed_token_ids"].ids
    check_lists({name: value for name, value in values.items() if isinstance(value, Sized)}, limits)
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in values:
            values[name] = list(values[name])
    if "structured" in values:
        values["structured"] = _structured(values["structured"])
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return checked_params(values, limits, caller)


def _structured(message: pb.StructuredOutput) -> StructuredOutput:
    kind = message.WhichOneof("constraint")
    if kind is None:
        return StructuredOutput()  # raises the error
    fields: dict[str, Any] = {kind: list(message.choice.texts) if kind == "choice" else getattr(message, kind)}
    return StructuredOutput(**fields)


def read_prompt(
    message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str, limits: Limits, max_tokens: int
) -> Prompt:
    """Return the prompt in a message. Raises `RequestError` if the prompt is missing or over a limit.

    Args:
        oneof: name of the oneof in the message that has the fields `text`, `token_ids` and `chat`.
        max_tokens: maximum number of token ids.
    """
    kind = message.WhichOneof(oneof)  # type: ignore[arg-type]
    if kind == "text":
        check_length("the prompt", len(message.text), "max_prompt_chars", limits, "characters")
        return message.text
    if kind == "token_ids":
        ids = message.token_ids.ids  # type: ignore[union-attr]
        if len(ids) > max_tokens:
            raise RequestError(f"the prompt has {len(ids)} tokens: at most {max_tokens} may be given (max_model_len)")
        return list(ids)
    if kind == "chat" and message.chat.messages:
        check_length("the conversation", len(message.chat.messages), "max_chat_messages", limits, "messages")
        return Chat([{"role": m.role, "content": m.content} for m in message.chat.messages])
    raise RequestError("the prompt is empty: give a text, token ids or a conversation")


def responses(request_id: str, delta: RequestDelta, usage: "pb.Usage | None") -> Iterator[pb.GenerateResponse]:
    """Yield the messages with new output of a request: one message, or several messages if the output is long.

    Args:
        request_id: id that the client knows.
        delta: new output.
        usage: token counts and times of the request, to add to the last message. None: the request has not finished.
    """
    message, room = pb.GenerateResponse(request_id=request_id), _MAX_ENTRIES
    for entry in delta.prompt_logprobs:
        if room <= 0:
            yield message
            message, room = pb.GenerateResponse(request_id=request_id), _MAX_ENTRIES
        message.prompt_logprobs.append(_logprobs(entry, next(iter(entry or ()), None)))
        room -= 1 + len(entry or ())
    for completion in delta.completions:
        start, count = 0, len(completion.token_ids)
        while True:
            stop = start
            while stop < count and room > 0:
                room -= 1 + (0 if completion.logprobs is None else len(completion.logprobs[stop]))
                stop += 1
            ended = stop == count
            message.completions.append(_completion(completion, start, stop, ended))
            if ended:
                break
            yield message
            message, room, start = pb.GenerateResponse(request_id=request_id), _MAX_ENTRIES, stop
    if usage is not None:
        message.usage.CopyFrom(usage)
    yield message


def _completion(delta: CompletionDelta, start: int, stop: int, ended: bool) -> pb.Completion:
    """Return a message with the new tokens `start` to `stop - 1` of a sample.

    `ended` is whether this is the last message for `delta`. The last message also has the text and the finish reason.
    """
    message = pb.Completion(
        index=delta.index,
        token_ids=delta.token_ids[start:stop],
        logprobs=[
            _logprobs(entry, token)
            for entry, token in zip((delta.logprobs or ())[start:stop], delta.token_ids[start:stop], strict=False)
        ],
    )
    if not ended:
        return message
    message.text = delta.text
    message.finish_reason = FINISH_REASONS.get(delta.finish_reason or "", pb.FINISH_REASON_UNSPECIFIED)
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def _logprobs(entry: dict[int, Logprob] | None, first: int | None = None) -> pb.PositionLogprobs:
    """Return the log-probabilities at one position as a message: first the token `first`, then the others by rank."""
    items = sorted((entry or {}).items(), key=lambda item: (item[0] != first, item[1].rank))
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(token_id=token, logprob=it.logprob, rank=it.rank, decoded_token=it.decoded_token or "")
            for token, it in items
        ]
    )


def usage(delta: RequestDelta, completion_tokens: int) -> pb.Usage:
    """Return a message with the token counts and times of a finished request. `delta` is its last output."""
    metrics: RequestMetrics = delta.metrics
    return pb.Usage(
        prompt_tokens=delta.num_prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=metrics.num_cached_tokens,
        queue_s=metrics.queue_s,
        ttft_s=metrics.ttft_s,
        tpot_s=metrics.tpot_s,
        e2e_s=metrics.e2e_s,
        preemptions=metrics.num_preemptions,
    )


def read_layers(message: pb.ReplicateRequest | pb.EvictRequest | pb.MigrateRequest, num_layers: int) -> range:
    """Return the range of layers in a message. Raises `RequestError` if the model does not have these layers."""
    first, end = message.layers.first, message.layers.end
    if not first < end <= num_layers:
        given = f"[{first}, {end})" if message.HasField("layers") else "missing"
        raise RequestError(f"layers={given} must be [first, end) with first below end, and end at most {num_layers}")
    return range(first, end)


def read_index(name: str, value: int, limit: int) -> int:
    """Return the index `value` of a device or an instance. Raises `RequestError` if it is not below `limit`."""
    if value >= limit:
        raise RequestError(f"{name}={value} must be from 0 to {limit - 1}")
    return value


def read_modules(number: int) -> PlacementModules:
    """Return the part of a layer that an enum value stands for: all of it, attention, FFN or KV cache.

    Raises `RequestError` for an unknown number.
    """
    if (modules := _MODULES.get(number)) is None:
        known = ", ".join(f"{number} ({name})" for number, name in _MODULES.items())
        raise RequestError(f"modules={number} is not known: it must be one of {known}")
    return modules


def placement_message(placement: Placement) -> pb.Placement:
    """Return a message with a placement: the devices that compute each layer of an instance."""
    data = placement.to_dict()
    stages = [
        pb.PlacementStage(
            layers=_layers(stage["layers"]),
            modules=_MODULE_NUMBERS[stage.get("module", "layer")],  # type: ignore[arg-type]
            homes=[pb.Home(devices=devices) for devices in stage["homes"]],
        )
        for stage in data["stages"]
    ]
    return pb.Placement(head=pb.Home(devices=data["head"]), stages=stages)


def placement_report(report: PlacementReport) -> pb.PlacementReport:
    """Return a message with the report of a change of placement (layers copied, moved or removed)."""
    return pb.PlacementReport(
        kind=report.kind,
        instance=report.instance,
        device=report.device,
        layers=_layers(report.layers),
        seconds=report.seconds,
        copied_bytes=report.copied_bytes,
        shared_bytes=report.shared_bytes,
        kv_moved_bytes=report.kv_moved_bytes,
        device_bytes_delta=report.device_bytes_delta,
        steps=report.steps,
        recomputed=report.recomputed,
    )


def placement_status(status: PlacementStatus) -> pb.PlacementStatus:
    """Return a message with the progress of a change of placement (layers copied, moved or removed)."""
    return pb.PlacementStatus(
        kind=status.kind,
        instance=status.instance,
        device=status.device,
        layers=_layers(status.layers),
        state=status.state,
        layers_switched=status.layers_switched,
    )


def _layers(layers: Sequence[int]) -> pb.LayerRange:
    first, end = layers
    return pb.LayerRange(first=first, end=end)
