"""The gRPC server: ports, services, health and shutdown."""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from amoeba_jax.address import join_address
from amoeba_jax.client._proto import inference_pb2, inference_pb2_grpc
from amoeba_jax.errors import RequestError
from serving.grpc_server._proto import open_inference_pb2, open_inference_pb2_grpc
from serving.grpc_server.admin_service import AdminService
from serving.grpc_server.auth_interceptor import AuthInterceptor
from serving.grpc_server.binding import binding_error
from serving.grpc_server.callers import Callers
from serving.grpc_server.config import Limits, ServerConfig
from serving.grpc_server.health import NOT_SERVING, SERVING, HealthServicer
from serving.grpc_server.inference_service import InferenceService
from serving.grpc_server.monitor import INTERVAL_S, watch_engine
from serving.grpc_server.open_inference import OpenInferenceService
from serving.grpc_server.priority_classes import PriorityClass
from serving.grpc_server.reflection import add_reflection
from serving.grpc_server.request_handler import RequestHandler, State
from serving.grpc_server.security import server_credentials
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling import Scheduling

if TYPE_CHECKING:
    from amoeba_jax import LLM
    from serving.grpc_server.tracing import Tracing

logger = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN = inference_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# Seconds that `stop` waits for running calls.
_SHUTDOWN_GRACE_S = 2.0
# Concurrent calls of a connection in addition to its requests: health checks, admin calls, refused calls.
_MORE_STREAMS = 64
_MIN_STREAMS = 1024


class Server:
    """gRPC server of a model. It listens after `start` and serves after `attach`. All methods run in one event loop.

    Attributes:
        port: port on which the server listens.
        admin_port: port of AdminService. None: AdminService is on `port`.
        dead: future that is done when the engine has failed. Its result is the error.
    """

    def __init__(self, config: ServerConfig, tracing: "Tracing | None" = None):
        self.config = config
        self.metrics = ServerMetrics()
        self.metrics.observer = tracing
        callers = Callers(config.api_tokens, config.admin_token)
        self.request_handler = RequestHandler(config.limits, self.metrics, tracing, callers)
        self.request_handler.on_draining = self._show_readiness
        self.port = 0
        self.admin_port: int | None = None
        self.dead: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._health = HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the ports. Calls get the status UNAVAILABLE until `attach`. Raises `ConfigError` if a port is taken."""
        self._show_readiness()
        together = self.config.admin_port is None
        main = self._new_server([INFERENCE, OPEN_INFERENCE, *([ADMIN] if together else [])])
        self.port = self._bind(main, self.config.port, "--port")
        if self.config.admin_port is not None:
            self.admin_port = self._bind(self._new_server([ADMIN]), self.config.admin_port, "--admin-port")
        for server in self._servers:
            await server.start()

    def _new_server(self, services: list[str]) -> grpc.aio.Server:
        guard = AuthInterceptor(self.request_handler.callers, self.request_handler.refusals)
        server = grpc.aio.server(interceptors=[guard], options=_options(self.config.limits))
        if INFERENCE in services:
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(self.request_handler), server)
        if OPEN_INFERENCE in services:
            service = OpenInferenceService(self.request_handler)
            open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        if ADMIN in services:
            inference_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self.request_handler), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection(server, [*services, health.SERVICE_NAME])
        self._servers.append(server)
        return server

    def _bind(self, server: grpc.aio.Server, port: int, flag: str) -> int:
        address = join_address(self.config.host, port)
        try:
            if self.config.tls is not None:
                return server.add_secure_port(address, server_credentials(self.config.tls))
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise binding_error(self.config.host, port, flag) from error

    async def attach(
        self, backend: "LLM", interval_s: float = INTERVAL_S, scheduling: Scheduling | None = None
    ) -> None:
        """Start to serve with a loaded model. If a drain has started, the server still refuses new requests.

        Args:
            backend: loaded model.
            interval_s: seconds between two polls of the engine.
            scheduling: scheduler of the model. None: instances change only by calls of AdminService.
        """
        if backend.tokenizer is not None:
            # Computed here once, in a thread: it can take a second.
            await asyncio.to_thread(getattr, backend.tokenizer, "longest_token_chars")
            try:
                await asyncio.to_thread(backend.load_grammars)
            except RequestError as error:  # the same error as for constrained requests, which are refused
                logger.warning("%s", error)
        self.request_handler.attach(backend, scheduling)
        self._watch = asyncio.ensure_future(self._watch_engine(backend, interval_s))
        self._show_readiness()

    async def _watch_engine(self, backend: "LLM", interval_s: float) -> None:
        error = await watch_engine(backend, self.metrics, self.config.engine_timeout_s, interval_s)
        self.request_handler.fail()
        logger.error("the engine has failed: %s", error)
        self.dead.set_result(error)
        self._show_readiness()
        self._health.set_status("", NOT_SERVING)

    def _show_readiness(self) -> None:
        """Set the health status of each service to SERVING if the server accepts requests, else to NOT_SERVING."""
        status = SERVING if self.request_handler.state is State.READY else NOT_SERVING
        for service in (INFERENCE, ADMIN, OPEN_INFERENCE):
            self._health.set_status(service, status)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, and wait until all running requests end. Return the number of aborted requests.

        Requests that still run after `timeout_s` seconds are aborted.
        """
        return await self.request_handler.drain(timeout_s)

    async def stop(self) -> None:
        """End all calls and close the ports."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.gather(*(server.stop(_SHUTDOWN_GRACE_S) for server in self._servers))
        self._servers.clear()  # servers of gRPC must be deleted before their event loop is closed
        self.request_handler.close()


def _options(limits: Limits) -> Sequence[tuple[str, int]]:
    most_requests = len(PriorityClass) * limits.max_requests_per_client  # see `OpenRequests`
    return (
        # The client library holds back further calls until others have ended.
        ("grpc.max_concurrent_streams", max(_MIN_STREAMS, most_requests + _MORE_STREAMS)),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        # Two servers must not share a port.
        ("grpc.so_reuseport", 0),
        # Clients may ping during long prefills. By default gRPC closes connections with pings less than 300 s apart.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings of the server detect clients that have vanished.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    )
