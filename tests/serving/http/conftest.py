"""One HTTP server for all tests of OpenAI's API. Its model has one token for each byte."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from harness import registry_of
from live_server import TIMEOUT_S, LoopThread, wait_until
from tiny_models import byte_model

from amoeba_jax import LLM
from serving.grpc_server.config import Limits, ServerConfig
from serving.grpc_server.server import Server
from serving.http_server.server import HttpServer


@dataclass
class Http:
    """Running HTTP server, with its engine."""

    server: Server
    http: HttpServer
    llm: LLM
    loop: LoopThread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def check_idle(self) -> None:
        """Check that no state of any request is left."""
        admission = self.server.request_handler.admission
        wait_until(lambda: not admission.ids and not admission._bytes_of)
        wait_until(lambda: all((v.running, v.waiting, v.kv_used_pages) == (0, 0, 0) for v in self.llm.instances))
        assert not registry_of(self.llm).ids


@pytest.fixture(scope="session")
def http_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with two instances of one device.

    The last token is the end-of-sequence token, which constrained text needs.
    """
    with LLM(
        byte_model(tmp_path_factory.mktemp("http") / "tiny-chat", eos_token_id=255),
        num_devices=2,
        tensor_parallel_size=1,
        device_memory="64MiB",
        max_num_seqs=4,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def start_http(http_llm: LLM, loop: LoopThread) -> Callable[..., AbstractContextManager[Http]]:
    """Return a function for `with start_http(...)`. Its arguments are fields of `ServerConfig` and `Limits`."""

    @contextmanager
    def start(llm: LLM = http_llm, **settings: Any) -> Iterator[Http]:
        names = [name for name in settings if name in Limits.__dataclass_fields__]
        limits = Limits(**{"max_refusals_per_second": 10_000, **{name: settings.pop(name) for name in names}})
        config = ServerConfig(port=0, metrics_port=None, limits=limits, **settings)

        async def begin() -> tuple[Server, HttpServer]:
            server = Server(config)
            http = HttpServer(config, server.request_handler)
            await http.start(0)
            await server.attach(llm, 0.1)
            return server, http

        server, http = loop.run(begin())
        try:
            yield Http(server, http, llm, loop)
        finally:
            loop.run(http.stop())
            loop.run(server.stop())

    return start


@pytest.fixture(scope="session")
def http(start_http: Callable[..., AbstractContextManager[Http]]) -> Iterator[Http]:
    """Yield a server with default settings."""
    with start_http() as started:
        yield started
