"""The request handler over a backend that does as the test says: moments that a live server meets only by chance."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, cast

import pytest

from amoeba_jax.errors import DeadlineError, NotANumberError
from amoeba_jax.outputs import CompletionDelta, RequestDelta, RequestMetrics
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server import output_coalescer
from serving.grpc_server.callers import Caller
from serving.grpc_server.calls import Call
from serving.grpc_server.config import Limits
from serving.grpc_server.output_coalescer import OutputCoalescer
from serving.grpc_server.request_handler import _LAST_WRITE_S, RequestHandler
from serving.grpc_server.statuses import NotServingError, SlowReaderError
from serving.runtime.backend import Backend
from serving.runtime.metrics import ServerMetrics

CALLER = Caller("client", "connection", "client")


def delta(*, finished: bool = False) -> tuple[None, RequestDelta]:
    """One token more."""
    completion = CompletionDelta(0, "", (7,), None, None, "stop" if finished else None, None)
    return None, RequestDelta("request", 1, (completion,), RequestMetrics(0.0), finished)


class Scripted:
    """One token, then whatever is awaited."""

    name, tokenizer = "scripted", None

    def __init__(self, then: Awaitable[Any]):
        self._then = then
        self.begun = self.closed = False

    async def astream_deltas(self, *_: Any, **__: Any) -> AsyncGenerator[tuple[None, RequestDelta], None]:
        self.begun = True
        try:
            yield delta()
            await self._then
            yield delta(finished=True)
        finally:
            self.closed = True


class Writes:
    """What the service would write, each for that many seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.begun = self.done = 0

    async def __call__(self, _: RequestDelta) -> None:
        self.begun += 1
        await asyncio.sleep(self._seconds)
        self.done += 1


async def serve(then: Awaitable[Any], writes: Writes, timeout_s: float | None = None) -> Scripted:
    """One request, to its end, after which nothing of it is left."""
    door, backend = RequestHandler(Limits(), ServerMetrics()), Scripted(then)
    door.attach(cast(Backend, backend), None)
    try:
        await door.serve(Call("request", [1], SamplingParams(), CALLER, timeout_s), writes)
    finally:
        assert backend.closed
        assert not door.admission.ids
        door.close()
    return backend


def never_done() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


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


def test_a_second_cancellation_leaves_nothing_running():
    """gRPC cancels at the client's deadline, and the server's own time limit does: both hit the same request."""

    async def run() -> None:
        door, backend, writing = RequestHandler(Limits(), ServerMetrics()), Scripted(never_done()), asyncio.Event()
        door.attach(cast(Backend, backend), None)

        async def write(_: RequestDelta) -> None:
            writing.set()
            await asyncio.sleep(60)

        serving = asyncio.ensure_future(door.serve(Call("request", [1], SamplingParams(), CALLER), write))
        await writing.wait()
        serving.cancel()
        await asyncio.sleep(0)  # the first is being dealt with
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await asyncio.sleep(0)
        assert backend.closed, "its pages are free"
        assert not door.admission.ids
        while door._closing:
            await asyncio.wait(door._closing)
        door.close()

    asyncio.run(run())


@pytest.mark.parametrize("cancellations", range(1, 6))
def test_any_number_of_cancellations_at_any_time_end_the_request(cancellations: int):
    async def run(pauses: list[int]) -> None:
        door, backend = RequestHandler(Limits(), ServerMetrics()), Scripted(never_done())
        door.attach(cast(Backend, backend), None)
        serving = asyncio.ensure_future(door.serve(Call("request", [1], SamplingParams(), CALLER), Writes(60)))
        for pause in pauses:
            for _ in range(pause):
                await asyncio.sleep(0)
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        while door._closing:
            await asyncio.wait(door._closing)
        assert backend.closed or not backend.begun
        assert not door.admission.ids
        assert not door._generating
        door.close()

    for first in range(8):
        asyncio.run(run([first, *[first % 3] * (cancellations - 1)]))


