"""Tensors of the Open Inference Protocol, with the names and shapes of Triton's vLLM backend."""

import json
import struct
from dataclasses import dataclass

from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import CompletionDelta, RequestDelta
from serving.grpc_server._proto import open_inference_pb2 as pb

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
# Most dimensions of a wrong shape that an error shows.
_MAX_SHOWN = 8
_CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}


@dataclass(frozen=True)
class Inputs:
    """Input tensors of a request, by name."""

    values: dict[str, bytes | bool]

    @property
    def text(self) -> bytes:
        """Value of `text_input`. Raises `RequestError` if it is missing."""
        text = self.values.get("text_input")
        if not isinstance(text, bytes):
            raise RequestError("the input tensor text_input is missing")
        return text

    def flag(self, name: str, default: bool = False) -> bool:
        """Return the value of a boolean tensor, or `default` if the request does not have it."""
        return bool(self.values.get(name, default))


def read_inputs(request: pb.ModelInferRequest) -> Inputs:
    """Return the input tensors of a request. Raises `RequestError` for an unknown, repeated or malformed tensor."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"there are {len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    values: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        kind = INPUTS.get(tensor.name)
        if kind is None:
            raise RequestError(f"unknown input tensor {tensor.name[:100]!r}: known are {', '.join(INPUTS)}")
        if tensor.name in values:
            raise RequestError(f"input tensor {tensor.name} is given twice")
        if tensor.datatype != kind:
            raise RequestError(f"input tensor {tensor.name} must be {kind}, got {tensor.datatype[:20]!r}")
        if len(tensor.shape) != 1 or tensor.shape[0] != 1:
            got = f"{len(tensor.shape)} dimensions, {list(tensor.shape[:_MAX_SHOWN])}"
            raise RequestError(f"input tensor {tensor.name} must have shape [1], got {got}")
        if not raw:
            values[tensor.name] = _from_contents(tensor, kind)
        elif tensor.HasField("contents"):
            raise RequestError(f"input tensor {tensor.name} has contents and raw_input_contents: send one of them")
        else:
            values[tensor.name] = _from_raw(tensor.name, kind, raw[index])
    return Inputs(values)


def _from_contents(tensor: pb.ModelInferRequest.InferInputTensor, kind: str) -> bytes | bool:
    present = {field.name: value for field, value in tensor.contents.ListFields()}
    values = present.get(_CONTENTS[kind], ())
    if len(present) != 1 or len(values) != 1:
        raise RequestError(f"input tensor {tensor.name} must have one element in {_CONTENTS[kind]}")
    return values[0]


def _from_raw(name: str, kind: str, data: bytes) -> bytes | bool:
    if kind == "BOOL":
        if data not in (b"\0", b"\1"):
            raise RequestError(f"input tensor {name} must be one byte, 0 or 1, in raw_input_contents")
        return data == b"\1"
    if len(data) < 4 or len(data) != 4 + struct.unpack_from("<I", data)[0]:
        raise RequestError(
            f"input tensor {name} must be one element in raw_input_contents, its length as 4 bytes before it: "
            f"got {len(data)} bytes that do not match"
        )
    return data[4:]


def wanted_outputs(request: pb.ModelInferRequest, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the output tensors to send.

    These are `text_output` and the outputs that input tensors ask for (`return_logprobs` asks for `logprobs`). If the
    request lists outputs, only outputs in the list are sent. Raises `RequestError` if the list has an unknown name.
    """
    if len(request.outputs) > len(OUTPUTS):
        raise RequestError(f"{len(request.outputs)} outputs are listed: there are {len(OUTPUTS)}, {', '.join(OUTPUTS)}")
    listed = [tensor.name for tensor in request.outputs]
    for name in listed:
        if name not in OUTPUTS:
            raise RequestError(f"unknown output tensor {name[:100]!r}: known are {', '.join(OUTPUTS)}")
    names = ["text_output", *(name for name in OUTPUTS if inputs.flag(f"return_{name}"))]
    return tuple(name for name in names if not listed or name in listed)


class Replies:
    """Builder of the output tensors in the messages of one request.

    Args:
        names: names of the outputs.
        num_samples: number of samples. Each output has one element for each sample, except `num_input_tokens`, which
            has one element.
        prefix: text before the output of each sample, in the first message only.
    """

    def __init__(self, names: tuple[str, ...], num_samples: int, prefix: str):
        self._names = names
        self._prefix = prefix
        self._ended = ["null"] * num_samples
        self._cumulative = [0.0] * num_samples

    def add_outputs(self, message: pb.ModelInferResponse, delta: RequestDelta) -> None:
        """Add the tensors with the new output `delta` to a message."""
        new: list[CompletionDelta | None] = [None] * len(self._ended)
        for completion in delta.completions:
            new[completion.index] = completion
            self._cumulative[completion.index] = completion.cumulative_logprob or 0.0
            if completion.finish_reason is not None:
                self._ended[completion.index] = completion.finish_reason
        for name in self._names:
            shape = [1] if name == "num_input_tokens" else [len(new)]
            message.outputs.add(name=name, datatype=OUTPUTS[name], shape=shape)
            message.raw_output_contents.append(self._encode(name, new, delta.num_prompt_tokens))
        self._prefix = ""

    def _encode(self, name: str, new: list[CompletionDelta | None], num_prompt_tokens: int) -> bytes:
        match name:
            case "text_output":
                return _pack_texts([self._prefix + (it.text if it else "") for it in new])
            case "finish_reason":
                return _pack_texts(self._ended)
            case "logprobs":
                return _pack_texts([_logprobs_json(it) for it in new])
            case "cumulative_logprob":
                return struct.pack(f"<{len(new)}f", *self._cumulative)
            case "num_input_tokens":
                return struct.pack("<I", num_prompt_tokens)
            case "num_output_tokens":
                return struct.pack(f"<{len(new)}I", *(len(it.token_ids) if it else 0 for it in new))
        raise AssertionError(f"no output {name}")


def _logprobs_json(delta: CompletionDelta | None) -> str:
    """Return the log-probabilities of one sample as JSON: a list with one object for each new token.

    If there is no new token, the list is empty. If the request did not ask for log-probabilities, return `null`.
    """
    if delta is None:
        return "[]"
    if delta.logprobs is None:
        return "null"
    return json.dumps(
        [
            {
                str(token): {"logprob": it.logprob, "rank": it.rank, "decoded_token": it.decoded_token}
                for token, it in entry.items()
            }
            for entry in delta.logprobs
        ]
    )


def _pack_texts(texts: list[str]) -> bytes:
    encoded = [text.encode("utf-8", errors="replace") for text in texts]
    return b"".join(struct.pack("<I", len(data)) + data for data in encoded)
