"""Random and mutated messages: the status blames the message, and the server keeps running."""

import contextlib
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import Live, LoopThread

from amoeba_jax import LLM
from amoeba_jax.client._proto import inference_pb2 as v1
from serving.grpc_server._proto import open_inference_pb2 as oip
from serving.grpc_server.config import Limits, ServerConfig
from serving.grpc_server.server import Server

pytestmark = pytest.mark.usefixtures("quick_compile")

SERVICES = {
    service.full_name: service
    for service in (*v1.DESCRIPTOR.services_by_name.values(), *oip.DESCRIPTOR.services_by_name.values())
}
# These methods end the test's server, change its instances or never return.
LEFT_OUT = {"Drain", "Transform", "WatchCluster", "Replicate", "Evict", "Migrate", "ScaleOut", "ScaleIn"}
METHODS = [
    (f"/{name}/{method.name}", method)
    for name, service in sorted(SERVICES.items())
    for method in service.methods
    if method.name not in LEFT_OUT
]
SEEDS = [
    v1.GenerateRequest(text="hello", params=v1.SamplingParams(max_tokens=4, stop=["x"])).SerializeToString(),
    v1.GenerateRequest(token_ids=v1.TokenIds(ids=[1, 2, 3]), params=v1.SamplingParams(n=2)).SerializeToString(),
    oip.ModelInferRequest(
        model_name="tiny-chat",
        inputs=[oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])],
        raw_input_contents=[b"\x01\0\0\0a"],
    ).SerializeToString(),
]
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    # A mutated length can ask for thousands of tokens.
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@pytest.fixture(scope="module")
def fuzzed(served_llm: LLM):
    """Yield one server for all messages."""
    loop = LoopThread()

    async def run() -> Server:
        server = Server(ServerConfig(port=0, metrics_port=None, limits=Limits(max_refusals_per_second=10_000)))
        await server.start()
        await server.attach(served_llm)
        return server

    server = loop.run(run())
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Live(server, served_llm, loop, channel)
    loop.run(server.stop())
    loop.close()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data) - 1))
        data[place] = draw(st.integers(0, 255))
    return bytes(data)


def send(channel: grpc.Channel, path: str, method: Any, data: bytes) -> grpc.StatusCode:
    if method.client_streaming:
        call = channel.stream_stream(path)(iter([data]), timeout=2)
    elif method.server_streaming:
        call = channel.unary_stream(path)(data, timeout=2)
    else:
        future = channel.unary_unary(path).future(data, timeout=2)
        return future.code()
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code()


@pytest.mark.parametrize("count", [150, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(0)
def test_no_message_breaks_the_server(fuzzed: Live, count: int):
    @settings(max_examples=count)
    @given(method=st.sampled_from(METHODS), data=st.one_of(st.binary(max_size=200), mutated()))
    def every_message_has_a_status(method: tuple[str, Any], data: bytes) -> None:
        path, described = method
        assert send(fuzzed.channel, path, described, data) in ALLOWED

    every_message_has_a_status()


def test_the_server_is_as_before(fuzzed: Live):
    fuzzed.check_idle()