@pytest.mark.parametrize("where", ["in the tokenizer", "before the engine"])
def test_a_request_that_the_engine_does_not_have_yet_does_not_begin_after_a_drain(where: str):
    class Late(Scripted):
        def __init__(self, reached: asyncio.Event, go_on: asyncio.Event):
            super().__init__(never_done())
            self._reached, self._go_on = reached, go_on

        async def astream_deltas(self, *_: Any, **__: Any) -> AsyncGenerator[tuple[None, RequestDelta], None]:
            self._reached.set()
            await self._go_on.wait()
            async for it in super().astream_deltas():
                yield it

        def cancel(self, request_id: str) -> bool:
            return False

    async def run() -> None:
        door, reached, go_on = RequestHandler(Limits(), ServerMetrics()), asyncio.Event(), asyncio.Event()
        backend = Late(reached, go_on)
        door.attach(cast(Backend, backend), None)

        async def tokenize(_: Any) -> list[int]:
            reached.set()
            await go_on.wait()
            return [1]

        if where == "in the tokenizer":
            door.tokenize = tokenize
        serving = asyncio.ensure_future(door.serve(Call("request", [1], SamplingParams(), CALLER), Writes(0)))
        await reached.wait()
        draining = asyncio.ensure_future(door.drain(0))
        done, _ = await asyncio.wait((serving,), timeout=0.5)
        assert bool(done) == (where != "in the tokenizer"), "what is being tokenized is waited for a little"
        go_on.set()
        with pytest.raises(NotServingError, match="shutting down"):
            await asyncio.wait_for(serving, 30)
        assert await draining == 1
        assert not backend.begun
        assert not door.admission.ids
        assert not door._generating
        door.close()

    asyncio.run(run())


def tokens(count: int, *, finished: bool = False) -> RequestDelta:
    completion = CompletionDelta(0, "x" * count, (7,) * count, None, None, "stop" if finished else None, None)
    return RequestDelta("request", 1, (completion,), RequestMetrics(0.0), finished)


def test_a_server_that_is_late_cuts_nobody_off():
    """All tokens of a long stall come at once, and none of them while a write was blocked."""

    async def run() -> list[RequestDelta]:
        sent: list[RequestDelta] = []

        async def write(delta: RequestDelta) -> None:
            await asyncio.sleep(0)
            sent.append(delta)

        buffer = OutputCoalescer(4, SamplingParams())
        sending = asyncio.ensure_future(buffer.send_all(write))
        for _ in range(3):
            for _ in range(100):
                buffer.put(tokens(1))
            time.sleep(0.05)  # the loop stands still, as it did for seconds when it was overloaded
            await asyncio.sleep(0.01)
        buffer.put(tokens(1, finished=True))
        await sending
        return sent

    sent = asyncio.run(run())
    assert sum(delta.num_tokens for delta in sent) == 301
    assert "".join(c.text for delta in sent for c in delta.completions) == "x" * 301


@pytest.mark.parametrize(("n", "logprobs", "limit"), [(1, None, 8), (64, None, 512), (2, 3, 4), (64, 20, 64)])
def test_the_limit_of_unread_tokens_grows_with_the_samples(
    n: int, logprobs: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output_coalescer, "CUT_OFF_S", 0.02)
    monkeypatch.setattr(output_coalescer, "_GRACE_S", 0.02)

    async def run(count: int) -> bool:
        """Whether a blocked client is cut off when that many tokens have come."""

        async def never(_: RequestDelta) -> None:
            await asyncio.Event().wait()

        buffer = OutputCoalescer(8, SamplingParams(n=n, logprobs=logprobs))
        sending = asyncio.ensure_future(buffer.send_all(never))
        buffer.put(tokens(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(count):
            buffer.put(tokens(1))
        done, _ = await asyncio.wait((sending,), timeout=0.3)
        sending.cancel()
        (error,) = await asyncio.gather(sending, return_exceptions=True)
        assert not done or isinstance(error, SlowReaderError)
        return bool(done)

    assert not asyncio.run(run(limit))
    assert asyncio.run(run(limit + 1))


def test_the_end_of_a_request_waits_for_a_slow_client_only_so_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_coalescer, "LAST_READ_S", 0.05)

    async def run() -> None:
        async def never(_: RequestDelta) -> None:
            await asyncio.Event().wait()

        buffer = OutputCoalescer(8, SamplingParams())
        buffer.put(tokens(1, finished=True))
        with pytest.raises(SlowReaderError):
            await asyncio.wait_for(buffer.send_all(never), 30)

    asyncio.run(run())
