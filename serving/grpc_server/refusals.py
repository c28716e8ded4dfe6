"""Rate limit for clients whose calls are often refused, or cancelled right after their start."""

import asyncio
import time
from collections import Counter

import grpc

from serving.grpc_server.config import Limits
from serving.grpc_server.statuses import LimitError

MAX_DELAY_S = 1.0
"""Longest delay of an answer or a request."""
GIVEN_UP_WITHIN_S = 0.25
"""Seconds from the start of a request. A cancellation or deadline within this time counts as a refusal."""
# Refusals without delay, in seconds of the allowed rate.
_BURST_S = 4.0
# Most delayed answers and requests of one client. Each may hold the message of its call.
_MAX_HELD = 64
_MAX_CLIENTS = 1024
# Errors that the client causes. Errors of the server are sent at once, so that clients can try another server.
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
    """Rate limit for refused calls (generic cell rate algorithm). All methods run in the server's event loop.

    The limit protects the event loop, which all clients share: each refused call occupies the event loop for 1 to 2 ms.
    `wait` delays the answer to a refused call. Some clients cancel their calls and wait for no answer. Therefore,
    `before_request` also delays the next request of a client.
    """

    def __init__(self, limits: Limits):
        self._interval_s = 1 / limits.max_refusals_per_second
        self._paid_until_s: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def delay_s(self, client: str, now_s: float) -> float:
        """Count a refused call of a client. Return the seconds by which to delay the answer to the call.

        The result is at most `MAX_DELAY_S`. If it is negative, there is no delay. `now_s` is `time.monotonic()`.
        """
        if len(self._paid_until_s) >= _MAX_CLIENTS:
            self._paid_until_s = {name: time_s for name, time_s in self._paid_until_s.items() if time_s > now_s}
        paid_until_s = max(now_s, self._paid_until_s.get(client, 0.0)) + self._interval_s
        self._paid_until_s[client] = min(paid_until_s, now_s + _BURST_S + MAX_DELAY_S)
        return self._paid_until_s[client] - now_s - _BURST_S

    async def wait(self, client: str, status: grpc.StatusCode) -> None:
        """Count a refused call, and wait until its answer may be sent.

        Do nothing if `status` is not a refusal. If `_MAX_HELD` calls of the client already wait, do not wait.
        """
        if status not in _DELAYED:
            return
        delay_s = self.delay_s(client, time.monotonic())
        if delay_s > 0 and self._held[client] < _MAX_HELD:
            await self._sleep(client, delay_s)

    def given_up(self, client: str, after_s: float) -> None:
        """Count a request as a refused call, because the client cancelled it or its deadline passed.

        Do nothing if `after_s`, the seconds from its start to its end, exceeds `GIVEN_UP_WITHIN_S`.
        """
        if after_s <= GIVEN_UP_WITHIN_S:
            self.delay_s(client, time.monotonic())

    async def before_request(self, client: str) -> None:
        """Wait until a client may start another request.

        Raises `LimitError` if `_MAX_HELD` calls of the client already wait.
        """
        delay_s = self._paid_until_s.get(client, 0.0) - time.monotonic() - _BURST_S
        if delay_s <= 0:
            return
        if self._held[client] >= _MAX_HELD:
            raise LimitError(
                f"{_MAX_HELD} calls of this client already wait, which is the limit: more than "
                f"{1 / self._interval_s:g} of its calls per second were refused or cancelled (max_refusals_per_second)"
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
