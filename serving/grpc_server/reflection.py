"""gRPC reflection over several pools of protocol definitions."""

from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection

from serving.grpc_server._proto import open_inference_pb2


class _Pools:
    """Pool of protobuf definitions that searches several pools in order."""

    def __init__(self, *pools: Any):
        self._pools = pools

    def __getattr__(self, name: str) -> Any:
        def find(*args: Any) -> Any:
            for pool in self._pools:
                try:
                    return getattr(pool, name)(*args)
                except KeyError:
                    continue
            raise KeyError(args)

        return find


def add_reflection(server: grpc.aio.Server, services: list[str]) -> None:
    """Add the reflection service to a server, so that clients can read the definitions of `services`."""
    # Our pool first: another client of the protocol in this process may define the same names in the default pool.
    pools = _Pools(open_inference_pb2.DESCRIPTOR.pool, descriptor_pool.Default())
    reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server, pool=pools)  # type: ignore[arg-type]
