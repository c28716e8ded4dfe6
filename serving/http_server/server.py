"""HTTP server, in the same event loop as the gRPC server."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.grpc_server.binding import binding_error
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.open_requests import OpenRequests
from serving.grpc_server.output_coalescer import LAST_READ_S
from serving.grpc_server.request_handler import RequestHandler
from serving.http_server.app import create_app, with_gate
from serving.http_server.gate import Receive, Scope, Send
from serving.http_server.page import page_routes

# Connections at the same time. Further connections get the status 503.
_MAX_CONNECTIONS = 4096
MAX_CLIENT_CONNECTIONS = 1024
"""Connections of one client address at the same time. Further connections are closed."""
# Bytes of a reply in the kernel, for each connection. Without a limit, Linux keeps up to 4 MB for a client that does
# not read.
_SEND_BUFFER_BYTES = 256 * 2**10
HEADER_S = 30.0
"""Seconds in which the headers of a request must arrive, from the start of the connection or from their first byte."""
# Seconds that `stop` waits for running requests.
_SHUTDOWN_GRACE_S = 2


class HttpServer:
    """HTTP server that passes requests to the handler of a gRPC server. All methods run in one event loop.

    Attributes:
        port: port on which the server listens.
        app: FastAPI application.
    """

    def __init__(self, config: ServerConfig, handler: RequestHandler):
        self._config = config
        self.app = create_app(handler)
        if config.admin_port is None:  # the page administrates, which --admin-port keeps off the other ports
            self.app.include_router(page_routes(handler))
        self.port = 0
        tls = config.tls
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                with_gate(self.app, handler),
                loop="none",
                http=partial(_Protocol, handler.admission),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="critical",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_MAX_CONNECTIONS,
                h11_max_incomplete_event_size=config.limits.max_header_bytes,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
                ssl_ca_certs=None if tls is None or tls.client_ca is None else str(tls.client_ca),
                ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.client_ca is None else ssl.CERT_REQUIRED,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self, port: int) -> None:
        """Bind the port and start to serve. Raises `ConfigError` if the port is taken."""
        host = self._config.host
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # as gRPC, `::` also serves IPv4
            listener = socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=both)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        except OSError as error:
            raise binding_error(host, port, "--http-port") from error
        self.port = listener.getsockname()[1]
        self._serving = asyncio.ensure_future(self._uvicorn.serve([listener]))
        while not self._uvicorn.started and not self._serving.done():
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End all requests and close the port."""
        if self._serving is not None:
            self._uvicorn.should_exit = True
            await self._serving


class _Protocol(H11Protocol):
    """HTTP connection. A client may have only a limited number of connections.

    The server closes the connection if no request arrives for too long, or if the client does not read a reply.
    """

    def __init__(self, admission: OpenRequests, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._admission, self._gate, self.app = admission, self.app, self._serve
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread: _UnreadReply | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=1, low=0)  # so that `flow.write_paused` means that data is unread
        super().connection_made(transport)
        peers: list[Any] = [getattr(it, "client", None) for it in self.connections]
        address = self.client and self.client[0]
        if sum(it is not None and it[0] == address for it in peers) > MAX_CLIENT_CONNECTIONS:
            transport.abort()
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # any data stops uvicorn's own timer of an idle connection
        self._limit_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_header_timer()
        self._stop_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        If the client does not read the end of the reply, close the connection some seconds later.
        """
        try:
            await self._gate(scope, receive, send)  # type: ignore[arg-type]
        finally:
            if self.flow.write_paused and self._unread is None:
                self._unread = _UnreadReply(self.transport, self._admission, scope["caller"].client)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.end()
            self._unread = None

    def _limit_headers(self) -> None:
        """Close the connection if no request starts within `HEADER_S` seconds. Do nothing while a request runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _UnreadReply:
    """Unread end of a reply whose request has ended on the server.

    The unread bytes count against the limit of the client. If the client has not read them after `LAST_READ_S` seconds,
    the connection is aborted. An ordinary close of the connection would wait for the client.
    """

    def __init__(self, transport: asyncio.Transport, admission: OpenRequests, client: str):
        self._admission, self._client, self._num_bytes = admission, client, transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(LAST_READ_S, transport.abort)
        admission.count_bytes(client, self._num_bytes)

    def end(self) -> None:
        """Stop counting the bytes, because the client has read them or the connection is closed."""
        self._timer.cancel()
        self._admission.count_bytes(self._client, -self._num_bytes)


class _Uvicorn(uvicorn.Server):
    """Server of uvicorn without signal handlers: `amoeba serve` handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield
