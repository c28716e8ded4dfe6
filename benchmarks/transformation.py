"""Time and memory of a merge of 4 x TP1 into TP4 and of the split back while requests run, by method.

    python benchmarks/transformation.py [--models SmolLM2-135M Deep-48] [--repeats 3] [--brief | --orders]
        [--json results.json]

The methods are

- the variants of `LLM.transform`, with different numbers of layers that switch between two steps.
- the baselines of `baselines/movers.py`.
- `restart`, which closes the engine and opens an engine with the new degree.

Requests decode greedily on all instances, and their prompts (`--prompt`) fill the KV cache. For each method, the table
has the time and memory of the change, the number of steps and tokens during the change, and the longest wait of a
request for a token. The lines below the table compare the methods, steps with and without the switch of a layer,
changes without requests, and FFNs with and without padding. With `--orders`, only the two orders of a change (`order`
of `LLM.transform`) are compared, with one layer between two steps.

The time of a step is the time between two results. So it includes all programs that were launched after the previous
step. SmolLM2 has its real weights.
"""

import argparse
import itertools
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from baselines.movers import MOVERS, baseline
from decode import MODELS
from layer_costs import DEVICES, ffn_times, idle_times, local_copy
from rich.console import Console
from transformation_report import print_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.step import PendingStep, StepPlan
from amoeba_jax.transform.relayout import Relayout
from amoeba_jax.transform.report import TransformReport

NEW_TOKENS = 192
STEADY_STEPS = 6
# Repeats of changes at once: all requests still run after them.
TURNS = 3
DEEP = MODELS["Llama-125M"] | {
    "hidden_size": 512,
    "num_hidden_layers": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 8192,
}
RANDOM_MODELS = MODELS | {"Deep-48": DEEP}
REAL_MODEL = {"SmolLM2-135M": "smollm2-135m"}
IN_PLACE = ("in_place_overlapped", "in_place")


@dataclass(frozen=True)
class Step:
    """Finished step.

    Attributes:
        arrived: time at which the result arrived, by `time.perf_counter()`.
        device: first device of the instance that ran the step.
        degree: degree of this instance.
        boundary: index of a layer. This layer and all later layers are in the new layout. None: no transformation runs.
        switched: whether layers switched just before the step.
    """

    arrived: float
    device: int
    degree: int
    boundary: int | None
    switched: bool


@contextmanager
def watched(plain_steps: int = 0, direction: str = "up") -> Iterator[list[Step]]:
    """Collect all steps that finish in the `with` block.

    Args:
        plain_steps: number of steps without a switch that run between two switches of layers. Applies only to changes
            of `direction`.
        direction: "up" for merges, "down" for splits.
    """
    found: list[Step] = []
    launch_step, switch_layers = Runner.launch, Relayout.switch_layers
    turns: dict[Relayout, Iterator[int]] = defaultdict(itertools.count)
    switched: dict[Relayout, bool] = {}

    def launch(runner: Runner, plan: StepPlan, lanes: list[Lane]) -> PendingStep:
        group = runner.group
        transition = next((it for it in turns if not it.done and it.instance.runner is runner), None)
        boundary = None if transition is None else transition.num_layers - transition.num_switched
        did = transition is not None and switched.get(transition, False)
        step = launch_step(runner, plan, lanes)

        def arrived(_: Any) -> None:
            found.append(Step(time.perf_counter(), group.start, group.tp, boundary, did))

        step.result.add_done_callback(arrived)
        return step

    def switch(transition: Relayout, step: StepPlan | None = None) -> None:
        # The last switch ends the transition, and plain steps run before it too.
        extra = plain_steps if transition.up == (direction == "up") else 0
        switched[transition] = next(turns[transition]) % (extra + 1) == 0
        if switched[transition] or not any(s.num_uncomputed_tokens for s in transition.instance.running):
            switch_layers(transition, step)

    Runner.launch, Relayout.switch_layers = launch, switch
    try:
        yield found
    finally:
        Runner.launch, Relayout.switch_layers = launch_step, switch_layers


