"""Merging 4 x TP1 into TP4 and splitting it again, with requests running: what it takes, and what steps take meanwhile.

    python benchmarks/transformation.py [--model Llama-125M] [--requests 32] [--repeats 3] [--json transformation.json]

Random weights of real shapes, f32, greedy decodes on all instances, KV cache filled to about the share asked for. A
step is timed from launch to launch of all instances' steps: each is one step ahead of the device, so launches keep the
device's pace. "Hybrid" steps are those between two layers of a transformation, the layers' switches included.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from decode import MODELS
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.instance import Instance, StepPlan
from amoeba_jax.transform import TransformReport
from sharding.ledger import format_bytes

PROMPT = 128
Launch = tuple[float, int, bool]


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Every step's time of launch, first device, and whether its instance is in transition."""
    found: list[Launch] = []
    launch_plan = Instance.launch_plan

    def timed(instance: Instance, plan: StepPlan) -> None:
        launch_plan(instance, plan)
        found.append((time.perf_counter(), instance.id, instance.transition is not None))

    Instance.launch_plan = timed
    try:
        yield found
    finally:
        Instance.launch_plan = launch_plan


def step_s(found: list[Launch], start: float, stop: float, hybrid: bool) -> float:
    """Median seconds from launch to launch on the first instance."""
    times = [t for t, device, transition in found if device == 0 and transition == hybrid and start <= t <= stop]
    return median(np.diff(times)) if len(times) > 2 else float("nan")


def round_trip(llm: LLM, prompts: list[list[int]], new_tokens: int, steady_s: float, **how: Any) -> dict[str, Any]:
    """One merge and one split while requests decode."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    thread = threading.Thread(target=llm.generate, args=(prompts, params))
    with launches() as found:
        thread.start()
        while sum(view.running for view in llm.instances) < len(prompts) or not _all_decode(llm):
            time.sleep(0.01)
        marks = [time.perf_counter()]
        time.sleep(steady_s)
        marks.append(time.perf_counter())
        up: TransformReport = llm.transform(4, **how)
        marks.append(time.perf_counter())
        time.sleep(steady_s)
        marks.append(time.perf_counter())
        down: TransformReport = llm.transform(1, **how)
        marks.append(time.perf_counter())
        thread.join()
    return {
        "up": _figures(up) | {"step_s": step_s(found, marks[1], marks[2], True)},
        "down": _figures(down) | {"step_s": step_s(found, marks[3], marks[4], True)},
        "tp1_step_s": step_s(found, marks[0], marks[1], False),
        "tp4_step_s": step_s(found, marks[2], marks[3], False),
    }


def _all_decode(llm: LLM) -> bool:
    running = [s for instance in llm._engine.instances for s in list(instance.running)]
    return all(sequence.output for sequence in running)


def _figures(report: TransformReport) -> dict[str, Any]:
    (group,) = report.groups
    return {
        "seconds": group.seconds,
        "steps": group.steps,
        "kv_s": sum(layer.kv_s for layer in group.layers),
        "weights_s": sum(layer.weights_s for layer in group.layers),
        "plan_s": sum(layer.plan_s for layer in group.layers),
        "moved_bytes": report.moved_bytes,
        "restored_bytes": group.restored_bytes,
        "staging_bytes": group.staging_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Llama-125M")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--layers-per-step", type=int, nargs="+", default=[1, 4, 100])
    parser.add_argument("--kv-use", type=float, default=0.9, help="share of the TP1 caches that requests fill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = MODELS[options.model]
    random = np.random.default_rng(0)
    prompts = random.integers(0, config["vocab_size"], (options.requests, PROMPT)).tolist()
    ways = [
        {"variant": variant, "layers_per_step": layers}
        for variant in ("in_place_overlapped", "in_place")
        for layers in options.layers_per_step
    ]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        settings: dict[str, Any] = {
            "load_format": "random",
            "num_devices": 4,
            "max_num_seqs": max(8, options.requests // 4),
            "max_model_len": 512,
            "prefix_caching": False,
            "progress": False,
        }
        memory = _memory(scratch, settings, options)
        with LLM(scratch, device_memory=memory, **settings) as llm:
            for way in ways:
                round_trip(llm, prompts, options.new_tokens, 0.5, **way)  # compiles
                trips = [round_trip(llm, prompts, options.new_tokens, 2.0, **way) for _ in range(options.repeats)]
                results.append(way | {"trips": trips})
                print(f"{time.strftime('%X')} {way}: {trips[0]['up']['seconds']:.2f} s up", flush=True)
    _print(options, results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def _memory(scratch: str, settings: dict[str, Any], options: argparse.Namespace) -> int:
    """The budget of a device with which the requests fill the share asked for."""
    with LLM(scratch, device_memory="4GiB", **settings) as llm:
        plan, layers = llm._engine.cluster.memory_plan, llm.dims.config.num_layers
        pages = options.requests // 4 * llm.dims.pages.pages_for(PROMPT + options.new_tokens)
    fixed = plan.budget_bytes - plan.num_pages * plan.page_bytes * layers
    return fixed + int(pages / options.kv_use) * plan.page_bytes * layers


def _print(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    title = f"{options.model}, {options.requests} requests, KV cache {options.kv_use:.0%} full, medians, ms"
    table = Table(title=title)
    columns = (
        "variant",
        "layers/step",
        "",
        "all",
        "steps",
        "KV",
        "weights",
        "hybrid step",
        "TP1 step",
        "TP4 step",
        "moved",
    )
    for column in (*columns, "staging"):
        table.add_column(column, justify="left" if column in ("variant", "") else "right")

    def ms(values: list[float]) -> str:
        return f"{median(values) * 1e3:.1f}"

    for result in results:
        for way in ("up", "down"):
            trips = result["trips"]
            figures = [trip[way] for trip in trips]
            table.add_row(
                result["variant"],
                str(result["layers_per_step"]),
                way,
                ms([f["seconds"] for f in figures]),
                str(figures[0]["steps"]),
                ms([f["kv_s"] for f in figures]),
                ms([f["weights_s"] for f in figures]),
                ms([f["step_s"] for f in figures]),
                ms([trip["tp1_step_s"] for trip in trips]),
                ms([trip["tp4_step_s"] for trip in trips]),
                format_bytes(int(median(f["moved_bytes"] for f in figures))),
                format_bytes(max(f["staging_bytes"] for f in figures)),
            )
    console = Console(width=150)
    console.print(table)
    console.print("KV and weights: of in_place what they took; of in_place_overlapped what launching them took.")


if __name__ == "__main__":
    main()
