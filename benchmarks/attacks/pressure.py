"""Raw gRPC calls of attacks, a client that repeats calls, and counts of the answers."""

import asyncio
import itertools
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from amoeba_jax.client._proto import inference_pb2 as pb
from serving.grpc_server._proto import open_inference_pb2 as oip

INFERENCE, ADMIN, OPEN_INFERENCE = (
    "/amoeba.v1.InferenceService/",
    "/amoeba.v1.AdminService/",
    "/inference.GRPCInferenceService/",
)
# The client has no limits, so that the server must refuse.
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 2**22),
    ("grpc.absolute_max_metadata_size", 2**22),
    # Each channel has its own connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_CLIENT_STREAMS = frozenset({"ModelStreamInfer", "ServerReflectionInfo"})
_SERVER_STREAMS = _CLIENT_STREAMS | {"Generate", "WatchCluster", "Watch"}
_TEXT_CHARS = 200
# Text in a stream of the Open Inference Protocol for the status INTERNAL of other calls.
_INTERNAL = "internal error"
_CALLS_AT_MOST = 200_000


@dataclass(frozen=True)
class Call:
    """gRPC call with an encoded message. `path` names the RPC. `label` names the call in reports."""

    label: str
    path: str
    data: bytes
    timeout_s: float = 20.0


@dataclass(frozen=True)
class Answer:
    """Answer to a call.

    Attributes:
        status: name of the gRPC status, or "error message" for an error inside a stream.
        text: text of the error; "" if there is no error.
        num_bytes: bytes of the answer's messages.
    """

    status: str
    text: str
    num_bytes: int


