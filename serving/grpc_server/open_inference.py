"""Service inference.GRPCInferenceService: the Open Inference Protocol with the extensions of Triton."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

import amoeba_jax
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import RequestDelta
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from serving.grpc_server._proto import open_inference_pb2 as pb
from serving.grpc_server._proto import open_inference_pb2_grpc as pb_grpc
from serving.grpc_server.calls import Call
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length
from serving.grpc_server.inference_service import time_left, trace_headers
from serving.grpc_server.open_inference_tensors import INPUTS, OUTPUTS, Inputs, Replies, read_inputs, wanted_outputs
from serving.grpc_server.output_coalescer import LAST_READ_S, DeltaSum
from serving.grpc_server.request_handler import RequestHandler, State
from serving.grpc_server.settings_json import decode_utf8, params_from_settings, parse_settings
from serving.grpc_server.statuses import SlowReaderError, UnknownModelError, status_of
from serving.grpc_server.writer import Writer

Context = grpc.aio.ServicerContext
Write = Callable[[pb.ModelInferResponse], Awaitable[None]]

VERSION = "1"
_PLATFORM = "amoeba_jax"
# Request parameters that are not sampling settings.
_ENVELOPE = frozenset({"timeout", "cache_salt", "triton_enable_empty_final_response"})
# Request parameters that override the same settings in the tensor `sampling_parameters`.
_SERVICE = ("priority", "ttft_slo_s", "tpot_slo_s")
_MAX_PARAMETERS = 64
# Most unfinished requests of one stream. The next request is read when one has ended.
_MAX_PER_STREAM = 1024
_DATA_TYPES = {
    "BYTES": pb.TYPE_STRING,
    "BOOL": pb.TYPE_BOOL,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}


@dataclass(frozen=True)
class _Infer:
    """Parsed request of the Open Inference Protocol.

    Attributes:
        id: id that the client chose, or "". Replies repeat it.
        streams: whether output is sent as soon as it is generated. False: one message at the end has the whole output.
        outputs: names of the output tensors.
        prefix: text to send before the output of each sample: the prompt, or "" if the client does not want it.
    """

    id: str
    call: Call
    streams: bool
    outputs: tuple[str, ...]
    prefix: str


@dataclass
class _Durations:
    """Number of requests, and the sum of their durations in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


