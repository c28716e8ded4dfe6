"""Pictures for docs/transformation.md: memory and steps while instances merge and split.

    pip install -e '.[plots]'
    python benchmarks/pictures.py [--directory docs/pictures]

SmolLM2-135M runs on four virtual CPU devices, with two requests on each device.
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from transformation import Running, Step, transform, watched

from amoeba_jax import LLM
from amoeba_jax.views import MemoryReport
from serving.commands.demo_run import half_way
from serving.commands.demo_view import sampled

PROMPT, NEW_TOKENS = 256, 192
PARTS = {"weights": "#5b8fd9", "kv cache in use": "#e8890c", "kv cache free": "#f6d2a4", "padding": "#8c8c8c"}
KINDS = {"TP1": "#5b8fd9", "between": "#b04fb0", "TP4": "#2f9e6e"}


def run(llm: LLM, prompts: list[list[int]], way: dict[str, Any]) -> dict[str, Any]:
    """Merge and split under load, with the arguments `way` of `transform`.

    Return the steps of the first device, the times of the changes, and memory reports.
    """
    with watched() as steps:
        running = Running(llm, prompts)
        time.sleep(1.5)
        maps = [("four TP1 instances", llm.memory())]
        marks = [time.perf_counter()]
        with sampled(llm) as between:
            transform(llm, 4, **way)
        marks.append(time.perf_counter())
        maps += [("half of the layers have changed", report) for _, report in half_way(between)]
        time.sleep(1.5)
        maps.append(("one TP4 instance", llm.memory()))
        marks.append(time.perf_counter())
        transform(llm, 1, **way)
        marks.append(time.perf_counter())
        time.sleep(1.5)
        maps.append(("four TP1 instances again", llm.memory()))
        running.end(llm)
    return {"steps": [s for s in steps if s.device == 0], "marks": marks, "maps": maps}


def draw_memory(maps: list[tuple[str, MemoryReport]], path: Path) -> None:
    figure, axes = plt.subplots(len(maps), 1, figsize=(9, 1.6 * len(maps)), sharex=True, sharey=True, layout="tight")
    for axis, (name, report) in zip(axes, maps, strict=True):
        layers = {layer: parts for layer, parts in report.parts(0).items() if layer is not None}
        bottom = np.zeros(len(layers))
        for part, color in PARTS.items():
            heights = np.array([layers[layer].get(part, 0) for layer in sorted(layers)]) / 2**20
            axis.bar(sorted(layers), heights, bottom=bottom, width=0.9, color=color, label=part)
            bottom += heights
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_ylabel("MiB")
    axes[-1].set_xlabel("layer")
    axes[0].legend(ncols=len(PARTS), fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
    save(figure, path)


def draw_steps(runs: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(len(runs), 1, figsize=(9, 2.1 * len(runs)), sharex=True, layout="tight")
    for axis, (name, result) in zip(axes, runs.items(), strict=True):
        start = result["steps"][0].arrived
        steps: list[tuple[Step, float]] = [(b, b.arrived - a.arrived) for a, b in pairwise(result["steps"])]
        for kind, color in KINDS.items():
            chosen = [(s, t) for s, t in steps if kind == ("between" if s.boundary is not None else f"TP{s.degree}")]
            times = [s.arrived - start for s, _ in chosen]
            axis.bar(
                [t - d for t, (_, d) in zip(times, chosen, strict=True)],
                [d * 1e3 for _, d in chosen],
                width=[d for _, d in chosen],
                align="edge",
                color=color,
                label=kind,
                edgecolor="white",
                linewidth=0.3,
            )
        for first, last in zip(result["marks"][::2], result["marks"][1::2], strict=True):
            axis.axvspan(first - start, last - start, color="black", alpha=0.08, linewidth=0)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_ylabel("ms a step")
    axes[-1].set_xlabel("seconds")
    axes[0].legend(ncols=3, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "amoeba"
    random = np.random.default_rng(0)
    with LLM(
        "smollm2-135m",
        num_devices=4,
        device_memory="3GiB",
        kv_cache_tokens=2 * (PROMPT + NEW_TOKENS),
        max_num_seqs=2,
        max_model_len=PROMPT + NEW_TOKENS,
        prefix_caching=False,
    ) as llm:
        prompts = random.integers(0, llm.dims.config.vocab_size, (8, PROMPT)).tolist()
        ways = {
            "in_place_overlapped, 2 layers a step": {"variant": "in_place_overlapped", "layers_per_step": 2},
            "host_memory, all layers at once": {"variant": "host_memory", "layers_per_step": 1000},
        }
        runs = {}
        for name, way in ways.items():
            run(llm, prompts, way)  # compiles
            runs[name] = run(llm, prompts, way)
    draw_memory(next(iter(runs.values()))["maps"], options.directory / "memory.svg")
    draw_steps(runs, options.directory / "steps.svg")


if __name__ == "__main__":
    main()
