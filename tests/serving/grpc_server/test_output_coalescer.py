"""Unsent output of a client: it is merged if the client is slow. A client that does not read is cut off."""

import asyncio
import time

import pytest

from amoeba_jax.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server import output_coalescer
from serving.grpc_server.output_coalescer import OutputCoalescer
from serving.grpc_server.statuses import SlowReaderError


def tokens(count: int, *, finished: bool = False) -> RequestDelta:
    completion = CompletionDelta(0, "x" * count, (7,) * count, None, None, "stop" if finished else None, None)
    return RequestDelta("request", 1, (completion,), RequestMetrics(0.0), finished)


def test_a_server_that_is_late_cuts_nobody_off():
    """After a long stall of the event loop, all tokens arrive at once. No write was blocked meanwhile."""

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
            time.sleep(0.05)  # the event loop stalls, as it did for seconds under overload
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
        """Return whether a blocked client is cut off after this number of tokens."""

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


def of_prompt(num_positions: int) -> RequestDelta:
    """Return log-probabilities of a prompt, which come before the first token."""
    entry = {7: Logprob(-1.0, 1), 8: Logprob(-2.0, 2)}
    return RequestDelta("request", 300, (), RequestMetrics(0.0), False, (entry,) * num_positions)


@pytest.mark.parametrize(("num_positions", "is_slow"), [(4, False), (5, True)])
def test_log_probabilities_of_a_prompt_count_as_unread(
    num_positions: int, is_slow: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output_coalescer, "CUT_OFF_S", 0.02)
    monkeypatch.setattr(output_coalescer, "_GRACE_S", 0.02)

    async def run() -> None:
        async def never(_: RequestDelta) -> None:
            await asyncio.Event().wait()

        buffer = OutputCoalescer(8, SamplingParams(prompt_logprobs=1))
        sending = asyncio.ensure_future(buffer.send_all(never))
        buffer.put(of_prompt(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        buffer.put(of_prompt(num_positions))
        done, _ = await asyncio.wait((sending,), timeout=0.3)
        sending.cancel()
        (error,) = await asyncio.gather(sending, return_exceptions=True)
        assert bool(done) == is_slow
        if is_slow:
            assert "10 tokens and log-probabilities have come since, over the limit of 8" in str(error)

    asyncio.run(run())


def test_a_client_that_reads_a_long_prompts_log_probabilities_bit_by_bit_is_not_slow(monkeypatch: pytest.MonkeyPatch):
    """Each part is a separate write, even if more output arrives meanwhile."""
    monkeypatch.setattr(output_coalescer, "CUT_OFF_S", 0.2)
    monkeypatch.setattr(output_coalescer, "_PART_ENTRIES", 30)

    async def run() -> list[RequestDelta]:
        sent: list[RequestDelta] = []

        async def write(delta: RequestDelta) -> None:
            await asyncio.sleep(0.05)
            sent.append(delta)

        buffer = OutputCoalescer(8, SamplingParams(prompt_logprobs=1))
        sending = asyncio.ensure_future(buffer.send_all(write))
        buffer.put(of_prompt(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        buffer.put(of_prompt(100))
        await asyncio.sleep(0.3)
        buffer.put(tokens(1, finished=True))
        await sending
        return sent

    sent = asyncio.run(run())
    assert [len(it.prompt_logprobs) for it in sent] == [1, *[10] * 10, 0]
    assert [it.finished for it in sent] == [*[False] * 11, True]
    assert [it.num_tokens for it in sent] == [*[0] * 11, 1]


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
