"""`amoeba serve`: starts a server, reports when it is ready, and shuts it down."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from amoeba_jax import EngineConfig
from amoeba_jax.address import join_address
from amoeba_jax.errors import ConfigError, EngineClosedError, EngineStuckError
from serving.errors import say
from serving.grpc_server.binding import binding_error
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.request_handler import State
from serving.grpc_server.server import Server
from serving.runtime.metrics_server import MetricsServer
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig
from sharding.degrees import degrees_up_to

if TYPE_CHECKING:
    from amoeba_jax import LLM
    from serving.grpc_server.tracing import Tracing
    from serving.http_server.server import HttpServer

logger = logging.getLogger(__name__)
T = TypeVar("T")
EXIT_ENGINE_FAILED = 70
_READINESS_INTERVAL_S = 0.5


def run_server(
    server_config: ServerConfig, engine_config: EngineConfig, scheduling_config: SchedulingConfig, warm_up: str | None
) -> int:
    """Serve until a signal arrives. Return the exit code: 0, or 70 if the engine fails.

    If the engine does not respond, this function ends the process. Raises `ConfigError` if a port cannot be bound. Also
    raises the errors of loading the model.

    Args:
        warm_up: programs that must be compiled before the server is ready. "start": the programs of the first
            instances. All other programs are compiled during serving. "all": all programs. None: no programs. Each
            program is then compiled when it is first used.
    """
    # The import of Orbax configures a log without times.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.raiseExceptions = False  # The server continues if a log line cannot be written.
    logging.getLogger("amoeba.scheduler").setLevel(logging.INFO)
    return asyncio.run(_serve(server_config, engine_config, scheduling_config, warm_up))


async def _serve(
    server_config: ServerConfig, engine_config: EngineConfig, scheduling_config: SchedulingConfig, warm_up: str | None
) -> int:
    stop = _stop_signal()
    tracing = _tracing(server_config)
    server = Server(server_config, tracing)
    metrics = _serve_metrics(server)
    http = _http_server(server)
    llm = None
    try:
        await server.start()
        if http is not None and server_config.http_port is not None:
            await http.start(server_config.http_port)
            scheme = "http" if server_config.tls is None else "https"
            url = f"{scheme}://{join_address(server_config.host, http.port)}"
            say(f"OpenAI's API on {url}/v1, live page on {url}/")
        say(f"listening on {join_address(server_config.host, server.port)}, loading {engine_config.model}")
        loading = _in_thread(lambda: _load(engine_config, warm_up))
        await asyncio.wait([loading, stop], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await server.stop()
            # Loading cannot be interrupted, and the interpreter would wait for it.
            os._exit(0)
        llm = loading.result()
        scheduling = Scheduling(llm, scheduling_config, server.metrics)
        await server.attach(llm, scheduling=scheduling)
        is_ready = _say_loaded(server, llm.name, scheduling.policy_name)
        degrees = _degrees(engine_config) if warm_up == "start" and is_ready else []
        warming = asyncio.ensure_future(_warm_up_beside(llm, degrees))
        await asyncio.wait([stop, server.dead], return_when=asyncio.FIRST_COMPLETED)
        warming.cancel()
        if not server.dead.done():
            say(f"stopping: running requests have {server_config.shutdown_timeout_s:g} s to finish")
            drain = asyncio.ensure_future(server.drain(server_config.shutdown_timeout_s))
            await asyncio.wait([drain, server.dead], return_when=asyncio.FIRST_COMPLETED)
            if drain.done():
                say(f"stopped; {drain.result()} requests were aborted")
        if not server.dead.done():
            return 0
        error = server.dead.result()
        say(f"error: the engine has failed: {error}")
        if isinstance(error, EngineStuckError):
            await server.stop()
            await _close(tracing)
            # The dispatcher thread never ends, and the interpreter would wait for it.
            os._exit(EXIT_ENGINE_FAILED)
        return EXIT_ENGINE_FAILED
    finally:
        if http is not None:
            await http.stop()
        await server.stop()
        if metrics is not None:
            metrics.close()
        await _close(tracing)
        if llm is not None and not server.dead.done():
            await asyncio.to_thread(llm.close)


def _say_loaded(server: Server, name: str, policy_name: str) -> bool:
    """Print the state of the server after the model is loaded. Return whether the server is ready."""
    where = f"{name} on {join_address(server.config.host, server.port)}"
    if (state := server.request_handler.state) is State.READY:
        say(f"ready: {where}, policy {policy_name}")
    elif state is State.DRAINING:
        say(f"not ready: {where} was drained while it was loading, and accepts no requests; stop it")
    return state is State.READY


def _http_server(server: Server) -> "HttpServer | None":
    """Return the HTTP server, or None if the settings have no port for it.

    Raises `ConfigError` if packages are missing.
    """
    if server.config.http_port is None:
        return None
    try:
        from serving.http_server.server import HttpServer
    except ImportError as error:
        raise ConfigError(f"http_port needs FastAPI and uvicorn ({error}): pip install 'amoeba-jax[http]'") from error
    return HttpServer(server.config, server.request_handler)


def _tracing(config: ServerConfig) -> "Tracing | None":
    """Return the sender of trace spans, or None if the settings have no address of a collector.

    Raises `ConfigError` if packages are missing.
    """
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from serving.grpc_server.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'amoeba-jax[otel]'"
        ) from error
    return Tracing.to_collector(config.otlp_traces_endpoint)


async def _close(tracing: "Tracing | None") -> None:
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


def _degrees(config: EngineConfig) -> list[int]:
    return list(degrees_up_to(config.max_tp))


async def _warm_up_beside(llm: "LLM", degrees: list[int]) -> None:
    """Compile the programs of the tensor-parallel degrees `degrees` while the server serves.

    Print a line for each degree whose programs are ready. If a compilation fails, log the error. The missing programs
    are then compiled when they are first used.
    """
    ready: set[int] = set()
    try:
        if not degrees or not await asyncio.to_thread(lambda: llm.warmup(degrees, background=True)):
            return
        left = True
        while left:
            found = (await asyncio.to_thread(lambda: llm.stats)).degrees
            for it in found:
                if it.ready and it.degree not in ready:
                    ready.add(it.degree)
                    say(f"TP{it.degree} is ready: {it.num_programs} programs")
            if left := not all(it.ready for it in found):  # a start placement has one degree
                await asyncio.sleep(_READINESS_INTERVAL_S)
        gc.freeze()
    except EngineClosedError:
        pass  # The shutdown is reported elsewhere.
    except Exception:
        missing = ", ".join(f"TP{degree}" for degree in degrees if degree not in ready)
        logger.exception("cannot compile the programs of %s in the background: each is compiled on first use", missing)


def _load(config: EngineConfig, warm_up: str | None):
    """Load the model, and compile the programs that `warm_up` selects (see `run_server`)."""
    from amoeba_jax import LLM

    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    degrees: list[int] = []
    if warm_up:
        degrees = _degrees(config) if warm_up == "all" else [config.tensor_parallel_size]
        names = ", ".join(f"TP{degree}" for degree in degrees)
        say(f"compiling the programs of {names}, or loading them from the compile cache")
    llm = LLM(**settings, progress=sys.stderr.isatty(), warmup=degrees)
    # Exempt the objects that exist now from garbage collection: a full collection of half a million objects delays
    # steps by some tenths of a second.
    gc.collect()
    gc.freeze()
    return llm


def _serve_metrics(server: Server) -> MetricsServer | None:
    host, port = server.config.host, server.config.metrics_port
    if port is None:
        return None
    try:
        metrics = MetricsServer(server.metrics.registry, host, port)
    except OSError as error:
        raise binding_error(host, port, "--metrics-port") from error
    say(f"metrics on http://{join_address(host, metrics.port)}/metrics")
    return metrics


def _stop_signal() -> "asyncio.Future[None]":
    """Return a future that is done at the first SIGTERM or SIGINT. The second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        stop.set_result(None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def _in_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Call a function in a new thread. Return a future with its result.

    The interpreter can exit without waiting for the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, name="amoeba-loading", daemon=True).start()
    return future
