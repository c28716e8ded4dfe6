"""Overhead of HTTP: tokens per second as server-sent events with many streams, compared with gRPC on the same server.

    python benchmarks/http_overhead.py [--model smollm2-135m] [--streams 64] [--requests 128] [--repeats 2] [--json F]

One child process is `amoeba serve --http-port`. This process reads `--streams` streams at a time. Runs over gRPC and
runs over HTTP (`/v1/completions`) alternate. The HTTP client is httpx2, on which OpenAI's client is built.
"""

import argparse
import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import numpy as np
from grpc_overhead import Prompts, params, settings
from rich.console import Console
from rich.table import Table
from server_process import server

from amoeba_jax import SamplingParams
from amoeba_jax.client import AsyncClient

Read = Callable[[list[int], SamplingParams], Awaitable[int]]


async def seconds(read: Read, prompts: Prompts, options: argparse.Namespace) -> float:
    """Return the seconds until `read` has read the tokens of all prompts."""
    room = asyncio.Semaphore(options.streams)

    async def one(prompt: list[int], how: SamplingParams) -> None:
        async with room:
            assert await read(prompt, how) == how.max_tokens, "every token arrives"

    start = time.perf_counter()
    await asyncio.gather(*map(one, prompts, params(options)))
    return time.perf_counter() - start


async def grpc_s(target: str, prompts: Prompts, options: argparse.Namespace) -> float:
    async with AsyncClient(target) as client:

        async def read(prompt: list[int], how: SamplingParams) -> int:
            return sum([len(chunk.token_ids) async for chunk in client.stream(prompt, how)])

        return await seconds(read, prompts, options)


async def http_s(url: str, prompts: Prompts, options: argparse.Namespace) -> float:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def read(prompt: list[int], how: SamplingParams) -> int:
            body: dict[str, Any] = {
                "model": options.model.rpartition("/")[2],
                "prompt": prompt,
                "temperature": 0,
                "max_tokens": how.max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            usage = 0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        usage = (json.loads(line[6:])["usage"] or {}).get("completion_tokens", usage)
            return usage

        return await seconds(read, prompts, options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--vocab-size", type=int, default=30_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    prompts = random.integers(options.vocab_size // 30, options.vocab_size, (options.requests, options.prompt)).tolist()
    times: dict[str, list[float]] = {"gRPC": [], "HTTP": []}
    port = free_port()
    with server(settings(options), prefix_caching=False, http_port=port) as target:
        for repeat in range(options.repeats + 1):  # The first repeat compiles.
            over_grpc = asyncio.run(grpc_s(target, prompts, options))
            over_http = asyncio.run(http_s(f"http://127.0.0.1:{port}", prompts, options))
            if repeat:
                times["gRPC"].append(over_grpc)
                times["HTTP"].append(over_http)
    total = sum(how.max_tokens or 0 for how in params(options))
    title = f"{options.model}, {options.num_devices} devices, {options.requests} requests, {options.streams} at a time"
    table = Table(title=f"{title}, {total} tokens")
    for column in ("", "seconds, median", "tokens/s", "of gRPC"):
        table.add_column(column, justify="right" if column else "left")
    base = median(times["gRPC"])
    for name, values in times.items():
        middle = median(values)
        table.add_row(name, f"{middle:.2f}", f"{total / middle:.1f}", f"{base / middle:.3f}x")
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(times | {"tokens": total}, indent=2) + "\n")


if __name__ == "__main__":
    main()
