"""The request handler with a scripted backend, for timings that a live server meets only by chance."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, cast

import pytest

from amoeba_jax import LLM
from amoeba_jax.errors import (
    DeadlineError,
    EngineClosedError,
    NotANumberError,
    QueueFullError,
    RequestError,
    RequestFailedError,
)
from amoeba_jax.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller
from serving.grpc_server.calls import Call, Chat
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import num_chars
from serving.grpc_server.request_handler import _LAST_WRITE_S, RequestHandler
from serving.grpc_server.statuses import LimitError, NotServingError, SlowReaderError
from serving.runtime.metrics import ServerMetrics

CALLER = Caller("client", "connection", "client")


def delta(*, finished: bool = False) -> tuple[None, RequestDelta]:
    """Return one more token."""
    completion = CompletionDelta(0, "", (7,), None, None, "stop" if finished else None, None)
    return None, RequestDelta("request", 1, (completion,), RequestMetrics(0.0), finished)


class Scripted:
    """Backend that yields a token, waits for `then`, and yields the last token."""

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
    """Writer that counts its writes. Each write takes the same time."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.begun = self.done = 0

    async def __call__(self, _: RequestDelta) -> None:
        self.begun += 1
        await asyncio.sleep(self._seconds)
        self.done += 1


async def serve(then: Awaitable[Any], writes: Writes, timeout_s: float | None = None) -> Scripted:
    """Serve a request to its end, and check that none of its state is left."""
    door, backend = RequestHandler(Limits(), ServerMetrics()), Scripted(then)
    door.attach(cast(LLM, backend), None)
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
    """The client's deadline and the server's time limit may both cancel the same request."""

    async def run() -> None:
        door, backend, writing = RequestHandler(Limits(), ServerMetrics()), Scripted(never_done()), asyncio.Event()
        door.attach(cast(LLM, backend), None)

        async def write(_: RequestDelta) -> None:
            writing.set()
            await asyncio.sleep(60)

        serving = asyncio.ensure_future(door.serve(Call("request", [1], SamplingParams(), CALLER), write))
        await writing.wait()
        serving.cancel()
        await asyncio.sleep(0)  # the handler processes the first cancellation
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineError("too late"), "abort"),
        (SlowReaderError("it does not read"), "abort"),
        (RequestError("a bad prompt"), "refused"),
        (QueueFullError("too many"), "refused"),
        (LimitError("too many"), "refused"),
        (NotANumberError("logits are not numbers"), "error"),
        (RequestFailedError("it cannot go on"), "error"),
        (EngineClosedError("it is gone"), "error"),
        (KeyError("a bug"), "error"),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_what_clients_do_counts_as_no_error(error: Exception, reason: str, num_tokens: int):
    class Failing(Scripted):
        async def astream_deltas(self, *_: Any, **__: Any) -> AsyncGenerator[tuple[None, RequestDelta], None]:
            for _ in range(num_tokens):
                yield delta()
            raise error

    async def run() -> None:
        door = RequestHandler(Limits(), metrics)
        door.attach(cast(LLM, Failing(never_done())), None)
        with pytest.raises(type(error)):
            await door.serve(Call("request", [1], SamplingParams(), CALLER), Writes(0))
        door.close()

    metrics = ServerMetrics()
    asyncio.run(run())
    assert counted(metrics) == {reason: 1}


def test_a_request_that_is_given_up_before_its_first_token_counts_as_aborted():
    class Silent(Scripted):
        async def astream_deltas(self, *_: Any, **__: Any) -> AsyncGenerator[tuple[None, RequestDelta], None]:
            reached.set()
            await self._then
            yield delta()

    async def run() -> None:
        door = RequestHandler(Limits(), metrics)
        door.attach(cast(LLM, Silent(never_done())), None)
        serving = asyncio.ensure_future(door.serve(Call("request", [1], SamplingParams(), CALLER), Writes(0)))
        await reached.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        door.close()

    metrics, reached = ServerMetrics(), asyncio.Event()
    asyncio.run(run())
    assert counted(metrics) == {"abort": 1}


def counted(metrics: ServerMetrics) -> dict[str, float]:
    """Return the number of finished requests for each reason."""
    (family,) = metrics.requests.collect()
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    return {sample.labels["finished_reason"]: sample.value for sample in totals if sample.value}


@pytest.mark.first_by_default
@pytest.mark.parametrize("cancellations", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5))])
def test_any_number_of_cancellations_at_any_time_end_the_request(cancellations: int):
    async def run(pauses: list[int]) -> None:
        door, backend = RequestHandler(Limits(), ServerMetrics()), Scripted(never_done())
        door.attach(cast(LLM, backend), None)
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
        door.attach(cast(LLM, backend), None)

        async def tokenize(*_: Any) -> list[int]:
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


def test_the_first_token_is_not_what_comes_of_a_prompt_before_it():
    """A request stays queued after its prompt's log-probabilities. The metrics do not count them."""
    queued: list[int] = []

    class OfPrompt(Scripted):
        async def astream_deltas(self, *_: Any, **__: Any) -> AsyncGenerator[tuple[None, RequestDelta], None]:
            of_prompt = RequestDelta("request", 3, (), RequestMetrics(0.0), False, (None, {7: Logprob(-1.0, 1)}))
            for news in ((None, of_prompt), delta(), delta(finished=True)):
                yield news
                queued.append(door.admission.requests_by_class.total())
            self.closed = True

    async def run() -> None:
        door.attach(cast(LLM, OfPrompt(never_done())), None)
        await door.serve(Call("request", [1], SamplingParams(prompt_logprobs=1), CALLER), Writes(0))
        door.close()

    metrics = ServerMetrics()
    door = RequestHandler(Limits(), metrics)
    asyncio.run(run())
    assert queued == [1, 0, 0]
    assert metrics.registry.get_sample_value("amoeba:prompt_tokens_total") == 1
    assert metrics.registry.get_sample_value("amoeba:inter_token_latency_seconds_count") == 1


@pytest.mark.parametrize(
    ("value", "size"),
    [("four", 4), ({"key": "four"}, 8), ({"key": [1, None, [], {}]}, 9), ([["a"]] * 3, 7), (1.5, 1)],
)
def test_keys_and_numbers_count_as_text(value: Any, size: int):
    assert num_chars(value) == size


@pytest.mark.parametrize("arguments", [{}, {"x": [1] * 4100}])
def test_a_conversation_that_becomes_too_long_is_not_tokenized(arguments: dict[str, Any]):
    """Arguments count too, because a template may repeat them."""

    class Repeating:
        longest_token_chars = 1

        def render_chat(self, *_: Any, **__: Any) -> str:
            assert not arguments, "over the limit already"
            return "x" * 5000

    class Backend(Scripted):
        max_model_len, tokenizer = 4096, Repeating()

    async def run() -> None:
        door = RequestHandler(Limits(max_prompt_chars=4050), ServerMetrics())
        door.attach(cast(LLM, Backend(never_done())), None)
        try:
            await door.tokenize(Chat([{"role": "user", "content": "x"}], settings={"arguments": arguments}))
        finally:
            door.close()

    with pytest.raises(RequestError, match="characters: at most 4050"):
        asyncio.run(run())
