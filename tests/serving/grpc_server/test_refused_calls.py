"""Refused calls take almost no memory while their clients do not read the answer."""

import asyncio
import contextlib
import gc
import socket
import struct
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import grpc
import pytest
from live_server import TIMEOUT_S, Live, LoopThread, code_and_text

from amoeba_jax.errors import RequestError
from serving.grpc_server import open_inference
from serving.grpc_server._proto import open_inference_pb2 as oip
from serving.grpc_server._proto import open_inference_pb2_grpc as oip_grpc
from serving.grpc_server.auth_interceptor import AuthInterceptor
from serving.grpc_server.callers import Callers
from serving.grpc_server.config import Limits
from serving.grpc_server.open_inference import OpenInferenceService
from serving.grpc_server.refusals import Refusals
from serving.grpc_server.request_handler import RequestHandler
from serving.grpc_server.statuses import SlowReaderError
from serving.runtime.metrics import ServerMetrics

MIB = 2**20


class Context:
    """Context of a call without a token."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()


def stream_one(request: oip.ModelInferRequest, write: Callable[[Any], Awaitable[None]]) -> "asyncio.Task[None]":
    """Start a request that is refused because no model is loaded."""
    service = OpenInferenceService(RequestHandler(Limits(), ServerMetrics()))
    return asyncio.ensure_future(service._stream_one(request, cast(Any, Context()), write))


def test_a_refused_request_of_a_stream_is_let_go():
    async def run() -> None:
        writing, written = asyncio.Event(), []

        async def never(message: oip.ModelStreamInferResponse) -> None:
            written.append(message)
            writing.set()
            await asyncio.Event().wait()

        request = oip.ModelInferRequest(model_name="m" * MIB, id="i" * MIB)
        num_references = sys.getrefcount(request)
        task = stream_one(request, never)
        await asyncio.wait_for(writing.wait(), TIMEOUT_S)
        assert sys.getrefcount(request) == num_references
        (message,) = written
        assert message.ByteSize() < 1000
        assert message.infer_response.model_name == "m" * 100
        assert message.infer_response.id == "i" * Limits().max_id_chars
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_refusal_that_is_not_read_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_inference, "LAST_READ_S", 0.05)

    async def run() -> None:
        async def never(_: Any) -> None:
            await asyncio.Event().wait()

        with pytest.raises(SlowReaderError):
            await asyncio.wait_for(stream_one(oip.ModelInferRequest(model_name="m"), never), 30)

    asyncio.run(run())


def test_a_stream_whose_refusals_are_not_read_ends(start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_inference, "LAST_READ_S", 0.2)
    ended, stream_infer = asyncio.Event(), OpenInferenceService.ModelStreamInfer

    async def watched(self: OpenInferenceService, *args: Any) -> None:
        try:
            await stream_infer(self, *args)
        finally:
            ended.set()

    monkeypatch.setattr(OpenInferenceService, "ModelStreamInfer", watched)
    live = start()
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024))
    with grpc.insecure_channel(live.target, options) as channel:
        requests: Iterator[Any] = (oip.ModelInferRequest(model_name="m" * 1000) for _ in range(5000))
        answers = oip_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests, timeout=TIMEOUT_S)
        next(answers)
        live.loop.run(asyncio.wait_for(ended.wait(), TIMEOUT_S))
        code, text = code_and_text(lambda: list(answers))
    assert code is grpc.StatusCode.CANCELLED
    assert "has not read" in text
    live.check_idle()


class Message:
    """Message that supports weak references."""


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_nothing_of_a_refused_call_is_kept(loop: LoopThread, kind: str, monkeypatch: pytest.MonkeyPatch):
    """While the answer waits, neither gRPC nor this server keeps the bytes or the message."""
    data: list[bytes] = []
    messages: list[weakref.ref[Message]] = []
    waiting, go_on = asyncio.Event(), asyncio.Event()

    def read(given: bytes) -> Message:
        message = Message()
        data.append(given)
        messages.append(weakref.ref(message))
        return message

    async def refuse(request: Message, context: Any) -> None:
        assert isinstance(request, Message)
        raise RequestError("no")

    async def wait(*_: Any) -> None:
        waiting.set()
        await go_on.wait()

    async def run() -> None:
        refusals = Refusals(Limits())
        monkeypatch.setattr(refusals, "wait", wait)
        server = grpc.aio.server(interceptors=[AuthInterceptor(Callers(), refusals)])
        method = getattr(grpc, f"{kind}_rpc_method_handler")(refuse, read, None)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Call": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/test.Test/Call")()
            await call.write(b"x" * MIB)
            await call.done_writing()
            await asyncio.wait_for(waiting.wait(), TIMEOUT_S)
            gc.collect()
            num_references = sys.getrefcount(data[0])
            assert num_references == 2, "the list's and the argument's"
            assert messages[0]() is None
            go_on.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await server.stop(None)

    loop.run(run())


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
def test_calls_without_a_message_are_invalid(live: Live, method: str):
    call = live.channel.stream_stream(f"/amoeba.v1.InferenceService/{method}")
    code, text = code_and_text(lambda: list(call(iter([]), timeout=TIMEOUT_S)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message" in text


@pytest.mark.parametrize(("requests", "streams"), [(10, 1024), (512, 1600)])
def test_calls_of_a_connection_are_bounded(start: Callable[..., Live], requests: int, streams: int):
    """The server's first frame, HTTP/2 SETTINGS, contains the limit."""
    live = start(max_requests_per_client=requests)
    with socket.create_connection(("127.0.0.1", live.server.port), TIMEOUT_S) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        with contextlib.closing(connection.makefile("rb")) as file:
            header = file.read(9)
            settings = dict(struct.iter_unpack(">HI", file.read(int.from_bytes(header[:3], "big"))))
    assert header[3] == 4
    assert settings[3] == streams, "SETTINGS_MAX_CONCURRENT_STREAMS"
