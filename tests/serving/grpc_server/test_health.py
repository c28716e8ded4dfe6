"""Health, readiness and reflection for generic gRPC clients."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from deaf_peer import DeafPeer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import engine_of, in_dispatcher, registry_of
from live_server import TIMEOUT_S, Live, code_and_text, wait_until

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.errors import EngineClosedError, EngineStuckError
from amoeba_jax.tokenizer import Tokenizer
from serving.grpc_server.request_handler import State
from serving.grpc_server.server import ADMIN, INFERENCE, OPEN_INFERENCE

pytestmark = pytest.mark.usefixtures("quick_compile")

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def check(live: Live, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(live.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status


def test_ready_once_a_model_is_attached(start: Callable[..., Live]):
    live = start(attach=False)
    assert check(live, "") == SERVING
    assert {check(live, service) for service in (INFERENCE, ADMIN, OPEN_INFERENCE)} == {NOT_SERVING}
    listed = health_pb2_grpc.HealthStub(live.channel).List(health_pb2.HealthListRequest(), timeout=TIMEOUT_S).statuses
    statuses = {service: listed[service].status for service in ("", INFERENCE, ADMIN, OPEN_INFERENCE)}
    assert statuses == {"": SERVING, INFERENCE: NOT_SERVING, ADMIN: NOT_SERVING, OPEN_INFERENCE: NOT_SERVING}
    watch = health_pb2_grpc.HealthStub(live.channel).Watch(
        health_pb2.HealthCheckRequest(service=INFERENCE), timeout=TIMEOUT_S
    )
    assert next(watch).status == NOT_SERVING
    live.loop.run(live.server.attach(live.llm))
    assert next(watch).status == SERVING
    assert {check(live, service) for service in ("", INFERENCE, ADMIN, OPEN_INFERENCE)} == {SERVING}
    live.loop.run(live.server.drain(0))
    assert next(watch).status == NOT_SERVING
    assert check(live, "") == SERVING
    watch.cancel()
    code, _ = code_and_text(lambda: check(live, "no.such.Service"))
    assert code is grpc.StatusCode.NOT_FOUND


def test_event_loop_does_not_measure_the_tokenizer(start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch):
    """The measurement takes up to a second. It runs once, in another thread."""
    live, threads = start(attach=False), list[int]()

    def measure(_: Tokenizer) -> int:
        threads.append(threading.get_ident())
        return 10

    monkeypatch.setattr(Tokenizer, "longest_token_chars", property(measure))

    async def attach() -> int:
        await live.server.attach(live.llm)
        return threading.get_ident()

    loop_thread = live.loop.run(attach())
    assert len(threads) == 1
    assert loop_thread not in threads


def test_vocabulary_for_constraints_is_loaded_before_the_start(
    start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
):
    """Loading the vocabulary blocks all threads."""
    live = start(attach=False)
    registry = registry_of(live.llm)
    monkeypatch.setattr(registry, "_grammars", None)
    live.loop.run(live.server.attach(live.llm))
    assert registry.grammars()._tokens is not None


def test_not_ready_while_an_admin_drains_it(start: Callable[..., Live]):
    live = start()
    stream = live.generate(text="x", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    next(stream)
    drain = live.admin.Drain.future(pb.DrainRequest(), timeout=TIMEOUT_S)
    wait_until(lambda: live.server.request_handler.state is State.DRAINING)
    wait_until(lambda: {check(live, service) for service in (INFERENCE, ADMIN, OPEN_INFERENCE)} == {NOT_SERVING})
    assert check(live, "") == SERVING
    stream.cancel()
    assert drain.result().aborted == 0


WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture
def deaf() -> Iterator[Callable[[int], DeafPeer]]:
    """Yield a function that connects a peer to a port. The peer watches all services and reads no answer."""
    peers: list[DeafPeer] = []

    def connect(port: int) -> DeafPeer:
        peers.append(DeafPeer(port))
        for service in ("", INFERENCE, ADMIN, OPEN_INFERENCE):
            peers[-1].call(WATCH, health_pb2.HealthCheckRequest(service=service).SerializeToString())
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


def test_a_watcher_that_takes_no_answer_holds_nobody_up(
    start: Callable[..., Live], deaf: Callable[[int], DeafPeer], served_model: Path, compile_cache: str
):
    with LLM(served_model, device_memory="32MiB", progress=False, compile_cache=compile_cache) as llm:
        live = start(llm, attach=False)
        deaf(live.server.port)
        watch = health_pb2_grpc.HealthStub(live.channel).Watch(
            health_pb2.HealthCheckRequest(service=INFERENCE), timeout=TIMEOUT_S
        )
        assert next(watch).status == NOT_SERVING
        live.loop.run(asyncio.wait_for(live.server.attach(llm, 0.1), TIMEOUT_S))
        assert next(watch).status == SERVING
        assert {check(live, service) for service in ("", INFERENCE, ADMIN, OPEN_INFERENCE)} == {SERVING}
        live.check_idle()
        deaf(live.server.port)
        in_dispatcher(llm, setattr, engine_of(llm), "advance", lambda: 1 / 0)
        with contextlib.suppress(EngineClosedError):
            llm.generate("x")
        assert next(watch).status == NOT_SERVING
        wait_until(lambda: check(live, "") == NOT_SERVING)


def test_a_watcher_that_takes_no_answer_does_not_hold_up_the_end(
    start: Callable[..., Live], deaf: Callable[[int], DeafPeer]
):
    live = start()
    deaf(live.server.port).call("/amoeba.v1.AdminService/WatchCluster")
    live.loop.run(asyncio.wait_for(live.server.drain(0), TIMEOUT_S))
    assert check(live, INFERENCE) == NOT_SERVING
    live.loop.run(asyncio.wait_for(live.server.stop(), TIMEOUT_S))


def test_drained_while_it_loads_it_does_not_serve(start: Callable[..., Live]):
    live = start(attach=False)
    assert live.admin.Drain(pb.DrainRequest(), timeout=TIMEOUT_S).aborted == 0
    live.loop.run(live.server.attach(live.llm))
    assert {check(live, service) for service in (INFERENCE, ADMIN, OPEN_INFERENCE)} == {NOT_SERVING}
    code, text = code_and_text(lambda: list(live.generate(text="x")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in text


def test_engine_that_dies_is_seen(start: Callable[..., Live], served_model, compile_cache: str):
    settings = {"device_memory": "32MiB", "progress": False, "compile_cache": compile_cache}
    with LLM(served_model, **settings) as llm:
        live = start(llm)
        watch = health_pb2_grpc.HealthStub(live.channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(watch).status == SERVING
        stream = live.generate(text="x", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
        next(stream)

        def fail() -> bool:
            raise RuntimeError("the device is gone: /tmp/somewhere at 0x7f00aabbcc")

        llm._dispatcher.call(setattr, engine_of(llm), "advance", fail)
        code, text = code_and_text(lambda: list(stream))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "device" not in text
        assert next(watch).status == NOT_SERVING
        assert check(live, INFERENCE) == NOT_SERVING
        code, _ = code_and_text(lambda: list(live.generate(text="x")))
        assert code is grpc.StatusCode.UNAVAILABLE
        watch.cancel()


@pytest.fixture
def stuck(served_model: Path, compile_cache: str) -> Iterator[tuple[LLM, threading.Event, threading.Event]]:
    """Yield an engine, an event that blocks its thread, and an event that releases the thread."""
    settings = {"device_memory": "32MiB", "progress": False, "compile_cache": compile_cache}
    with LLM(served_model, max_num_seqs=2, **settings) as llm:
        llm.warmup()  # compilation would exceed the tests' limit
        block, release = threading.Event(), threading.Event()
        advance = engine_of(llm).advance

        def blocking() -> bool:
            if block.is_set():
                release.wait(TIMEOUT_S)
            return advance()

        in_dispatcher(llm, setattr, engine_of(llm), "advance", blocking)
        yield llm, block, release
        release.set()


@pytest.mark.slow
def test_engine_that_is_stuck_is_seen(start: Callable[..., Live], stuck: tuple):
    """The engine's thread is alive, in a call that does not return."""
    llm, block, _ = stuck
    live = start(llm, engine_timeout_s=3)
    watch = health_pb2_grpc.HealthStub(live.channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert next(watch).status == SERVING
    stream = live.generate(text="x", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    next(stream)
    block.set()
    code, text = code_and_text(lambda: list(stream))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "the engine has failed" in text
    assert next(watch).status == NOT_SERVING
    assert {check(live, service) for service in ("", INFERENCE, ADMIN, OPEN_INFERENCE)} == {NOT_SERVING}
    code, _ = code_and_text(lambda: list(live.generate(text="x")))
    assert code is grpc.StatusCode.UNAVAILABLE
    code, _ = code_and_text(lambda: live.admin.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert isinstance(live.server.dead.result(), EngineStuckError)
    assert "3 s" in str(live.server.dead.result())
    watch.cancel()


def test_engine_that_is_busy_is_not_stuck(start: Callable[..., Live], stuck: tuple):
    """The engine answers the monitor late, as it does during compilation."""
    llm, block, release = stuck
    live = start(llm, interval_s=0.01)
    stream = live.generate(text="x", params=pb.SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    next(stream)
    block.set()
    wait_until(lambda: not llm._dispatcher._calls.empty())  # the monitor's call waits
    assert check(live, INFERENCE) == SERVING
    release.set()
    assert sum(len(message.completions[0].token_ids) for message in stream) > 0
    assert check(live, INFERENCE) == SERVING
    live.check_idle()


class ReflectingClient:
    """Client without .proto files. It gets messages and methods from the server."""

    def __init__(self, channel: grpc.Channel):
        self._channel = channel
        self._stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        self._pool = descriptor_pool.DescriptorPool()

    def _ask(self, **request: str) -> reflection_pb2.ServerReflectionResponse:
        answers = self._stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
        return next(answers)

    @property
    def services(self) -> list[str]:
        return [service.name for service in self._ask(list_services="").list_services_response.service]

    def call(self, service: str, method: str, **fields: object) -> list:
        for file in self._ask(file_containing_symbol=service).file_descriptor_response.file_descriptor_proto:
            self._pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
        described = self._pool.FindServiceByName(service).methods_by_name[method]
        request, response = (
            message_factory.GetMessageClass(kind) for kind in (described.input_type, described.output_type)
        )
        kind = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        call = kind(f"/{service}/{method}", request.SerializeToString, response.FromString)
        answer = call(request(**fields), timeout=TIMEOUT_S)
        return list(answer) if described.server_streaming else [answer]


def test_reflection_is_enough_to_call_every_protocol(live: Live):
    client = ReflectingClient(live.channel)
    assert {INFERENCE, ADMIN, OPEN_INFERENCE, "grpc.health.v1.Health"} <= set(client.services)
    answers = client.call(INFERENCE, "Generate", text="hello", params={"temperature": 0, "max_tokens": 8})
    text = "".join(completion.text for answer in answers for completion in answer.completions)
    expected = live.llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))[0]
    assert text == expected.outputs[0].text
    assert ReflectingClient(live.channel).call(OPEN_INFERENCE, "ServerReady")[0].ready
    live.check_idle()
