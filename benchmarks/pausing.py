"""Host time of pausing requests, of launching the first step of an urgent request, and of resuming the requests.

    python benchmarks/pausing.py [--layers 48] [--paused 8] [--repeats 9] [--json pausing.json]

Requests of a random model decode on 4 virtual devices at TP1, with the cache 90% full. They pause while a TP4 instance
serves an urgent request, and then resume. The table has the elapsed time and the processor time of the dispatcher
thread, because threads of a running step compete with this thread for few processors. The last line of the output tells
whether bytes were moved, requests were recomputed, or tokens differ from an undisturbed run.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.request import Request
from amoeba_jax.transform.options import RunningRequests, TransformOptions
from amoeba_jax.transform.report import TransformReport

DEVICES = (0, 1, 2, 3)
PAGE_SIZE = 16
PARTS = ("pause", "first launch", "resume")


def model(directory: Path, layers: int) -> Path:
    """Write the config of a model with random weights, and return its directory."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


class Timer:
    """Timer of the wall clock and of this thread's processor time."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def ms(self) -> tuple[float, float]:
        """Return the wall-clock time and the processor time since the start, in milliseconds."""
        return (time.perf_counter() - self._start[0]) * 1e3, (time.thread_time() - self._start[1]) * 1e3


def change(engine: Engine, degree: int, running: RunningRequests) -> tuple[tuple[float, float], TransformReport]:
    """Change the degree. Return (wall clock, processor time of the thread) in ms, and the report."""
    timer = Timer()
    future = engine.transform(TransformOptions(degree, DEVICES, release_weights=False, running=running))
    taken_ms = timer.ms()
    engine.end_transformations()  # Compiles missing programs before the timed part.
    return taken_ms, future.result(0)


def run_until(engine: Engine, requests: list[Request], tokens: int | None = None) -> None:
    """Run steps until each request has `tokens` tokens or has ended."""
    sequences = [request.sequences[0] for request in requests]
    while not all(s.finished or (tokens is not None and len(s.output) >= tokens) for s in sequences):
        engine.advance()
        engine.drain()


def rounds(llm: LLM, num_paused: int, repeats: int) -> dict[str, Any]:
    """Pause and resume requests repeatedly, and return times and counts.

    Call this function in the dispatcher thread.
    """
    engine, random = llm._engine, np.random.default_rng(0)
    tokens = int(0.9 * engine.capacity_tokens(1)) * len(DEVICES) // num_paused
    prompts = [random.integers(3, 2000, tokens - 64).tolist() for _ in range(num_paused)]
    urgent = random.integers(3, 2000, 64).tolist()
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, priority=-1)
    taken: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    outputs: list[list[list[int]]] = []
    moved = recomputed = 0
    for index in range(repeats + 2):  # The first repeat is undisturbed, the second is a warm-up.
        requests = [llm._registry.make(prompt, params, lambda _: None, None, None) for prompt in prompts]
        engine.submit([request.sequences[0] for request in requests])
        run_until(engine, requests, 16)
        if index:
            engine.advance()
            ms, report = change(engine, 4, "pause")
            engine.drain()  # Wait for the steps in flight.
            later = llm._registry.make(urgent, short, lambda _: None, None, None)
            timer = Timer()
            engine.submit([later.sequences[0]])
            engine.admission.admit()
            engine.steps.launch(engine.instances[0])
            launch_ms = timer.ms()
            run_until(engine, [later])
            engine.drain()
            back_ms, back = change(engine, 1, "migrate")
            moved += report.moved_bytes + back.moved_bytes
            if index > 1:
                for part, value in zip(PARTS, (ms, launch_ms, back_ms), strict=True):
                    taken[part].append(value)
            llm._registry.end([later])
        run_until(engine, requests)
        outputs.append([list(request.sequences[0].output) for request in requests])
        recomputed += sum(request.sequences[0].num_preemptions for request in requests)
        llm._registry.end(requests)
        for instance in engine.instances:
            instance.lane.cache.clear()
    return {
        "ms": {part: median(clock for clock, _ in values) for part, values in taken.items()},
        "most_ms": {part: max(clock for clock, _ in values) for part, values in taken.items()},
        "thread_ms": {part: median(own for _, own in values) for part, values in taken.items()},
        "moved_bytes": moved,
        "recomputed": recomputed,
        "tokens_equal": all(each == outputs[0] for each in outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--paused", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(
            model(Path(directory) / "model", options.layers),
            load_format="random",
            num_devices=4,
            kv_cache_tokens=2048,
            page_size=PAGE_SIZE,
            max_num_seqs=8,
            progress=False,
        ) as llm,
    ):
        found = llm._dispatcher.call(rounds, llm, options.paused, options.repeats).result()
    table = Table(title=f"{options.paused} requests paused, {options.layers} layers")
    for column in ("host time", "median, ms", "most, ms", "of the thread alone, ms"):
        table.add_column(column)
    for part in PARTS:
        table.add_row(
            part, f"{found['ms'][part]:.2f}", f"{found['most_ms'][part]:.2f}", f"{found['thread_ms'][part]:.2f}"
        )
    Console().print(table)
    print(
        f"moved {found['moved_bytes']} bytes, {found['recomputed']} requests computed again, "
        f"tokens {'equal' if found['tokens_equal'] else 'NOT equal'} to those of an undisturbed run"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
