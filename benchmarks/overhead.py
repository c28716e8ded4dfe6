"""Overhead of the engine: time of a decode step while serving, and of the same programs without the engine.

    python benchmarks/overhead.py [--batch 1 8 32] [--prompt 128] [--new-tokens 64] [--json overhead.json]

"Serving" is the time between two launches of decode steps in `LLM.generate`. "Alone" is the time of a step if prepared
steps are launched one after the other. Both measurements decode the same number of tokens at the same contexts on one
device, in turn.
"""

import argparse
import itertools
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import jax
import numpy as np
from decode import MODELS, launch
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.step import PendingStep, StepPlan
from amoeba_jax.programs.batch import StepBatch


def serving_s(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the median seconds between two decode steps while `LLM.generate` serves the prompts.

    The instances share the prompts equally. Only steps that decode all requests of their instance count.
    """
    instances = llm._engine.instances
    batch = len(prompts) // len(instances)
    launches: list[list[tuple[int, float]]] = [[] for _ in instances]
    """For each step of each instance: number of decodes, and time of the launch.

    The number is 0 if the step also computes a prompt.
    """
    with ExitStack() as restored:
        for instance, own in zip(instances, launches, strict=True):

            def timed(plan: StepPlan, lanes: list[Lane], launch=instance.runner.launch, own=own) -> PendingStep:
                step = launch(plan, lanes)
                decodes = len(plan.rows) if plan.shape.num_tokens == plan.shape.num_rows else 0
                own.append((decodes, time.perf_counter()))
                return step

            instance.runner.launch = timed
            restored.callback(delattr, instance.runner, "launch")
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
    pairs = [pair for own in launches for pair in itertools.pairwise(own)]
    return median(stop - start for (first, start), (rows, stop) in pairs if first == rows == batch)


def alone_s(llm: LLM, batch: int, prompt: int, new_tokens: int) -> float:
    """Return the mean seconds of a decode step without the engine. The context grows by one token in each step."""
    engine, instance = llm._engine, llm._engine.instances[0]
    pages = engine.dims.pages.pages_for(prompt + new_tokens)
    tables = [instance.lane.pages.allocate(pages) for _ in range(batch)]
    steps = [decode_step(instance, instance.buckets.step(batch), tables, prompt + i) for i in range(new_tokens - 1)]
    start = time.perf_counter()
    for step in steps:
        head = launch(instance, step)
        instance.runner.last_tokens = head.last_tokens
    jax.block_until_ready(head.argmax_ids)
    elapsed = time.perf_counter() - start
    for table in tables:
        instance.lane.pages.free(table)
    return elapsed / len(steps)


def decode_step(instance: Instance, shape, tables: list[np.ndarray], position: int) -> StepBatch:
    step, slots = StepBatch(shape, instance.tp), np.arange(len(tables))
    used = instance.lane.pages.geometry.pages_for(position + 1)
    step.set("sources", slots)
    step.set("slots", slots)
    step.set("positions", np.full(len(tables), position))
    step.set("last_token", slots)
    step.set("num_pages", np.full(len(tables), used))
    for row, table in enumerate(tables):
        step.set_table(row, table[:, :used])
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes, powers of two")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title="decode step, ms: median (of all)")
    for column in ("model", "batch", "serving", "executables alone", "ratio"):
        table.add_column(column, justify="left" if column == "model" else "right")
    results, random = [], np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in MODELS.items():
            (directory := Path(scratch) / name).mkdir()
            (directory / "config.json").write_text(json.dumps(config))
            llm = LLM(
                directory,
                load_format="random",
                num_devices=1,
                device_memory="3GiB",
                max_num_seqs=max(options.batch),
                max_model_len=2048,
                prefix_caching=False,
                progress=False,
            )
            with llm:
                for batch in options.batch:
                    prompts = random.integers(0, config["vocab_size"], (batch, options.prompt)).tolist()
                    serving_s(llm, prompts, options.new_tokens)
                    alone_s(llm, batch, options.prompt, options.new_tokens)
                    serving, alone = [], []
                    for _ in range(options.repeats):
                        serving.append(serving_s(llm, prompts, options.new_tokens))
                        alone.append(alone_s(llm, batch, options.prompt, options.new_tokens))
                    ratio = median(a / b for a, b in zip(serving, alone, strict=True))
                    results.append({"model": name, "batch": batch, "serving_s": serving, "alone_s": alone})
                    print(f"{name}, batch {batch}: {ratio:.2f}", flush=True)
                    table.add_row(name, str(batch), times(serving), times(alone), f"{ratio:.2f}")
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def times(samples: list[float]) -> str:
    return f"{median(samples) * 1e3:.1f} ({' '.join(f'{s * 1e3:.1f}' for s in sorted(samples))})"


if __name__ == "__main__":
    main()
