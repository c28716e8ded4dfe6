"""Overhead of the server: tokens per second over gRPC with many streams, compared with `LLM.generate`.

    python benchmarks/grpc_overhead.py [--model smollm2-135m] [--streams 64] [--requests 128] [--repeats 2] [--json F]

One child process calls `LLM.generate`. Another child process is `amoeba serve`, and this process reads `--streams`
streams of that server at a time. The two child processes take turns with the same requests. Each request has 0.5 to 1.5
times `--new-tokens` output tokens.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from server_process import server

from amoeba_jax import SamplingParams
from amoeba_jax.client import AsyncClient

Prompts = list[list[int]]


def params(options: argparse.Namespace) -> list[SamplingParams]:
    """Return the parameters of each request, equal in both processes."""
    lengths = np.random.default_rng(1).integers(options.new_tokens // 2, options.new_tokens * 3 // 2, options.requests)
    return [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in lengths]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    per_device = -(-options.streams // options.num_devices)
    return {
        "model": options.model,
        "num_devices": options.num_devices,
        "device_memory": options.device_memory,
        "max_num_seqs": 1 << (per_device - 1).bit_length(),
        "max_model_len": 512,
    }


def generate_in_process(options: argparse.Namespace, prompts: Prompts, parent: Connection) -> None:
    """Run `LLM.generate` once for each message from `parent`, and send back the seconds and the tokens."""
    from amoeba_jax import LLM

    with LLM(**settings(options), prefix_caching=False, progress=False) as llm:
        parent.send(None)
        while parent.recv():
            start = time.perf_counter()
            outputs = llm.generate(prompts, params(options))
            parent.send((time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]))


async def streams_s(target: str, prompts: Prompts, options: argparse.Namespace) -> tuple[float, list[tuple[int, ...]]]:
    async with AsyncClient(target) as client:
        room = asyncio.Semaphore(options.streams)

        async def read(prompt: list[int], how: SamplingParams) -> tuple[int, ...]:
            async with room:
                return tuple([t async for chunk in client.stream(prompt, how) for t in chunk.token_ids])

        start = time.perf_counter()
        answers = await asyncio.gather(*map(read, prompts, params(options)))
        return time.perf_counter() - start, list(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    prompts = random.integers(1000, 30000, (options.requests, options.prompt)).tolist()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=generate_in_process, args=(options, prompts, theirs))
    child.start()
    ours.recv()
    times: dict[str, list[float]] = {"LLM.generate": [], "gRPC": []}
    with server(settings(options), prefix_caching=False) as target:
        for repeat in range(options.repeats + 1):  # The first repeat compiles.
            ours.send(True)
            alone_s, expected = ours.recv()
            grpc_s, answers = asyncio.run(streams_s(target, prompts, options))
            assert answers == expected, "the same tokens either way"
            if repeat:
                times["LLM.generate"].append(alone_s)
                times["gRPC"].append(grpc_s)
    ours.send(False)
    child.join()
    total = sum(how.max_tokens or 0 for how in params(options))
    title = f"{options.model}, {options.num_devices} devices, {options.requests} requests, {options.streams} at a time"
    table = Table(title=f"{title}, {total} tokens")
    for column in ("", "seconds, median", "tokens/s", "of LLM.generate"):
        table.add_column(column, justify="right" if column else "left")
    base = median(times["LLM.generate"])
    for name, seconds in times.items():
        middle = median(seconds)
        table.add_row(name, f"{middle:.2f}", f"{total / middle:.1f}", f"{base / middle:.3f}x")
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(times | {"tokens": total}, indent=2) + "\n")


if __name__ == "__main__":
    main()
