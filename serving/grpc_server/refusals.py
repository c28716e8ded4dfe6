"""Clients whose calls are refused again and again get their answers late."""

import asyncio
import time
from collections import Counter

import grpc

from serving.grpc_server.config import Limits

MAX_DELAY_S = 1.0
"""No answer is later than this."""
# Refusals at full speed before any is delayed, in seconds of the allowed rate.
_BURST_S = 4.0
# Answers of one client that are held back at once. Each may hold its call's message.
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
    waits for its answers can therefore take no more than its rate of it.
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
        if delay_s <= 0 or self._held[client] >= _MAX_HELD:
            return
        self._held[client] += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
