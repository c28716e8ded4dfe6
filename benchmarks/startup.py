"""Start-up time with an empty and with a full compile cache, and compile time by size of segments.

    python benchmarks/startup.py [--devices 4] [--beside CHECKOUT] [--skip ready|segments] [--json startup.json]

There are two parts:

- `ready` starts the default model on virtual devices in a new process, first with an empty cache and then with a full
  cache. It measures the time until the first request is served, and until all programs of TP1, TP2 and TP4 are compiled
  in the background. With `--beside`, it also measures another checkout of this project.
- `segments` compiles a random model of 64 layers in segments of 4 (the default on CPU), in segments of 8, and as a
  whole. It also times the decode step of each variant.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

DEEP: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "hidden_size": 512,
    "num_hidden_layers": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
ROOT = Path(__file__).resolve().parents[1]
SEGMENTS = (4, 8, 64)
PARTS = ("import", "load, programs of the first layout", "first request served", "everything there")


def start(model: str, devices: int, device_memory: str, cache: str) -> dict[str, float]:
    """Start an engine in this process. Return the seconds of each part of the start. Works in older checkouts too."""
    began = time.perf_counter()
    from amoeba_jax import LLM, SamplingParams

    imported = time.perf_counter()
    degrees = [degree for degree in (1, 2, 4) if degree <= devices]
    settings: dict[str, Any] = {"num_devices": devices, "device_memory": device_memory, "compile_cache": cache}
    meanwhile = "warmup" in inspect.signature(LLM.__init__).parameters
    if meanwhile:
        settings["warmup"] = degrees[:1]
    llm = LLM(model, progress=False, **settings)
    beside = hasattr(llm.stats, "degrees")
    if not meanwhile:  # Such checkouts compile after loading; others compile during loading.
        llm.warmup(degrees[:1] if beside else degrees)
    ready = time.perf_counter()
    if beside:
        llm.warmup(degrees, background=True)
    llm.generate("One request.", SamplingParams(temperature=0, max_tokens=1))
    served = time.perf_counter()
    while beside and not all(it.ready for it in llm.stats.degrees):
        time.sleep(0.1)
    everything = time.perf_counter()
    with open("/proc/self/maps", "rb") as maps:
        mappings = sum(1 for _ in maps)
    programs = llm.executables()
    llm.close()
    return {
        "import": imported - began,
        "load, programs of the first layout": ready - imported,
        "first request served": served - began,
        "everything there": everything - began,
        "programs": len(programs),
        "cached": sum(info.cached for info in programs),
        "mappings": mappings,
        "cache_bytes": sum(file.stat().st_size for file in Path(cache).iterdir()),
    }


def ready(options: argparse.Namespace, checkout: Path) -> list[dict[str, float]]:
    """Start a checkout with an empty compile cache, then with a full compile cache, and return both measurements."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            arguments = [options.model, str(options.devices), options.device_memory, cache]
            command = [sys.executable, __file__, "--start", *arguments]
            environment = os.environ | {"PYTHONPATH": str(checkout)}
            out = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, cwd=checkout, env=environment
            ).stdout
            results.append(json.loads(out.splitlines()[-1]))
            print(checkout.name, results[-1], file=sys.stderr, flush=True)
    return results


