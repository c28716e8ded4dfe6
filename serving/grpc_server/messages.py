"""amoeba.v1 messages to and from what the engine takes and gives."""

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.front_door import Prompt
from serving.grpc_server.latest_output import num_tokens

MAX_STOP_STRINGS = 16
FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


def read_params(message: pb.SamplingParams) -> SamplingParams:
    """Sampling settings. Raises `RequestError` for a value out of range."""
    values = {field.name: value for field, value in message.ListFields()}
    if "allowed_token_ids" in values:
        values["allowed_token_ids"] = list(values["allowed_token_ids"].ids)
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    for name in ("stop", "stop_token_ids", "bad_words"):
        if name in values:
            values[name] = list(values[name])
    return checked_params(**values)


def checked_params(**values: object) -> SamplingParams:
    """`SamplingParams`, with the limits that only a server has. Raises `RequestError`."""
    params = SamplingParams(**values)  # type: ignore[arg-type]
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(params.stop)} strings: at most {MAX_STOP_STRINGS} may be given")
    return params


def read_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str) -> Prompt:
    """The prompt in a message's `oneof`. Raises `RequestError` where there is none."""
    kind = message.WhichOneof(oneof)  # type: ignore[arg-type]
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return list(message.token_ids.ids)  # type: ignore[union-attr]
    if kind == "chat" and message.chat.messages:
        return [{"role": m.role, "content": m.content} for m in message.chat.messages]
    raise RequestError("the prompt is empty: give a text, token ids or a conversation")


def response(before: RequestOutput | None, output: RequestOutput) -> pb.GenerateResponse:
    """What was added between two outputs of a request."""
    message = pb.GenerateResponse(request_id=output.request_id)
    old = before.outputs if before is not None else (None,) * len(output.outputs)
    for earlier, completion in zip(old, output.outputs, strict=True):
        ended = completion.finish_reason is not None and (earlier is None or earlier.finish_reason is None)
        if ended or len(completion.token_ids) > (len(earlier.token_ids) if earlier else 0):
            message.completions.append(_completion(earlier, completion))
    if output.finished:
        message.usage.CopyFrom(usage(output))
        for entry in output.prompt_logprobs or ():
            message.prompt_logprobs.append(_logprobs(entry))
    return message


def _completion(before: CompletionOutput | None, completion: CompletionOutput) -> pb.Completion:
    text, start = (len(before.text), len(before.token_ids)) if before else (0, 0)
    message = pb.Completion(
        index=completion.index,
        text=completion.text[text:],
        token_ids=completion.token_ids[start:],
        logprobs=[
            _logprobs(entry, token)
            for entry, token in zip((completion.logprobs or ())[start:], completion.token_ids[start:], strict=False)
        ],
        finish_reason=FINISH_REASONS.get(completion.finish_reason or "", pb.FINISH_REASON_UNSPECIFIED),
    )
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason
    return message


def _logprobs(entry: dict[int, Logprob] | None, first: int | None = None) -> pb.PositionLogprobs:
    """One position's entry, its own token first and the others by rank."""
    items = sorted((entry or {}).items(), key=lambda item: (item[0] != first, item[1].rank))
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(token_id=token, logprob=it.logprob, rank=it.rank, decoded_token=it.decoded_token or "")
            for token, it in items
        ]
    )


def usage(output: RequestOutput) -> pb.Usage:
    """Tokens and times of a request."""
    metrics: RequestMetrics = output.metrics
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=num_tokens(output),
        cached_tokens=metrics.num_cached_tokens,
        queue_s=metrics.queue_s,
        ttft_s=metrics.ttft_s,
        tpot_s=metrics.tpot_s,
        e2e_s=metrics.e2e_s,
        preemptions=metrics.num_preemptions,
    )
