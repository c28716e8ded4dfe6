"""Attacks with streams: unread, cancelled early, left open, or with deadlines that are too short."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import grpc

from amoeba_jax.client._proto import inference_pb2 as pb
from attacks.pressure import OPEN_INFERENCE, OPTIONS, Attacker, Call, generate, infer, start

Run = Callable[[], Awaitable[None]]
_HELD_S = 3.0
_HALF_OPEN = 200
_DEADLINES = 2000


def endless(label: str, max_tokens: int, n: int = 1, timeout_s: float = 20.0) -> Call:
    """Return a request for `n` samples of exactly `max_tokens` tokens."""
    return generate(label, pb.SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True), timeout_s=timeout_s)


async def slow_readers(attacker: Attacker) -> Run:
    """Open 16 streams of 64 samples, read nothing for three seconds, then read the streams."""
    longest = await attacker.longest(lambda n: endless("", n, 64), attacker.info.max_model_len - 16)
    calls = [endless("64 samples", longest, 64), infer_stream(attacker, longest)]

    async def hold(call: Call, channel: grpc.aio.Channel) -> None:
        rpc, status = start(channel, call), "not over"
        attacker.tally.sent += 1
        try:
            await asyncio.sleep(_HELD_S)
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(_HELD_S):
                    async for data in rpc:
                        attacker.tally.bytes_received += len(data)
            status = (await rpc.code()).name if rpc.done() else status
        finally:
            rpc.cancel()
            attacker.tally.add(call.label, status)

    async def run() -> None:
        end = time.monotonic() + attacker.seconds
        while time.monotonic() < end:
            await asyncio.gather(*(hold(calls[i % 2], channel_of(attacker, i)) for i in range(16)))

    return run


def infer_stream(attacker: Attacker, max_tokens: int) -> Call:
    """Return a streaming request of the Open Inference Protocol for 64 samples of `max_tokens` tokens."""
    settings = f'{{"n": 64, "max_tokens": {max_tokens}, "ignore_eos": true}}'
    return infer("64 samples, Open Inference", attacker.info.model, settings, stream=True)


def channel_of(attacker: Attacker, index: int) -> grpc.aio.Channel:
    """Return a connection of the attacker. Consecutive indexes return different connections in turn."""
    return attacker.channels[index % len(attacker.channels)]


async def dropped(attacker: Attacker) -> Run:
    """Keep 32 streams open, and cancel each stream within 20 ms."""
    longest = await attacker.longest(lambda n: endless("", n, 64), attacker.info.max_model_len - 16)
    calls = [endless("64 samples", longest, 64), endless("1 sample", longest), infer_stream(attacker, longest)]
    dice = random.Random(0)

    async def drop(index: int, end: float) -> None:
        while time.monotonic() < end:
            call = calls[dice.randrange(len(calls))]
            attacker.tally.sent += 1
            rpc = start(channel_of(attacker, index), call)
            await asyncio.sleep(dice.choice((0, 0.001, 0.005, 0.02)))
            rpc.cancel()
            attacker.tally.add(call.label, "dropped" if not rpc.done() or rpc.cancelled() else (await rpc.code()).name)

    async def run() -> None:
        end = time.monotonic() + attacker.seconds
        await asyncio.gather(*(drop(i, end) for i in range(32)))

    return run


async def half_open(attacker: Attacker) -> Run:
    """Open 200 connections with five silent streams each, and 200 connections that stop in the HTTP/2 preface."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            host, _, port = attacker.target.rpartition(":")
            calls = []
            for _ in range(_HALF_OPEN):
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(attacker.target, OPTIONS))
                open_stream = channel.stream_stream(OPEN_INFERENCE + "ModelStreamInfer")
                calls.extend(open_stream(timeout=120) for _ in range(5))
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port))
                    stack.callback(writer.close)
                    writer.write(b"PRI * HTTP/2.0\r\n")
            attacker.tally.sent += len(calls)
            await asyncio.sleep(attacker.seconds)
            for call in calls:
                status = (await call.code()).name if call.done() else "open"
                call.cancel()
                attacker.tally.add("half open", status)

    return run


async def deadlines(attacker: Attacker) -> Run:
    """Send 2,000 requests with deadlines of 50 to 150 ms, which are too short."""
    longest = await attacker.longest(lambda n: endless("", n), attacker.info.max_model_len - 16)
    dice = random.Random(0)

    async def run() -> None:
        begin, tasks = time.monotonic(), []
        for index in range(_DEADLINES):
            await asyncio.sleep(max(0.0, begin + index * attacker.seconds / _DEADLINES - time.monotonic()))
            call = endless("too late", longest, timeout_s=dice.uniform(0.05, 0.15))
            tasks.append(asyncio.ensure_future(attacker.send(call, channel_of(attacker, index))))
        await asyncio.gather(*tasks)

    return run
