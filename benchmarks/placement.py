"""Cost of replicating and migrating layers and of scaling out, and speed-up by replicated layers.

    python benchmarks/placement.py [--layers 40] [--batch 16] [--json placement.json]

The model has random weights, and an instance on device 0. Device 1 is empty. The output has three parts:

- Seconds to replicate and to migrate the first layers to device 1, as in CoCoServe's Table 2. For comparison: seconds
  of a plain `jax.device_put` of the same weights, and of making KV caches of the same size.
- Step time and speed-up if layers are replicated, beside the speed-up that CoCoServe's Equation 4 predicts from the
  measured cost of a transfer. The speed-up is real only if the machine has a free core for each virtual device.
- Seconds to scale out to device 1. For comparison: seconds from the start of a new engine on one device to its first
  token, with all programs in the compile cache.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "16")
# One thread for each device: two devices then compute on two cores.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
from pausing import model
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.transform.options import PlacementOptions
from serving.scheduler.cocoserve.speedup import even_speedup
from sharding.placement import Home

PAPER = {
    1: (0.2987, 0.2492, 1107),
    10: (0.3581, 0.3181, 6579),
    20: (0.3826, 0.3426, 12659),
    30: (0.4947, 0.3947, 18739),
    40: (0.8938, 0.8138, 24819),
}
"""CoCoServe's Table 2: seconds to replicate and to migrate layers of LLaMA-13B on an A100, and megabytes."""


def plain_s(llm: LLM, layers: range) -> tuple[float, float]:
    """Return the seconds to `device_put` the weights of layers on device 1, and to make KV caches for them there."""
    cluster = llm._engine.cluster
    weights, site = cluster.weights, cluster.instances[0].runner.sites[Home(0, 1)]
    shapes = [(pages, cluster.dims.pages.page_elems) for pages in site.extent_pages]
    shards = [
        weights.any_shard(spec.name, index)
        for layer in layers
        for spec in weights.specs_of(layer)
        for index in range(spec.num_shards)
    ]
    start = time.perf_counter()
    jax.block_until_ready(jax.device_put(shards, weights.devices[1]))
    copied = time.perf_counter()
    jax.block_until_ready(
        [jnp.zeros(shape, cluster.dims.dtype, device=weights.devices[1]) for _ in layers for shape in shapes]
    )
    return copied - start, time.perf_counter() - copied


def costs(llm: LLM, num_layers: int, repeats: int) -> list[dict[str, Any]]:
    """Replicate layers on device 1, and migrate layers there. Return median seconds and bytes for each number of
    layers."""
    found = []
    for count in [n for n in PAPER if n <= num_layers]:
        layers, taken = range(count), dict[str, list[float]](replicate=[], migrate=[], copy=[], kv=[])
        copied = 0
        for repeat in range(repeats + 1):  # the first compiles
            report = llm.replicate(layers, 1)
            copied = report.copied_bytes
            llm.evict(layers, 1)
            moved = llm.migrate(layers, 1)
            llm.migrate(layers, 0)
            if repeat:
                taken["replicate"].append(report.seconds)
                taken["migrate"].append(moved.seconds)
                for name, seconds in zip(("copy", "kv"), plain_s(llm, layers), strict=True):
                    taken[name].append(seconds)
        found.append(
            {"layers": count, "copied_bytes": copied} | {name: statistics.median(s) for name, s in taken.items()}
        )
    return found


