"""Clients whose calls are refused, or given up at once, again and again have to wait."""

import asyncio
import time
from collections import Counter

import grpc

from serving.grpc_server.config import Limits
from serving.grpc_server.statuses import LimitError

MAX_DELAY_S = 1.0
"""No answer, and no request, waits for longer."""
GIVEN_UP_WITHIN_S = 0.25
"""A request that its client gives up, or lets end by its deadline, within this time of its start was not worth it."""
# Refusals at full speed before any is delayed, in seconds of the allowed rate.
_BURST_S = 4.0
# Answers and requests of one client that wait at once. Each may hold its call's message.
_MAX_HELD = 64
_MAX_CLIENTS = 1024
# The client's doing. Errors of the server are told at once, so that clients can go elsewhere.
_DELAYED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


class Refusals:
    """A rate of refusals for each client (generic cell rate algorithm). All methods run in the server's event loop.

    Reading and refusing a message costs the event loop one or two milliseconds, which all clients share. A client that
    waits for its answers can therefore take no more than its rate of it. One that does not, as it gives its requests up
    at once, has later ones begin late.
    """

    def __init__(self, limits: Limits):
        self._interval_s = 1 / limits.max_refusals_per_second
        self._paid_until_s: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def delay_s(self, client: str, now_s: float) -> float:
        """Count a refusal, and return how late it should be answered."""
        if len(self._paid_until_s) >= _MAX_CLIENTS:
            self._paid_until_s = {name: time_s for name, time_s in self._paid_until_s.items() if time_s > now_s}
        paid_until_s = max(now_s, self._paid_until_s.get(client, 0.0)) + self._interval_s
        self._paid_until_s[client] = min(paid_until_s, now_s + _BURST_S + MAX_DELAY_S)
        return self._paid_until_s[client] - now_s - _BURST_S

    async def wait(self, client: str, status: grpc.StatusCode) -> None:
        """Call before a refusal is answered: returns at once, or when its client may have the answer."""
        if status not in _DELAYED:
            return
        delay_s = self.delay_s(client, time.monotonic())
        if delay_s > 0 and self._held[client] < _MAX_HELD:
            await self._sleep(client, delay_s)

    def given_up(self, client: str, after_s: float) -> None:
        """A client has given up a request, or its deadline has passed, that long after its start."""
        if after_s <= GIVEN_UP_WITHIN_S:
            self.delay_s(client, time.monotonic())

    async def before_request(self, client: str) -> None:
        """Call before a request is begun: returns at once, or when its client may have another one.

        Raises `LimitError` where many wait already.
        """
        delay_s = self._paid_until_s.get(client, 0.0) - time.monotonic() - _BURST_S
        if delay_s <= 0:
            return
        if self._held[client] >= _MAX_HELD:
            raise LimitError(
                f"{_MAX_HELD} calls of this client wait, which is the limit, as it was refused, or gave up, more than "
                f"{1 / self._interval_s:g} a second (max_refusals_per_second)"
            )
        await self._sleep(client, min(delay_s, MAX_DELAY_S))

    async def _sleep(self, client: str, delay_s: float) -> None:
        self._held[client] += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