class OpenInferenceService(pb_grpc.GRPCInferenceServiceServicer):
    """RPCs of the Open Inference Protocol. The model of the server has the version "1"."""

    def __init__(self, request_handler: RequestHandler):
        self._handler = request_handler
        self._success, self._fail, self._queue = _Durations(), _Durations(), _Durations()
        self._last_inference_ms = 0

    # Server and model

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Return whether the engine works."""
        return pb.ServerLiveResponse(live=self._handler.state is not State.DEAD)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Return whether the server accepts requests."""
        return pb.ServerReadyResponse(ready=self._ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Return whether the server accepts requests for a model."""
        known = self._ready and request.name == self._handler.backend.name and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=known)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Return the name and version of the server."""
        extensions = ["model_configuration", "model_repository", "schedule_policy", "statistics"]
        return pb.ServerMetadataResponse(name="amoeba-jax", version=amoeba_jax.__version__, extensions=extensions)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Return the names, types and shapes of a model's input and output tensors."""
        self._check_model(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform=_PLATFORM,
            inputs=[tensor(name=name, datatype=kind, shape=[1]) for name, kind in INPUTS.items()],
            outputs=[tensor(name=name, datatype=kind, shape=[-1]) for name, kind in OUTPUTS.items()],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Return the input and output tensors of a model, in Triton's form."""
        self._check_model(request.name, request.version)
        inputs = [
            pb.ModelInput(name=name, data_type=_DATA_TYPES[kind], dims=[1], optional=name != "text_input")
            for name, kind in INPUTS.items()
        ]
        outputs = [pb.ModelOutput(name=name, data_type=_DATA_TYPES[kind], dims=[-1]) for name, kind in OUTPUTS.items()]
        config = pb.ModelConfig(
            name=request.name,
            platform=_PLATFORM,
            backend=_PLATFORM,
            input=inputs,
            output=outputs,
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Return the number of requests of this protocol, and their durations."""
        if request.name:
            self._check_model(request.name, request.version)
        statistics = pb.InferStatistics(
            success=self._success.message(), fail=self._fail.message(), queue=self._queue.message()
        )
        model = pb.ModelStatistics(
            name=self._handler.backend.name,
            version=VERSION,
            last_inference=self._last_inference_ms,
            inference_count=self._success.count,
            execution_count=self._success.count,
            inference_stats=statistics,
        )
        return pb.ModelStatisticsResponse(model_stats=[model])

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Return the model of the server and its state.

        With `request.ready`, return the model only if the server accepts requests.
        """
        if request.repository_name:
            raise UnknownModelError("repository_name must be empty: this server has one repository, without a name")
        state = "READY" if self._ready else "UNAVAILABLE"
        index = pb.RepositoryIndexResponse.ModelIndex(name=self._handler.backend.name, version=VERSION, state=state)
        return pb.RepositoryIndexResponse(models=[index] if self._ready or not request.ready else [])

    @property
    def _ready(self) -> bool:
        return self._handler.state is State.READY

    def _check_model(self, name: str, version: str) -> None:
        if not name:
            raise UnknownModelError(f"the model has no name: this server has {self._handler.backend.name!r}")
        self._handler.check_model(name)
        if version not in ("", VERSION):
            raise UnknownModelError(f"version {version[:20]!r} is not served: the model has version {VERSION!r}")

    # Inference

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> None:
        """Generate text for a prompt, and send it in one message at the end."""
        infer = self._read(request, context)
        if infer.streams:
            raise RequestError("stream is true, but ModelInfer has one response: use ModelStreamInfer")
        await self._infer(infer, self._writer(context).write)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """Serve the requests of one stream at the same time. Messages of different requests may alternate.

        The call ends when the client has closed its side of the stream and all requests have ended.

        Raises:
            SlowReaderError: a request was refused, and the client does not read the error message.
        """
        one_writer, room, writer = asyncio.Lock(), asyncio.Semaphore(_MAX_PER_STREAM), self._writer(context)
        tasks: set[asyncio.Task[None]] = set()
        writes: set[asyncio.Task[None]] = set()

        async def write_alone(message: pb.ModelStreamInferResponse) -> None:
            async with one_writer:
                await writer.write(message)

        async def write(message: pb.ModelStreamInferResponse) -> None:
            # A started write must finish even if its request is cancelled, for example by its timeout: gRPC allows one
            # write at a time, and would refuse the error message that follows.
            task = asyncio.ensure_future(write_alone(message))
            writes.add(task)
            task.add_done_callback(written)
            await asyncio.shield(task)

        def written(task: asyncio.Task[None]) -> None:
            writes.discard(task)
            if not task.cancelled():
                task.exception()  # marks it as retrieved: `write` raises it

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            room.release()
            # With any other error the client has left.
            if not task.cancelled() and isinstance(task.exception(), SlowReaderError):
                with contextlib.suppress(RuntimeError):  # the call is already ending
                    whole.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as whole:
                async for request in request_iterator:
                    await room.acquire()
                    task = asyncio.ensure_future(self._stream_one(request, context, write))
                    del request  # frees a long message while this call waits for the next
                    tasks.add(task)
                    task.add_done_callback(ended)
                while tasks:
                    await asyncio.wait(tasks)
        except TimeoutError:
            raise SlowReaderError(
                f"the client has not read the refusal of a request for {LAST_READ_S:g} s: read faster"
            ) from None
        finally:
            for task in (*tasks, *writes):
                task.cancel()
            await asyncio.gather(*tasks, *writes, return_exceptions=True)

    async def _stream_one(
        self,
        request: pb.ModelInferRequest,
        context: Context,
        write_message: Callable[[pb.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        """Serve one request of a stream.

        If the request fails, send the error as a message, so that the other requests of the stream continue.

        Raises:
            SlowReaderError: the client does not read the message with the error.
        """

        async def write(response: pb.ModelInferResponse) -> None:
            await write_message(pb.ModelStreamInferResponse(infer_response=response))

        try:
            await self._infer(self._read(request, context), write)
            return
        except Exception as error:
            status, text = status_of(error)
        request_handler = self._handler
        name, given_id = request.model_name[:100], request.id[: request_handler.limits.max_id_chars]
        del request  # frees the message: the refusal may wait for a minute, for many requests at once
        last = pb.ModelInferResponse(model_name=name, model_version=VERSION, id=given_id)
        last.parameters["triton_final_response"].bool_param = True
        await request_handler.refusals.wait(request_handler.callers.caller(context).account, status)
        try:
            async with asyncio.timeout(LAST_READ_S):
                await write_message(pb.ModelStreamInferResponse(error_message=text, infer_response=last))
        except TimeoutError:
            raise SlowReaderError("the client does not read the refusal of its request") from None

    def _writer(self, context: Context) -> Writer:
        return Writer(context, self._handler.admission, self._handler.callers.caller(context).client)

    async def _infer(self, infer: _Infer, write: Write) -> None:
        name = self._handler.backend.name
        started_ns = time.monotonic_ns()

        replies, whole = Replies(infer.outputs, infer.call.params.n, infer.prefix), DeltaSum()

        async def send(delta: RequestDelta) -> None:
            if not infer.streams:
                whole.add(delta)
                if not delta.finished:
                    return
                delta = whole.take() or delta
            message = pb.ModelInferResponse(model_name=name, model_version=VERSION, id=infer.id)
            message.parameters["triton_final_response"].bool_param = delta.finished
            replies.add_outputs(message, delta)
            await write(message)
            if delta.finished and delta.metrics.queue_s is not None:
                self._queue.add(round(delta.metrics.queue_s * 1e9))

        try:
            await self._handler.serve(infer.call, send)
        except BaseException:
            self._fail.add(time.monotonic_ns() - started_ns)
            raise
        self._success.add(time.monotonic_ns() - started_ns)
        self._last_inference_ms = time.time_ns() // 1_000_000

    def _read(self, request: pb.ModelInferRequest, context: Context) -> _Infer:
        """Parse a request. Raises `UnknownModelError` for another model, and `RequestError` for an invalid request."""
        request_handler = self._handler
        limits, caller = request_handler.limits, request_handler.callers.caller(context)
        self._check_model(request.model_name, request.model_version)
        check_length("id", len(request.id), "max_id_chars", limits, "characters")
        inputs = read_inputs(request)
        outputs = wanted_outputs(request, inputs)
        text = decode_utf8("text_input", inputs.text)
        streams = inputs.flag("stream")
        params = params_from_settings(_settings(request, inputs, limits), limits, caller)
        excluded = inputs.flag("exclude_input_in_output", default=streams) or "text_output" not in outputs
        echo_bytes = 0 if excluded else params.n * len(inputs.text)
        _check_reply(params, streams, echo_bytes, limits)
        call = Call(
            name=request.id,
            prompt=text,
            params=params,
            caller=caller,
            timeout_s=_timeout_s(request, context),
            num_bytes=request.ByteSize() + echo_bytes,
            cache_salt=_cache_salt(request, limits),
            unique_name=False,  # clients of Triton may use an id again
            trace_headers=trace_headers(context),
        )
        return _Infer(request.id, call, streams, outputs, "" if excluded else text)


def _check_reply(params: SamplingParams, streams: bool, echo_bytes: int, limits: Limits) -> None:
    """Raise `RequestError` if the reply could be too long for one message.

    `echo_bytes` is the size of all copies of the prompt in the reply.
    """
    if echo_bytes > limits.max_echo_bytes:
        raise RequestError(
            f"the prompt before each of n={params.n} samples takes {echo_bytes} bytes of the reply: at most "
            f"{limits.max_echo_bytes} are allowed (max_echo_bytes). Set exclude_input_in_output to leave it out"
        )
    if streams:
        return
    entries = params.n * params.max_tokens * (1 + (0 if params.logprobs is None else 1 + params.logprobs))
    if entries > limits.max_reply_entries:
        raise RequestError(
            f"n={params.n} samples of max_tokens={params.max_tokens} with logprobs={params.logprobs} could be "
            f"{entries} tokens and log-probabilities in one reply: at most {limits.max_reply_entries} are allowed "
            "(max_reply_entries). Use ModelStreamInfer with stream for more"
        )


def _cache_salt(request: pb.ModelInferRequest, limits: Limits) -> str:
    if "cache_salt" not in request.parameters:
        return ""
    salt = _parameter("cache_salt", request.parameters["cache_salt"])
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a text, got {shorten(salt)}")
    check_length("cache_salt", len(salt), "max_salt_chars", limits, "characters")
    return salt


def _settings(request: pb.ModelInferRequest, inputs: Inputs, limits: Limits) -> dict[str, Any]:
    """Return the sampling settings of a request by name.

    If the request has the tensor `sampling_parameters`, the settings come from this tensor, except that request
    parameters for priority and SLOs (`_SERVICE`) override it. If not, all settings come from request parameters.
    """
    if len(request.parameters) > _MAX_PARAMETERS:
        raise RequestError(
            f"the request has {len(request.parameters)} parameters: at most {_MAX_PARAMETERS} are allowed"
        )
    parameters = {key: _parameter(key, value) for key, value in request.parameters.items()}
    data = inputs.values.get("sampling_parameters")
    if isinstance(data, bytes):
        values = parse_settings(data, limits)
        strangers = sorted(set(parameters) - _ENVELOPE - set(_SERVICE))
        if strangers:
            raise RequestError(f"request parameters {shorten(strangers)} and sampling_parameters: send one of them")
    else:
        values = {key: value for key, value in parameters.items() if key not in _ENVELOPE}
    # Clients of Triton send priority 0 if the user has set none.
    values |= {key: value for key, value in parameters.items() if key in _SERVICE and (value or key != "priority")}
    if values.get("logprobs") is None and (inputs.flag("return_logprobs") or inputs.flag("return_cumulative_logprob")):
        values["logprobs"] = 0
    return values


def _parameter(key: str, value: pb.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise RequestError(f"request parameter {key[:100]!r} has no value")
    return getattr(value, kind)


def _timeout_s(request: pb.ModelInferRequest, context: Context) -> float | None:
    """Return the time limit of a request in seconds, or None if there is no limit.

    The limit is the earlier of two times: the deadline of the call, and the parameter `timeout` of the request.
    """
    limits = [] if (left := time_left(context)) is None else [left]
    if "timeout" in request.parameters:
        timeout_us = _parameter("timeout", request.parameters["timeout"])
        if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or timeout_us < 0:
            raise RequestError(f"timeout must be microseconds, an integer of at least 0, got {shorten(timeout_us)}")
        if timeout_us:
            limits.append(timeout_us / 1e6)
    return min(limits, default=None)
