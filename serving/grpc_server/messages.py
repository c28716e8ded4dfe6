"""Conversion between messages of amoeba.v1 and the objects of the engine."""

from collections.abc import Iterator, Sized
from typing import Any

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller
from serving.grpc_server.calls import Prompt
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length, check_lists, checked_params

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


# Most tokens and log-probabilities in one message: about 2 ms of work for the event loop, and 64 KiB.
_MAX_ENTRIES = 2048


def read_params(message: pb.SamplingParams, limits: Limits, caller: Caller) -> SamplingParams:
    """Return sampling settings. Raise `RequestError` for a value out of range or a list over its limit."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "allowed_token_ids" in values:
        values["allowed_token_ids"] = values["allowed_token_ids"].ids
    check_lists({name: value for name, value in values.items() if isinstance(value, Sized)}, limits)
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in values:
            values[name] = list(values[name])
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return checked_params(values, limits, caller)


def read_prompt(
    message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str, limits: Limits, max_tokens: int
) -> Prompt:
    """Return the prompt of a message. Raise `RequestError` if the prompt is missing or over a limit.

    Args:
        oneof: name of the message's group of alternative fields `text`, `token_ids` and `chat`.
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
        return [{"role": m.role, "content": m.content} for m in message.chat.messages]
    raise RequestError("the prompt is empty: give a text, token ids or a conversation")


def responses(request_id: str, delta: RequestDelta, usage: "pb.Usage | None") -> Iterator[pb.GenerateResponse]:
    """Yield the messages for new output of a request: one message, or several for long output.

    Args:
        request_id: id that the client knows.
        delta: new output.
        usage: usage for the last message of a finished request. None: the request continues.
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
    """Return the message for new tokens `start` to `stop - 1`. Only the last message (`ended`) has the text and the
    finish reason."""
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
    """Return the entries of one position: first the token at this position, then the others by rank."""
    items = sorted((entry or {}).items(), key=lambda item: (item[0] != first, item[1].rank))
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(token_id=token, logprob=it.logprob, rank=it.rank, decoded_token=it.decoded_token or "")
            for token, it in items
        ]
    )


def usage(delta: RequestDelta, completion_tokens: int) -> pb.Usage:
    """Return tokens and times of a finished request."""
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