def step_s(llm: LLM, batch: int, steps: int) -> float:
    """Return the seconds of a decode step with `batch` sequences: the median of 5 runs."""
    random, taken = np.random.default_rng(0), []
    prompts = [random.integers(3, 2000, 8).tolist() for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    for repeat in range(6):
        start, before = time.perf_counter(), llm.stats.steps
        llm.generate(prompts, params)
        if repeat:
            taken.append((time.perf_counter() - start) / (llm.stats.steps - before))
    return statistics.median(taken)


def speedups(llm: LLM, num_layers: int, batch: int, steps: int) -> list[dict[str, Any]]:
    """Return the step time and the measured and predicted (Equation 4) speed-up for growing numbers of replicated
    layers."""
    alone = step_s(llm, batch, steps)
    found: list[dict[str, Any]] = [{"layers": 0, "step_s": alone, "measured": 1.0, "predicted": 1.0}]
    llm.replicate(range(1), 1)  # two transfers, and hardly any parallel work
    cost = max(0.0, (step_s(llm, batch, steps) - alone) / (alone / num_layers) + 0.5) / 2
    llm.evict(range(1), 1)
    for share in (0.25, 0.5, 0.75, 1):
        count = int(num_layers * share)
        llm.replicate(range(count), 1)
        seconds = step_s(llm, batch, steps)
        predicted = even_speedup([2] * count + [1] * (num_layers - count), 2, cost)
        found.append({"layers": count, "step_s": seconds, "measured": alone / seconds, "predicted": predicted})
        llm.evict(range(count), 1)
    return found


def first_token_s(llm: LLM, num_layers: int) -> dict[str, float]:
    """Scale out to an empty device while requests run.

    Return the seconds until the first token that the new device has helped to compute, and until the device has an
    instance of its own.
    """
    prompts = [[1, 2, 3 + n] for n in range(8)]
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    call, start = llm._dispatcher.call, time.perf_counter()
    future = call(llm._engine.changes.request, PlacementOptions("scale_out", 1)).result()
    first, layers = 0.0, 0
    while not future.done():
        switched = [status.layers_switched for status in llm.stats.placements]
        if switched and switched[0] and not first:
            next(streams[0])
            first, layers = time.perf_counter() - start, switched[0]
    report = future.result()
    for stream in streams:
        stream.close()
    llm.scale_in(1)
    return {"first_s": first, "layers_then": layers, "own_instance_s": report.seconds, "num_layers": num_layers}


def cold_start_s(settings: dict[str, Any]) -> float:
    """Return the seconds from the start of a new engine on one device to its first token."""
    start = time.perf_counter()
    with LLM(**(settings | {"num_devices": 1, "placement": None})) as llm:
        next(llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)))
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    placement = {"head": [0], "stages": [{"layers": [0, options.layers], "homes": [[0]]}]}
    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, Any] = {
            "model": model(Path(directory) / "model", options.layers),
            "load_format": "random",
            "num_devices": 2,
            "placement": placement,
            "kv_cache_tokens": 8192,
            "max_num_seqs": 32,
            "max_model_len": 1024,
            "prefix_caching": False,
            "progress": False,
        }
        with LLM(**settings) as llm:
            found: dict[str, Any] = {
                "costs": costs(llm, options.layers, options.repeats),
                "speedups": speedups(llm, options.layers, options.batch, options.steps),
                "scale_out": first_token_s(llm, options.layers),
            }
        cold_start_s(settings)  # compiles
        found["cold_start_s"] = cold_start_s(settings)
    _print(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


def _print(found: dict[str, Any]) -> None:
    console = Console(width=150)
    table = Table(title="seconds to replicate and to migrate layers")
    for column in (
        "layers",
        "bytes",
        "replicate",
        "migrate",
        "device_put",
        "KV cache",
        "paper: replicate",
        "migrate",
        "MB",
    ):
        table.add_column(column, justify="right")
    for row in found["costs"]:
        paper = PAPER[row["layers"]]
        seconds = [f"{row[name]:.3f}" for name in ("replicate", "migrate", "copy", "kv")]
        table.add_row(str(row["layers"]), str(row["copied_bytes"]), *seconds, *map(str, paper))
    console.print(table)
    table = Table(title="decode step with replicated layers on two devices")
    for column in ("replicated", "ms", "speed-up", "Equation 4"):
        table.add_column(column, justify="right")
    for row in found["speedups"]:
        figures = f"{row['step_s'] * 1e3:.1f}", f"{row['measured']:.2f}", f"{row['predicted']:.2f}"
        table.add_row(str(row["layers"]), *figures)
    console.print(table)
    out = found["scale_out"]
    console.print(
        f"scale_out: a token with {out['layers_then']} of {out['num_layers']} layers on the new device after "
        f"{out['first_s'] * 1e3:.0f} ms; an instance of its own after {out['own_instance_s'] * 1e3:.0f} ms; a new "
        f"engine needs {found['cold_start_s'] * 1e3:.0f} ms to its first token"
    )


if __name__ == "__main__":
    main()
