"""Requests and KV pages that a server still has, from `AdminService.GetCluster`."""

import asyncio
import time
from dataclasses import dataclass

import grpc

from amoeba_jax.client import AsyncClient
from amoeba_jax.client.connection import Retries

_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Left:
    """Requests that a server still has, by state, and KV pages in use. `accepted` counts all requests that have not
    ended."""

    running: int
    waiting: int
    accepted: int
    used_pages: int

    @property
    def nothing(self) -> bool:
        """Whether the server is idle: no request is left, and no page is in use."""
        return self == Left(0, 0, 0, 0)


async def look(client: AsyncClient) -> Left:
    """Return the requests and pages that a server still has. Raises `grpc.RpcError` if the server does not answer."""
    cluster = await client.cluster(timeout_s=5)
    return Left(
        sum(instance.running for instance in cluster.instances),
        cluster.waiting,
        cluster.accepted,
        sum(instance.kv_used_pages for instance in cluster.instances),
    )


def wait_until_idle(target: str, since_s: float, within_s: float) -> tuple[float | None, str]:
    """Wait until the server is idle, for at most `within_s` seconds. Return `(seconds, state)`.

    `seconds` is the time from `since_s` (`time.monotonic()`) until the server was idle. None: the server stayed busy.
    `state` is the last known state of the server, as text.
    """
    return asyncio.run(_wait(target, since_s, time.monotonic() + within_s))


async def _wait(target: str, since_s: float, give_up_s: float) -> tuple[float | None, str]:
    last = "the server does not answer"
    async with AsyncClient(target, retries=Retries(attempts=1)) as client:
        while True:
            try:
                left = await look(client)
                if left.nothing:
                    return time.monotonic() - since_s, "nothing"
                last = str(left)
            except grpc.aio.AioRpcError as error:
                last = f"the server answers {error.code().name}"
            if time.monotonic() > give_up_s:
                return None, last
            await asyncio.sleep(_INTERVAL_S)
