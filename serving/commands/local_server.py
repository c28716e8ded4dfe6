"""gRPC server in the process of its `LLM`, for `amoeba demo` and experiments."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from amoeba_jax import LLM
from amoeba_jax.address import join_address
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.server import Server
from serving.runtime.scheduling import OnReport, Scheduling, SchedulingConfig

T = TypeVar("T")


@contextmanager
def local_server(
    llm: LLM,
    scheduling: SchedulingConfig | None = None,
    config: ServerConfig | None = None,
    on_report: OnReport = lambda report: None,
) -> Iterator[tuple[str, Scheduling]]:
    """Serve an LLM over gRPC until the `with` block ends. Yield the address and the scheduler.

    Afterwards the LLM stays open, and its engine places requests without this scheduler. Raises `ConfigError` if the
    port cannot be bound.

    Args:
        config: settings of the server. None: a free port of the loopback interface, and no metrics.
        on_report: function that is called with the report of each transformation.
    """
    loop = _LoopThread()
    config = config or ServerConfig(port=0, metrics_port=None)
    try:
        server = loop.run(_start(config))
        scheduler = Scheduling(llm, scheduling or SchedulingConfig(), server.metrics, on_report)
        try:
            loop.run(server.attach(llm, scheduling=scheduler))
            yield join_address(config.host, server.port), scheduler
        finally:
            loop.run(server.stop())
            scheduler.close()
    finally:
        loop.close()


async def _start(config: ServerConfig) -> Server:
    server = Server(config)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


class _LoopThread:
    """Background thread with an event loop."""

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
