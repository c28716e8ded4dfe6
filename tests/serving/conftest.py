"""Tiny text models, servers over one model with access to their internals, and a compile cache for tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from executor_harness import CACHE, PAGE, SLOTS, Harness, JaxHarness, SimHarness
from live_server import Live, LoopThread
from tiny_models import byte_model, tiny_model

from amoeba_jax import LLM
from serving.grpc_server.config import Limits, ServerConfig
from serving.grpc_server.server import Server
from serving.grpc_server.tracing import Tracing
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues text and has no chat template."""
    return byte_model(tmp_path_factory.mktemp("models") / "text", chat_template=None)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a chat template."""
    return byte_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(autouse=True)
def private_cache(compile_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tests out of the user's cache. All processes share one cache, so that equal programs compile once."""
    path = Path(compile_cache).parent
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer that takes text and conversations."""
    return byte_model(tmp_path_factory.mktemp("served") / "tiny-chat")


@pytest.fixture(scope="session")
def served_llm(served_model: Path, compile_cache: str) -> Iterator[LLM]:
    """An LLM with two instances of one device each."""
    with LLM(
        served_model,
        num_devices=2,
        tensor_parallel_size=1,
        device_memory="64MiB",
        max_num_seqs=4,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


Start = Callable[..., Live]


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The event loop of all servers. gRPC's event loops share a wake-up, which can get lost when a loop ends."""
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def start(served_llm: LLM, loop: LoopThread) -> Iterator[Start]:
    """Function that starts a server over the LLM. Its keywords include fields of `ServerConfig` and `Limits`."""
    stack: list[Live] = []

    def start_one(
        llm: LLM = served_llm,
        attach: bool = True,
        interval_s: float = 0.1,
        scheduling: SchedulingConfig | None = None,
        tracing: Tracing | None = None,
        **settings: Any,
    ) -> Live:
        limit_names = Limits.__dataclass_fields__
        limits = Limits(
            **{
                "max_refusals_per_second": 10_000,  # most tests are about refusals
                **{name: settings.pop(name) for name in list(settings) if name in limit_names},
            }
        )
        config = ServerConfig(**{"port": 0, "metrics_port": None, "limits": limits, **settings})

        async def run() -> Server:
            server = Server(config, tracing)
            await server.start()
            return server

        server = loop.run(run())
        scheduler = Scheduling(llm, scheduling, server.metrics) if scheduling is not None else None
        if attach:
            loop.run(server.attach(llm, interval_s, scheduler))
        live = Live(server, llm, loop, grpc.insecure_channel(f"127.0.0.1:{server.port}"), scheduler)
        stack.append(live)
        return live

    yield start_one
    for live in stack:
        live.channel.close()
        live.loop.run(live.server.stop())
        if live.scheduling is not None:
            live.scheduling.close()


@pytest.fixture
def live(start: Start) -> Live:
    """A server with default settings."""
    return start()


@pytest.fixture(scope="module")
def executor_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    with LLM(
        tiny_model("llama2", tmp_path_factory.mktemp("models")),
        num_devices=2,
        device_memory="8MiB",
        kv_cache_tokens=CACHE,
        page_size=PAGE,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=32,
        segment_layers=2,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.fixture(params=["simulated", "jax"])
def harness(request: pytest.FixtureRequest, executor_llm: LLM) -> Iterator[Harness]:
    if request.param == "simulated":
        yield SimHarness({tp: executor_llm._engine.capacity_tokens(tp) for tp in (1, 2)})
        return
    jax = JaxHarness(executor_llm)
    yield jax
    jax.close()
