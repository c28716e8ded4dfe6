"""Computed prompt tokens, TTFT and total time of requests with a common prefix, with and without prefix cache.

    python benchmarks/prefix.py [--prefix 1000] [--requests 64] [--json prefix.json]

One request is answered first, so that the common prefix is cached. Then all other requests arrive at once. Each repeat
has a new prefix. All programs are compiled before the measurements.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from decode import MODELS
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams

NEW_TOKENS = 16


def measure(llm: LLM, prefix_len: int, own: list[list[int]], seed: int) -> dict[str, float]:
    """Answer one request, then time the other requests together.

    Args:
        own: tokens of each request after the common prefix.
        seed: seed of the common prefix.
    """
    prefix = np.random.default_rng(seed).integers(0, llm.dims.config.vocab_size, prefix_len).tolist()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    first, *prompts = (prefix + prompt for prompt in own)
    llm.generate([first], params)
    before, start = llm.stats, time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed, after = time.perf_counter() - start, llm.stats
    waits = [output.metrics.ttft_s for output in outputs]
    return {
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "cached_tokens": after.cached_tokens - before.cached_tokens,
        "mean_ttft_s": mean(waits),
        "max_ttft_s": max(waits),
        "total_s": elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of the common prefix")
    parser.add_argument("--own", type=int, default=32, help="further prompt tokens of each request")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    config = MODELS["Llama-125M"]
    own = random.integers(0, config["vocab_size"], (options.requests + 1, options.own)).tolist()
    results: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as engines:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        settings: dict[str, Any] = {
            "load_format": "random",
            "num_devices": 1,
            "device_memory": "4GiB",
            "max_model_len": 2048,
            "progress": False,
            "warmup": [1],
        }
        llms = {
            name: engines.enter_context(LLM(scratch, prefix_caching=caching, **settings))
            for name, caching in (("off", False), ("on", True))
        }
        for repeat in range(options.repeats + 1):  # The first repeat touches the memory of the KV cache.
            for name, llm in llms.items():
                result = measure(llm, options.prefix, own, repeat)
                if repeat:
                    results[name].append(result)
    table = Table(title=f"{options.requests} requests, {options.prefix} tokens shared, {options.own} of their own")
    for column in ("", "without", "with", "with / without"):
        table.add_column(column, justify="right" if column else "left")
    for label, field, form in (
        ("prompt tokens computed", "prompt_tokens", "{:.0f}"),
        ("prompt tokens found", "cached_tokens", "{:.0f}"),
        ("mean TTFT, s", "mean_ttft_s", "{:.2f}"),
        ("longest TTFT, s", "max_ttft_s", "{:.2f}"),
        ("all answered, s", "total_s", "{:.2f}"),
    ):
        off, on = (median(result[field] for result in results[name]) for name in ("off", "on"))
        table.add_row(label, form.format(off), form.format(on), f"{on / off:.3f}" if off else "")
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
