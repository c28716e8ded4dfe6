"""The front door over a backend that does as the test says: moments that a live server meets only by chance."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, cast

import pytest

from amoeba_jax.errors import DeadlineError, NotANumberError
from amoeba_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.backend import Backend
from serving.grpc_server.config import Limits
from serving.grpc_server.front_door import _LAST_WRITE_S, Call, FrontDoor
from serving.metrics import ServerMetrics


def output(num_tokens: int) -> RequestOutput:
    completion = CompletionOutput("", tuple(range(num_tokens)))
    return RequestOutput("request", None, (1,), (completion,), RequestMetrics(0.0))


class Scripted:
    """One token, then whatever is awaited."""

    name, tokenizer = "scripted", None

    def __init__(self, then: Awaitable[Any]):
        self._then = then
        self.closed = False

    async def astream(self, *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        try:
            yield output(1)
            await self._then
            yield output(2)
        finally:
            self.closed = True


class Writes:
    """What the service would write, each for so many seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.begun = self.done = 0

    async def __call__(self, before: RequestOutput | None, after: RequestOutput) -> None:
        self.begun += 1
        await asyncio.sleep(self._seconds)
        self.done += 1


async def serve(then: Awaitable[Any], writes: Writes, timeout_s: float | None = None) -> Scripted:
    door, backend = FrontDoor(Limits(), ServerMetrics()), Scripted(then)
    door.attach(cast(Backend, backend), None)
    try:
        await door.serve(Call("request", [1], SamplingParams(), "client", timeout_s), writes)
    finally:
        assert backend.closed
        assert not door.admission.ids
        door.close()
    return backend


async def fails() -> None:
    await asyncio.sleep(0.05)  # the first token is being written
    raise NotANumberError("logits are not numbers")


def test_the_message_that_is_being_written_is_written_before_the_status():
    writes = Writes(0.2)
    with pytest.raises(NotANumberError):
        asyncio.run(serve(fails(), writes))
    assert writes.begun == writes.done == 1


def test_a_deadline_too_lets_a_write_end():
    writes = Writes(0.3)
    with pytest.raises(DeadlineError):
        asyncio.run(serve(asyncio.sleep(60), writes, timeout_s=0.15))
    assert writes.begun == writes.done == 1


def test_a_client_that_does_not_read_is_not_waited_for():
    writes, start = Writes(60), time.monotonic()
    with pytest.raises(NotANumberError):
        asyncio.run(serve(fails(), writes))
    assert (writes.begun, writes.done) == (1, 0)
    assert _LAST_WRITE_S <= time.monotonic() - start < 30