@dataclass
class Tally:
    """Counts of answers.

    Attributes:
        statuses: number of answers by (label of the call, status).
        first_texts: beginning of the first error text by (label of the call, status).
        longest_text: length of the longest error text in characters, and the label of its call.
    """

    seconds: float = 0.0
    sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    first_texts: dict[tuple[str, str], str] = field(default_factory=dict)
    longest_text: tuple[int, str] = (0, "")

    def add(self, label: str, status: str, text: str = "") -> None:
        self.statuses[label, status] += 1
        if text:
            self.first_texts.setdefault((label, status), text[:_TEXT_CHARS])
            self.longest_text = max(self.longest_text, (len(text), label))

    def by_status(self) -> dict[str, int]:
        """Return the number of answers by status."""
        counts: Counter[str] = Counter()
        for (_, status), count in self.statuses.items():
            counts[status] += count
        return dict(counts.most_common())

    def report(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        rows = [
            {"call": label, "status": status, "count": count, "text": self.first_texts.get((label, status), "")}
            for (label, status), count in sorted(self.statuses.items())
        ]
        names = ("seconds", "sent", "bytes_sent", "bytes_received", "longest_text")
        return {name: getattr(self, name) for name in names} | {"by_status": self.by_status(), "answers": rows}


class Attacker:
    """gRPC client of an attack, with several connections. The attack lasts `seconds`. `tally` counts the answers."""

    def __init__(self, target: str, seconds: float, connections: int = 4):
        self.seconds = seconds
        self.target = target
        self.tally = Tally()
        self.info = pb.GetModelInfoResponse()
        self.channels = [grpc.aio.insecure_channel(target, OPTIONS) for _ in range(connections)]

    async def connect(self) -> None:
        """Store the server's description of its model in `self.info`. Raises `grpc.RpcError`."""
        self.info = await self.ask("GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse)

    async def close(self) -> None:
        """End all calls and connections."""
        for channel in self.channels:
            await channel.close()

    async def ask(self, method: str, message: Any, answer: Any) -> Any:
        """Call an RPC of `InferenceService` without counting it. Return its answer. Raises `grpc.RpcError`."""
        call = self.channels[0].unary_unary(
            INFERENCE + method, type(message).SerializeToString, response_deserializer=answer.FromString
        )
        return await call(message, timeout=60)

    async def flood(self, calls: Sequence[Call], at_once: int, until: float | None = None) -> None:
        """Send the calls in turn until the attack ends. At any time, `at_once` calls are open.

        The attack ends at the time `until` (`time.monotonic()`). None: it ends after `self.seconds`. It also ends after
        `_CALLS_AT_MOST` calls. Calls that are still open 5 s after the end are cancelled.
        """
        end = until or time.monotonic() + self.seconds
        turns = itertools.islice(itertools.cycle(calls), _CALLS_AT_MOST)

        async def send(channel: grpc.aio.Channel) -> None:
            while time.monotonic() < end and (call := next(turns, None)) is not None:
                await self.send(call, channel)

        # Open calls must not extend the attack much.
        with_end = asyncio.gather(*(send(self.channels[i % len(self.channels)]) for i in range(at_once)))
        try:
            async with asyncio.timeout(end - time.monotonic() + 5):
                await with_end
        except TimeoutError:
            pass

    async def send(self, call: Call, channel: grpc.aio.Channel) -> str:
        """Make one call, count its answer, and return the status of the answer."""
        self.tally.sent += 1
        self.tally.bytes_sent += len(call.data)
        try:
            answer = await exchange(channel, call)
        except asyncio.CancelledError:
            self.tally.add(call.label, "unanswered")
            raise
        self.tally.bytes_received += answer.num_bytes
        self.tally.add(call.label, answer.status, answer.text)
        return answer.status

    async def longest(self, build: Callable[[int], Call], largest: int) -> int:
        """Return the highest `max_tokens` of `largest`, `largest / 2`, `largest / 4` and so on that the server accepts.

        `build`: function that returns a call with the given `max_tokens`.
        """
        tokens = largest
        while tokens > 1:
            call = build(tokens)
            rpc = start(self.channels[0], Call(call.label, call.path, call.data, timeout_s=5))
            try:
                await (rpc if isinstance(rpc, grpc.aio.UnaryUnaryCall) else rpc.read())
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    break
            finally:
                rpc.cancel()
            tokens //= 2
        return tokens


async def exchange(channel: grpc.aio.Channel, call: Call) -> Answer:
    """Make one call and return its answer. An error message inside a stream counts as an error."""
    rpc, num_bytes, status, text = start(channel, call), 0, "OK", ""
    try:
        if isinstance(rpc, grpc.aio.UnaryUnaryCall):
            num_bytes = len(await rpc)
        else:
            async for data in rpc:
                num_bytes += len(data)
                if call.path.endswith("/ModelStreamInfer"):
                    text = oip.ModelStreamInferResponse.FromString(data).error_message or text
        if text:
            status = "INTERNAL" if _INTERNAL in text else "error message"
    except grpc.aio.AioRpcError as error:
        status, text = error.code().name, error.details() or ""
    finally:
        rpc.cancel()
    return Answer(status, text, num_bytes)


def start(channel: grpc.aio.Channel, call: Call) -> Any:
    """Start a call with a raw message. If the RPC takes a stream of requests, the stream has only this message."""
    method = call.path.rpartition("/")[2]
    if method in _CLIENT_STREAMS:

        async def requests() -> AsyncIterator[bytes]:
            yield call.data

        return channel.stream_stream(call.path)(requests(), timeout=call.timeout_s)
    if method in _SERVER_STREAMS:
        return channel.unary_stream(call.path)(call.data, timeout=call.timeout_s)
    return channel.unary_unary(call.path)(call.data, timeout=call.timeout_s)


def generate(label: str, params: pb.SamplingParams | None = None, *, timeout_s: float = 20.0, **fields: Any) -> Call:
    """Return a `Generate` call. `fields`: fields of the request. If they include no prompt, a short text is added."""
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["text"] = "Once upon a time"
    message = pb.GenerateRequest(params=params or pb.SamplingParams(max_tokens=2), **fields)
    return Call(label, INFERENCE + "Generate", message.SerializeToString(), timeout_s)


def infer(
    label: str,
    model: str,
    settings: str | bytes = '{"max_tokens": 2}',
    *,
    text: str = "Once upon a time",
    stream: bool | None = None,
    timeout_s: float = 20.0,
    **fields: Any,
) -> Call:
    """Return a call of the Open Inference Protocol: `ModelInfer` if `stream` is None, else `ModelStreamInfer`."""
    settings = settings.encode() if isinstance(settings, str) else settings
    tensor = oip.ModelInferRequest.InferInputTensor
    values = {"text_input": text.encode(), "sampling_parameters": settings}
    inputs = [tensor(name=name, datatype="BYTES", shape=[1]) for name in values]
    raw = [struct.pack("<I", len(value)) + value for value in values.values()]
    if stream is not None:
        inputs.append(tensor(name="stream", datatype="BOOL", shape=[1]))
        raw.append(bytes([stream]))
    inputs.extend(fields.pop("more_inputs", ()))
    raw.extend(fields.pop("more_raw", ()))
    message = oip.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=raw, **fields)
    method = "ModelInfer" if stream is None else "ModelStreamInfer"
    return Call(label, OPEN_INFERENCE + method, message.SerializeToString(), timeout_s)
