"""The gRPC health service: Check and Watch of `grpcio-health-checking`, and List, which its asyncio servicer lacks."""

from typing import Any

from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """`grpc.health.v1.Health`, whole. (The stubs of its package do not know List's messages: hence `Any`.)"""

    async def List(self, request: Any, context: Any) -> Any:
        """The status of every service."""
        messages: Any = health_pb2
        statuses = {name: messages.HealthCheckResponse(status=s) for name, s in self._server_status.items()}
        return messages.HealthListResponse(statuses=statuses)