class Running:
    """Requests that decode on all instances in the background."""

    def __init__(self, llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS):
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        self._thread = threading.Thread(target=llm.generate, args=(prompts, params), daemon=True)
        self._thread.start()
        while sum(view.running for view in llm.instances) < len(prompts) or not self.all_decode(llm):
            time.sleep(0.01)
        self.start = time.perf_counter()

    def all_decode(self, llm: LLM) -> bool:
        running = [s for instance in llm._engine.instances for s in list(instance.running)]
        return all(sequence.output for sequence in running)

    def end(self, llm: LLM) -> None:
        for name in llm._registry.ids:
            llm.cancel(name)
        self._thread.join()


def wait_for_steps(llm: LLM, found: list[Step], count: int) -> None:
    """Wait until the instance of the first device has run `count` further steps."""
    wanted = sum(step.device == 0 for step in found) + count
    while sum(step.device == 0 for step in found) < wanted:
        if not llm._engine.has_requests:
            raise RuntimeError(f"the requests have ended after {len(found)} steps: generate more than {NEW_TOKENS}")
        time.sleep(0.002)


def round_trip(
    llm: LLM, prompts: list[list[int]], way: dict[str, Any], plain_steps: int = 0, direction: str = "up"
) -> dict[str, Any]:
    """Merge and split once while requests decode, and return the measurements.

    `plain_steps` and `direction`: see `watched`. If `plain_steps` is not 0, the change in the opposite direction
    switches all layers at once. `way`: arguments `variant` and `layers_per_step` of `transform`.
    """
    with watched(plain_steps, direction) as found:
        running = Running(llm, prompts)
        wait_for_steps(llm, found, STEADY_STEPS)
        at_once = {"layers_per_step": 1000} if plain_steps else {}
        ways = {name: way | (at_once if name != direction else {}) for name in ("up", "down")}
        result = merge_and_split(llm, running, found, ways["up"], ways["down"], running.start, STEADY_STEPS)
        running.end(llm)
    result["steps"] = [vars(step) for step in found if step.boundary is not None]
    result["switches"] = switch_costs(found)
    return result


def in_turn(llm: LLM, prompts: list[list[int]], ways: list[dict[str, Any]], repeats: int) -> list[list[dict[str, Any]]]:
    """Merge and split `repeats` times with each method in turn, while the same requests decode.

    Return a list for each method, with the result of `merge_and_split` for each repeat. `ways`: methods, each as `way`
    in `round_trip`.
    """
    trips: list[list[dict[str, Any]]] = []
    with watched() as found:
        for turns in (1, repeats):  # The first turn compiles.
            trips = [[] for _ in ways]
            running = Running(llm, prompts)
            wait_for_steps(llm, found, STEADY_STEPS)
            for _ in range(turns):
                for way, results in zip(ways, trips, strict=True):
                    start = time.perf_counter()
                    wait_for_steps(llm, found, 2)
                    results.append(merge_and_split(llm, running, found, way, way, start, 2))
            running.end(llm)
    return trips


def merge_and_split(
    llm: LLM,
    running: Running,
    found: list[Step],
    up: dict[str, Any],
    down: dict[str, Any],
    start: float,
    steps: int,
) -> dict[str, Any]:
    """Merge and split, and return the measurements.

    Args:
        found: list of `watched`, to which steps are added during the call.
        up: arguments `variant` and `layers_per_step` of `transform` for the merge.
        down: arguments `variant` and `layers_per_step` of `transform` for the split.
        start: time at which the measurement of TP1 steps begins. It ends with the merge.
        steps: number of steps to wait for after each change.
    """
    marks = [start]
    result: dict[str, Any] = {"kv_use": kv_use(llm)}
    for name, degree, way in (("up", 4, up), ("down", 1, down)):
        marks.append(time.perf_counter())
        report = transform(llm, degree, **way)
        marks.append(time.perf_counter())
        wait_for_steps(llm, found, steps)
        result[name] = figures(report) | {"gap_s": longest_gap(found, marks[-2])}
    result["tp1_step_s"] = steady_step_s(found, marks[0], marks[1])
    result["tp4_step_s"] = steady_step_s(found, marks[2], marks[3])
    return result