def segments(options: argparse.Namespace) -> dict[str, Any]:
    """Return compile times and decode step times in seconds, by number of layers in a segment."""
    import jax
    from decode import launch

    from amoeba_jax import LLM
    from amoeba_jax.instances.instance import Instance
    from amoeba_jax.instances.step import StepPlan
    from amoeba_jax.programs.background import compile_programs

    def compile_s(instance: Instance) -> float:
        buckets = instance.buckets
        shapes = buckets.step(options.batch), buckets.step(0, 1, buckets.chunk_sizes[-1])
        wanted = {request.key: request for shape in shapes for request in instance.runner.specs(StepPlan(shape, ()))}
        start = time.perf_counter()
        made = list(compile_programs(wanted.values(), jobs=1))
        assert not any(executable.info.cached for executable in made), "the cache must be off"
        return time.perf_counter() - start

    jax.config.update("jax_enable_compilation_cache", False)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(DEEP))
        engines = {
            length: LLM(
                directory,
                load_format="random",
                device_memory="3GiB",
                kv_cache_tokens=8192,
                max_num_seqs=options.batch,
                max_num_batched_tokens=128,
                segment_layers=length,
                compile_cache="",
                progress=False,
            )
            for length in SEGMENTS
        }
        for length, llm in engines.items():
            result[f"compile_s_{length}"] = compile_s(llm._engine.instances[0])
            print(result, file=sys.stderr, flush=True)
        times: dict[int, list[float]] = {length: [] for length in engines}
        steps = {length: decode_step(llm, options.batch, options.context) for length, llm in engines.items()}
        for turn in range(options.repeats + 2):
            for length, llm in engines.items():
                began = time.perf_counter()
                np.asarray(launch(llm._engine.instances[0], steps[length]).argmax_ids)
                if turn >= 2:
                    times[length].append(time.perf_counter() - began)
        for llm in engines.values():
            llm.close()
    result |= {f"step_s_{length}": samples for length, samples in times.items()}
    return result


def decode_step(llm, batch: int, context: int):
    """Return a prepared batch for a step that decodes `batch` sequences, each with `context` tokens."""
    from amoeba_jax.programs.batch import StepBatch

    instance = llm._engine.instances[0]
    pages = llm.dims.pages.pages_for(context)
    step = StepBatch(instance.buckets.step(batch), instance.tp)
    step.set("positions", np.full(batch, context - 1))
    step.set("last_token", np.arange(batch))
    step.set("num_pages", np.full(batch, pages))
    for row in range(batch):
        step.set_table(row, instance.lane.pages.allocate(pages))
    return step


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        model, devices, device_memory, cache = sys.argv[2:]
        print(json.dumps(start(model, int(devices), device_memory, cache)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--batch", type=int, default=8, help="batch size of the decode step, a power of two")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--beside", type=Path, help="another checkout, for comparison")
    parser.add_argument("--skip", choices=("ready", "segments"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, result = Console(width=100, highlight=False), {}
    if options.skip != "ready":
        result["ready"] = ready(options, ROOT)
        columns = {"empty cache": result["ready"][0], "full cache": result["ready"][1]}
        if options.beside:
            result["beside"] = ready(options, options.beside.resolve())
            columns |= {"beside: empty": result["beside"][0], "full": result["beside"][1]}
        table = Table("seconds", *columns, title=f"{options.model}, {options.devices} devices")
        for part in PARTS:
            table.add_row(part, *(f"{figures[part]:.1f}" for figures in columns.values()))
        for part in ("programs", "cached", "mappings"):
            table.add_row(part, *(f"{figures[part]:,}" for figures in columns.values()))
        table.add_row("cache, MiB", *(f"{figures['cache_bytes'] / 2**20:.1f}" for figures in columns.values()))
        console.print(table)
        if options.beside:
            for part in (*PARTS[2:], "cache_bytes"):
                ratios = (new[part] / old[part] for new, old in zip(result["ready"], result["beside"], strict=True))
                console.print(f"{part}: {', '.join(f'{ratio:.2f}x' for ratio in ratios)} (empty, full cache)")
    if options.skip != "segments":
        deep = result["segments"] = segments(options)
        table = Table("64 layers", *(f"segments of {length}" for length in SEGMENTS[:-1]), "whole")
        for name, figures in (
            ("compile, s", [deep[f"compile_s_{length}"] for length in SEGMENTS]),
            ("decode step, ms", [1e3 * median(deep[f"step_s_{length}"]) for length in SEGMENTS]),
        ):
            table.add_row(
                name, *(f"{x:.1f} ({x / figures[-1]:.3f} of the whole)" for x in figures[:-1]), f"{figures[-1]:.1f}"
            )
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
