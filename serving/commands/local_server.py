"""Server in the same process as its `LLM`, for `amoeba demo` and experiments."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from amoeba_jax import LLM
from amoeba_jax.address import join_address
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.server import Server
from serving.runtime.scheduling import OnReport, Scheduling, SchedulingConfig

if TYPE_CHECKING:
    from serving.http_server.server import HttpServer

T = TypeVar("T")


@dataclass(frozen=True)
class LocalServer:
    """Running server in this process.

    Attributes:
        address: host and port of gRPC.
        scheduling: scheduler of the server.
        page_url: URL of the live page. None: the server has no HTTP port.
    """

    address: str
    scheduling: Scheduling
    page_url: str | None


@contextmanager
def local_server(
    llm: LLM,
    scheduling: SchedulingConfig | None = None,
    config: ServerConfig | None = None,
    on_report: OnReport = lambda report: None,
) -> Iterator[LocalServer]:
    """Serve an LLM until the `with` block ends. The LLM stays open after the block.

    Until the block ends, the scheduler of the server decides where requests run. Raises `ConfigError` if the port
    cannot be bound.

    Args:
        config: settings of the server. None: gRPC on a free port of the loopback interface, no HTTP and no metrics.
        on_report: function that is called with the report of each merge and split.
    """
    loop = _LoopThread()
    config = config or ServerConfig(port=0, metrics_port=None)
    try:
        server, http = loop.run(_start(config))
        scheduler = Scheduling(llm, scheduling or SchedulingConfig(), server.metrics, on_report)
        try:
            loop.run(server.attach(llm, scheduling=scheduler))
            page_url = None if http is None else f"http://{join_address(config.host, http.port)}/"
            yield LocalServer(join_address(config.host, server.port), scheduler, page_url)
        finally:
            if http is not None:
                loop.run(http.stop())
            loop.run(server.stop())
            scheduler.close()
    finally:
        loop.close()


async def _start(config: ServerConfig) -> "tuple[Server, HttpServer | None]":
    server = Server(config)
    try:
        await server.start()
        if config.http_port is None:
            return server, None
        from serving.http_server.server import HttpServer

        http = HttpServer(config, server.request_handler)
        await http.start(config.http_port)
        return server, http
    except BaseException:
        await server.stop()
        raise


class _LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="amoeba-server", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
