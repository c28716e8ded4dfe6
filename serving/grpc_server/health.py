"""The gRPC health service. A change of a status never waits for the clients that watch this status."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# The stubs of this package do not know the messages of List.
_messages: Any = health_pb2
SERVING = _messages.HealthCheckResponse.SERVING
NOT_SERVING = _messages.HealthCheckResponse.NOT_SERVING


class HealthServicer(health_pb2_grpc.HealthServicer):
    """`grpc.health.v1.Health` with Check, List and Watch.

    A client that watches the status and reads nothing does not delay other clients. With the implementation in
    `grpcio-health-checking`, this client would delay other clients.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {"": SERVING}
        self._changed = asyncio.Event()

    def set_status(self, service: str, status: Any) -> None:
        """Set the status of a service and notify all clients that watch it. The service "" is the whole server."""
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Return the status of one service."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this server has no service {request.service[:100]!r}")
        return _messages.HealthCheckResponse(status=self._statuses[request.service])

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Return the status of every service."""
        statuses = {name: _messages.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return _messages.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Yield the status of one service now and after each change. A slow client gets only the latest status."""
        latest = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _messages.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != latest:
                latest = status
                yield _messages.HealthCheckResponse(status=status)
            await changed.wait()