def transform(
    llm: LLM, degree: int, variant: str, layers_per_step: int | Literal["auto"] = "auto", order: str = "layer"
) -> TransformReport:
    """Transform all devices with a variant of `LLM.transform` or with a baseline (`MOVERS`)."""
    if variant not in MOVERS:
        return llm.transform(degree, variant=variant, layers_per_step=layers_per_step, order=order)
    with baseline(variant):
        return llm.transform(degree, variant="in_place", layers_per_step=layers_per_step)


def restart_trip(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> dict[str, Any]:
    """Measure restarts from TP1 to TP4 and back.

    Each restart closes an engine while requests decode, opens an engine of the other degree, and recomputes the
    requests.
    """
    result: dict[str, Any] = {}
    llm = open_llm(tensor_parallel_size=1)
    for name, degree in (("up", 4), ("down", 1)):
        with watched() as found:
            running = Running(llm, prompts)
            wait_for_steps(llm, found, STEADY_STEPS)
            start = time.perf_counter()
            result[f"tp{5 - degree}_step_s"] = steady_step_s(found, running.start, start)
            result.setdefault("kv_use", kv_use(llm))
            running.end(llm)
            llm.close()
            llm = open_llm(tensor_parallel_size=degree)
            seconds = time.perf_counter() - start
            running = Running(llm, prompts)
            gap_s = time.perf_counter() - start
            running.end(llm)
        result[name] = dict.fromkeys(FIGURES, 0) | {"seconds": seconds, "gap_s": gap_s, "recomputed": len(prompts)}
    llm.close()
    return result


def kv_use(llm: LLM) -> float:
    views = llm.instances
    return sum(view.kv_used_pages for view in views) / sum(view.kv_total_pages for view in views)


FIGURES = (
    "seconds", "prepare_s", "steps", "tokens", "kv_s", "weights_s", "plan_s", "phases", "moved_bytes", "extra_bytes",
    "recomputed",
)  # fmt: skip


def figures(report: TransformReport) -> dict[str, Any]:
    (group,) = report.groups
    return {
        "seconds": group.seconds,
        "prepare_s": report.prepare_s,
        "steps": group.steps,
        "tokens": group.tokens,
        "kv_s": sum(layer.kv_s for layer in group.layers),
        "weights_s": sum(layer.weights_s for layer in group.layers),
        "plan_s": sum(layer.plan_s for layer in group.layers),
        "phases": sum(layer.phases for layer in group.layers),
        "moved_bytes": report.moved_bytes,
        "extra_bytes": report.extra_bytes,
        "recomputed": group.recomputed,
    }


def longest_gap(found: list[Step], start: float) -> float:
    """Return the longest time in seconds between two steps on the first device since `start`."""
    times = sorted(step.arrived for step in found if step.device == 0)
    first = max((i for i, t in enumerate(times) if t <= start), default=0)
    return float(np.diff(times[first:]).max())


def steady_step_s(found: list[Step], start: float, stop: float) -> float:
    times = [s.arrived for s in found if s.device == 0 and s.boundary is None and start <= s.arrived <= stop]
    return median(np.diff(times)) if len(times) > 2 else float("nan")


def switch_costs(found: list[Step]) -> list[tuple[float, float]]:
    """Return a pair of step times for each switch of layers, in seconds.

    The first value is the time of the step right after the switch. The second value is the median time of the steps
    without a switch that follow, until the next switch.
    """
    costs = []
    for _, group in itertools.groupby(sorted(found, key=lambda s: s.arrived), key=lambda s: (s.boundary, s.degree)):
        steps = list(group)
        if steps[0].boundary is None or not steps[0].switched or len(steps) < 3:
            continue
        before = max((s.arrived for s in found if s.arrived < steps[0].arrived), default=None)
        if before is not None:
            plain = np.diff([step.arrived for step in steps])
            costs.append((steps[0].arrived - before, float(median(plain))))
    return costs


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        model, settings = scratch, {"load_format": "random"}
        if name in REAL_MODEL:
            model, settings = REAL_MODEL[name], {}
        else:
            (Path(scratch) / "config.json").write_text(json.dumps(RANDOM_MODELS[name]))
        rows = options.requests // DEVICES
        tokens = rows * -(-(options.prompt + NEW_TOKENS) // 16) * 16
        open_llm = partial(
            LLM,
            model,
            num_devices=DEVICES,
            device_memory="3GiB",
            kv_cache_tokens=tokens,
            max_num_seqs=max(2, rows),
            max_model_len=options.prompt + NEW_TOKENS,
            prefix_caching=False,
            compile_beside=False,
            progress=False,
            **settings,
        )
        with open_llm() as llm:
            random = np.random.default_rng(0)
            size = (options.requests, options.prompt)
            prompts = random.integers(0, llm.dims.config.vocab_size, size).tolist()
            layers, memory = llm.dims.config.num_layers, llm._engine.cluster.memory_plan
            sizes = {"model": name, "layers": layers, "kv_bytes": memory.num_pages * memory.page_bytes * layers}
            if options.orders:
                ways = [
                    {"variant": "in_place_overlapped", "layers_per_step": 1, "order": order}
                    for order in ("layer", "memory_first")
                ]
                trips = in_turn(llm, prompts, ways, options.repeats)
                return sizes | {"ways": [way | {"trips": found} for way, found in zip(ways, trips, strict=True)]}
            idle = idle_times(llm, 4 + 4 * options.repeats)
            local_s = [local_copy(llm)]
            ways = [
                {"variant": variant, "layers_per_step": n}
                for variant in (*IN_PLACE, *MOVERS)
                for n in (options.layers_per_step if variant in IN_PLACE else [1])
                if n < layers
            ]
            if options.brief:
                ways = [{"variant": "in_place_overlapped", "layers_per_step": 1}]
            results = []
            for way in ways:
                round_trip(llm, prompts, way)  # Compiles.
                trips = [round_trip(llm, prompts, way) for _ in range(options.repeats)]
                results.append(way | {"trips": trips})
                log(f"{name} {way}: {trips[0]['up']['seconds']:.2f} s up, {trips[0]['down']['seconds']:.2f} s down")
            ways = [{"variant": variant, "layers_per_step": layers} for variant in (*IN_PLACE, *MOVERS)]
            for way, trips in zip(ways, in_turn(llm, prompts, ways, TURNS), strict=True):
                results.append(way | {"trips": trips})
            log(f"{name}: all layers at once, {TURNS} times by each way in turn")
            switches = []
            # Enough tokens for runs with plain steps between switches.
            plain = min(3, (NEW_TOKENS - 4 * STEADY_STEPS) // layers - 1)
            for _ in range(options.repeats):
                for direction in ("up", "down"):
                    trip = round_trip(llm, prompts, {"variant": "in_place_overlapped"}, plain, direction)
                    switches += trip["switches"]
            log(f"{name}: {len(switches)} switches beside plain steps")
            local_s.append(local_copy(llm))
            result = sizes | {
                "staging_bytes": memory.staging_bytes,
                "ways": results,
                "switches": switches,
                "idle": idle,
                "local_copy_s": min(local_s),  # The minimum is a lower bound, because the speed of the machine varies.
                "ffn": {n: ffn_times(llm, n, 9) for n in (1, 8)},
            }
        if not options.brief:
            trips = [
                restart_trip(
                    lambda tensor_parallel_size: open_llm(
                        tensor_parallel_size=tensor_parallel_size, max_tensor_parallel_size=DEVICES
                    ),
                    prompts,
                )
                for _ in range(1 + options.repeats)
            ]
            results.append({"variant": "restart", "trips": trips[1:]})  # The first trip compiles.
            log(f"{name}: restarted")
        return result


def log(message: str) -> None:
    print(f"{time.strftime('%X')} {message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=RANDOM_MODELS, nargs="+", default=["SmolLM2-135M", "Deep-48"])
    parser.add_argument("--requests", type=int, default=8, help="number of requests, a multiple of 4")
    parser.add_argument("--prompt", type=int, default=448, help="tokens of each prompt, which fill the cache")
    parser.add_argument("--layers-per-step", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--brief", action="store_true", help="only the measurements that the lines below the table compare"
    )
    parser.add_argument("--orders", action="store_true", help="only the two orders of a change, in turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(name, options) for name in options.models]
    console = Console(width=170)
    for result in results:
        print_model(console, result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
