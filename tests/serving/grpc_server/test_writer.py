"""Unread unary answers: the server waits, aborts the call, and counts the bytes while gRPC keeps them."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from harness import registry_of
from live_server import TIMEOUT_S, Live, code_and_text, wait_until

from amoeba_jax.client._proto import inference_pb2 as pb
from serving.grpc_server import output_coalescer, writer
from serving.grpc_server._proto import open_inference_pb2 as oip

pytestmark = pytest.mark.usefixtures("quick_compile")
# These buffers are smaller than an answer.
OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024))
NUM_SAMPLES, PROMPT = 32, b"x" * 3000
ECHO_BYTES = NUM_SAMPLES * len(PROMPT)


def infer() -> tuple[str, bytes]:
    """Return the method and bytes of a request whose samples repeat the prompt."""
    request = oip.ModelInferRequest(model_name="tiny-chat")
    for name, value in (("text_input", PROMPT), ("sampling_parameters", b'{"n": %d, "max_tokens": 1}' % NUM_SAMPLES)):
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    return "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString()


def detokenize() -> tuple[str, bytes]:
    request = pb.DetokenizeRequest(token_ids=[200] * 4000)
    return "/amoeba.v1.InferenceService/Detokenize", request.SerializeToString()


@pytest.fixture
def unread() -> Iterator[Callable[[Live, tuple[str, bytes]], Any]]:
    """Yield a function that sends a call and does not read the answer."""
    channels = []

    def send(live: Live, call: tuple[str, bytes]) -> Any:
        channels.append(grpc.insecure_channel(live.target, OPTIONS))
        return channels[-1].stream_stream(call[0])(iter([call[1]]), timeout=TIMEOUT_S)

    yield send
    for channel in channels:
        channel.close()


@pytest.mark.slow
def test_an_answer_that_is_not_read_belongs_to_its_request(start: Callable[..., Live], unread: Any):
    """The request stays open until its answer is read, as with a stream."""
    live = start()
    admission, call = live.server.request_handler.admission, unread(live, infer())
    wait_until(lambda: bool(admission.ids) and admission.requests_by_class.total() == 0)
    wait_until(lambda: not registry_of(live.llm).ids)
    time.sleep(0.3)
    assert len(admission.ids) == 1
    assert admission._bytes_of.total() > ECHO_BYTES, "what is to be repeated is counted from the start"
    (answer,) = call
    assert len(answer) > ECHO_BYTES
    assert call.code() is grpc.StatusCode.OK
    live.check_idle()
    assert not admission._bytes_of


def test_an_answer_that_is_not_read_is_given_up_and_counted(
    start: Callable[..., Live], unread: Any, monkeypatch: pytest.MonkeyPatch
):
    """gRPC keeps the answer until the client reads it or leaves."""
    monkeypatch.setattr(output_coalescer, "LAST_READ_S", 0.2)
    live = start(max_client_bytes=ECHO_BYTES)
    handler = live.server.request_handler
    first, second = unread(live, infer()), None
    wait_until(lambda: bool(handler.admission.ids))
    live.loop.run(asyncio.wait_for(handler._idle.wait(), TIMEOUT_S))
    assert not handler.admission._requests_of
    assert ECHO_BYTES < handler.admission._bytes_of.total() < 2 * ECHO_BYTES
    code, text = code_and_text(lambda: list(live.generate(text="x")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "unread replies" in text
    assert "max_client_bytes" in text
    code, text = code_and_text(lambda: list(first))
    assert code is grpc.StatusCode.CANCELLED
    assert "has not read the end of its request" in text
    wait_until(lambda: not handler.admission._bytes_of)
    second = unread(live, infer())
    wait_until(lambda: handler.admission._bytes_of.total() > 0 and not handler.admission.ids)
    second.cancel()
    wait_until(lambda: not handler.admission._bytes_of)
    live.check_idle()


def test_text_of_tokens_that_is_not_read_is_given_up_and_counted(
    start: Callable[..., Live], unread: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writer, "LAST_READ_S", 0.2)
    live = start()
    handler, text = live.server.request_handler, "y" * 300_000

    async def decode(*_: Any) -> str:
        return text

    monkeypatch.setattr(handler, "detokenize", decode)
    call = unread(live, detokenize())
    wait_until(lambda: bool(handler.admission.ids))
    live.loop.run(asyncio.wait_for(handler._idle.wait(), TIMEOUT_S))
    assert handler.admission._bytes_of.total() > len(text)
    code, said = code_and_text(lambda: list(call))
    assert code is grpc.StatusCode.CANCELLED
    assert "has not read its answer" in said
    wait_until(lambda: not handler.admission._bytes_of)
    assert live.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1]), timeout=TIMEOUT_S).text == text
    live.check_idle()
