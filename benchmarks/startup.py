"""Time until a server is ready, with an empty and with a full compile cache; and what segments save of compiling.

    python benchmarks/startup.py [--devices 4] [--skip ready|segments] [--json startup.json]

`ready`: the default model on virtual devices, TP1, TP2 and TP4, each start in a process of its own, the first with an
empty cache. `segments`: a random model of 64 layers, compiled in segments of 4 (the default on CPU) and 8 and as a
whole, and its decode step.
"""

import argparse
import json
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
SEGMENTS = (4, 8, 64)
PARTS = ("import", "load", "compile", "first run")


def start(model: str, devices: int, device_memory: str, cache: str) -> dict[str, float]:
    """Seconds of the parts of one start, in this process."""
    began = time.perf_counter()
    from amoeba_jax import LLM
    from amoeba_jax.engine.warmup import warm_up

    imported = time.perf_counter()
    llm = LLM(model, num_devices=devices, device_memory=device_memory, compile_cache=cache, progress=False)
    loaded = time.perf_counter()
    degrees = list(llm._engine.cluster.sub_meshes.degrees())
    done = llm._dispatcher.call(warm_up, llm._engine, degrees, lambda: None).result()
    ready = time.perf_counter()
    llm.close()
    return {
        "import": imported - began,
        "load": loaded - imported,
        "compile": done.compile_s,
        "first run": done.run_s,
        "ready": ready - began,
        "programs": done.made,
        "cached": done.cached,
    }


def ready(options: argparse.Namespace) -> list[dict[str, float]]:
    """Starts with an empty cache and then with a full one."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            arguments = [options.model, str(options.devices), options.device_memory, cache]
            command = [sys.executable, __file__, "--start", *arguments]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results.append(json.loads(out.splitlines()[-1]))
            print(results[-1], file=sys.stderr, flush=True)
    return results


def segments(options: argparse.Namespace) -> dict[str, Any]:
    """Compile seconds of a decode and a prompt step, and decode step times, by the layers of a segment."""
    import jax

    from amoeba_jax import LLM
    from amoeba_jax.engine.executables import compile_programs
    from amoeba_jax.engine.instance import Instance

    def compile_s(instance: Instance) -> float:
        requests, buckets = instance.executables.requests, instance.buckets
        wanted = {}
        for shape in (buckets.step(options.batch), buckets.step(0, 1, buckets.chunk_sizes[-1])):
            for key, plan in zip(instance.step_keys(shape), instance.plans, strict=True):
                wanted[key] = requests.step(key, plan, instance.group)
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
                np.asarray(llm._engine.instances[0].launch(steps[length]).likeliest)
                if turn >= 2:
                    times[length].append(time.perf_counter() - began)
        for llm in engines.values():
            llm.close()
    result |= {f"step_s_{length}": samples for length, samples in times.items()}
    return result


def decode_step(llm, batch: int, context: int):
    """A step that decodes `batch` sequences of `context` tokens."""
    from amoeba_jax.engine.batch import StepBatch

    instance = llm._engine.instances[0]
    pages = llm.dims.pages.pages_for(context)
    step = StepBatch(instance.buckets.step(batch), instance.tp)
    step.set("positions", np.full(batch, context - 1))
    step.set("last_token", np.arange(batch))
    step.set("num_pages", np.full(batch, pages))
    for row in range(batch):
        step.set_table(row, instance.pages.allocate(pages))
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
    parser.add_argument("--batch", type=int, default=8, help="of the decode step, a power of two")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--skip", choices=("ready", "segments"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, result = Console(width=100, highlight=False), {}
    if options.skip != "ready":
        cold, warm = result["ready"] = ready(options)
        table = Table(
            "seconds", "empty cache", "full cache", "ratio", title=f"{options.model}, {options.devices} devices"
        )
        for part in (*PARTS, "ready"):
            table.add_row(part, f"{cold[part]:.1f}", f"{warm[part]:.1f}", f"{warm[part] / cold[part]:.2f}")
        console.print(table)
        console.print(
            f"{cold['programs']} programs; of the second start's {warm['programs']}, {warm['cached']} were cached"
        )
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
