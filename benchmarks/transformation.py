"""Merging 4 x TP1 into TP4 and splitting it again, with requests running: what it takes, by which means.

    python benchmarks/transformation.py [--models SmolLM2-135M Deep-48] [--repeats 3] [--brief] [--json results.json]

For every variant and number of layers a step: time and memory of moving the KV cache and the weights, steps and tokens
meanwhile, and how long requests waited. Requests decode greedily on all instances with the KV cache about as full as
asked for. Then: what a layer's switch costs a step, against steps of the same hybrid work without one; weights released
and restored, and views switched, with nothing running; and what padding costs the FFN.

A step's time is from result to result: programs run in the order in which they were launched, so it is the step's own
and that of all that was launched between it and the one before. SmolLM2 has its real weights.
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
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode import MODELS
from machine import array_seconds, local_copy_seconds, seconds
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.step_plan import StepPlan
from amoeba_jax.models.layers import matmul
from amoeba_jax.transform.report import TransformReport
from amoeba_jax.transform.transition import Transition
from amoeba_jax.weights.store import WeightStore
from sharding.ledger import format_bytes
from sharding.mesh import SubMesh

NEW_TOKENS = 192
DEVICES = 4
STEADY_STEPS = 6
# Of merges and splits at once by each way: all requests still run after them.
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
BASELINES = ("basic", "host_memory")


@dataclass(frozen=True)
class Step:
    """A step that has run: when its result came, and what kind of step it was."""

    arrived: float
    device: int
    degree: int
    boundary: int | None
    switched: bool


@contextmanager
def watched(plain_steps: int = 0, direction: str = "up") -> Iterator[list[Step]]:
    """All steps as they end. That many plain hybrid steps run between two that switch layers, in one direction."""
    found: list[Step] = []
    launch_plan, switch_layers = Instance.launch_plan, Transition.switch_layers
    turns: dict[Transition, Iterator[int]] = defaultdict(itertools.count)
    switched: dict[Transition, bool] = {}

    def launch(instance: Instance, plan: StepPlan) -> None:
        transition = instance.transition
        boundary = None if transition is None else transition.boundary
        did = transition is not None and switched.get(transition, False)
        launch_plan(instance, plan)

        def arrived(_: Any) -> None:
            found.append(Step(time.perf_counter(), instance.id, instance.tp, boundary, did))

        instance.pending[-1].result.add_done_callback(arrived)

    def switch(transition: Transition) -> None:
        # The last switch ends the transition: before it too there are plain steps.
        extra = plain_steps if transition.up == (direction == "up") else 0
        switched[transition] = next(turns[transition]) % (extra + 1) == 0
        if switched[transition] or transition.plan_step() is None:
            switch_layers(transition)

    Instance.launch_plan, Transition.switch_layers = launch, switch
    try:
        yield found
    finally:
        Instance.launch_plan, Transition.switch_layers = launch_plan, switch_layers


class Running:
    """Requests that decode on all instances, in the background."""

    def __init__(self, llm: LLM, prompts: list[list[int]]):
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
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
    """Until the first device's instance has run that many more."""
    wanted = sum(step.device == 0 for step in found) + count
    while sum(step.device == 0 for step in found) < wanted:
        if not llm._engine.has_requests:
            raise RuntimeError(f"the requests have ended after {len(found)} steps: generate more than {NEW_TOKENS}")
        time.sleep(0.002)


def round_trip(
    llm: LLM, prompts: list[list[int]], way: dict[str, Any], plain_steps: int = 0, direction: str = "up"
) -> dict[str, Any]:
    """One merge and one split while requests decode. With plain steps, the other direction is done at once."""
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
    """Merges and splits by several ways in turn, while the same requests decode: `repeats` of each way."""
    trips: list[list[dict[str, Any]]] = []
    with watched() as found:
        for turns in (1, repeats):  # the first turn compiles
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
    """What it took, with that many steps after each; those since `start` are of the instances before."""
    marks = [start]
    result: dict[str, Any] = {"kv_use": kv_use(llm)}
    for name, degree, way in (("up", 4, up), ("down", 1, down)):
        marks.append(time.perf_counter())
        report = llm.transform(degree, **way)
        marks.append(time.perf_counter())
        # A restart computes its requests again: until all of them decode, they wait.
        while not running.all_decode(llm):
            time.sleep(0.002)
        wait_for_steps(llm, found, steps)
        result[name] = figures(report) | {"gap_s": longest_gap(found, marks[-2])}
    result["tp1_step_s"] = steady_step_s(found, marks[0], marks[1])
    result["tp4_step_s"] = steady_step_s(found, marks[2], marks[3])
    return result


def kv_use(llm: LLM) -> float:
    views = llm.instances
    return sum(view.kv_used_pages for view in views) / sum(view.kv_total_pages for view in views)


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
    """The longest time between two results of the first device's requests since `start`, the one before included."""
    times = sorted(step.arrived for step in found if step.device == 0)
    first = max((i for i, t in enumerate(times) if t <= start), default=0)
    return float(np.diff(times[first:]).max())


def steady_step_s(found: list[Step], start: float, stop: float) -> float:
    times = [s.arrived for s in found if s.device == 0 and s.boundary is None and start <= s.arrived <= stop]
    return median(np.diff(times)) if len(times) > 2 else float("nan")


def switch_costs(found: list[Step]) -> list[tuple[float, float]]:
    """For each boundary: seconds of the step behind the switch, and the median of plain steps at the same boundary."""
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


def hybrid_step_s(trip: dict[str, Any], way: int) -> float:
    """Median time of the steps of a merge (0) or the split behind it (1)."""
    steps = [step for step in trip["steps"] if step["device"] == 0]
    split = next(i for i in range(1, len(steps)) if steps[i]["boundary"] > steps[i - 1]["boundary"])
    part = (steps[:split], steps[split:])[way]
    return float(median(np.diff([step["arrived"] for step in part])))


def idle_times(llm: LLM, repeats: int) -> dict[str, float]:
    """Host seconds of a merge and a split with nothing running: weights released and restored, or views switched."""

    release, spent = WeightStore.release, [0.0]

    def timed_release(*arguments: Any) -> list[jax.Array]:
        start = time.perf_counter()
        extents = release(*arguments)
        spent[0] += time.perf_counter() - start
        return extents

    times: dict[str, list[float]] = defaultdict(list)
    devices = tuple(jax.devices()[:DEVICES])
    WeightStore.release = timed_release
    try:
        for weights, name in ((True, "restore"), (False, "switch")):
            for _ in range(repeats + 1):
                spent[0] = 0.0
                for degree in (4, 1):
                    report = llm.transform(degree, layers_per_step=1000, release_weights=weights)
                    times[f"{name}_{degree}"].append(report.seconds)
                if not weights:
                    continue
                times["release"].append(spent[0])
                # Right after programs on the same cores, whose caches then hold nothing of this.
                for degree in (4, 1):
                    report = llm.transform(degree, layers_per_step=1000, release_weights=False)
                    times[f"after_{degree}"].append(report.seconds)
        for _ in range(repeats + 1):
            for name, spent_s in array_seconds(SubMesh(0, devices), llm.dims.config.num_layers).items():
                times[name].append(spent_s)
    finally:
        WeightStore.release = release
    del times["restore_4"]
    return {name: median(values[1:]) for name, values in times.items()}


def local_copy(llm: LLM) -> float:
    """Seconds for a byte of the model's pages: see `local_copy_seconds`."""
    plan, group = llm._engine.cluster.memory_plan, SubMesh(0, tuple(jax.devices()[:DEVICES]))
    dtype = jnp.dtype(llm.dims.dtype)
    return local_copy_seconds(group, llm.dims.pages, dtype, plan.num_pages, plan.phase_pages)


def ffn_times(llm: LLM, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds of all layers' FFN on one device: as padded chunks, and as whole matrices without padding."""
    dims, store = llm.dims, llm._engine.cluster.weights
    hidden, ffn = dims.config.hidden_size, dims.config.ffn_size
    device = jax.devices()[0]
    random = np.random.default_rng(0)

    def make(*shape: int) -> jax.Array:
        return jax.device_put(random.standard_normal(shape, np.float32) * 0.02, device)

    def layer(gate_up: list[jax.Array], down: list[jax.Array], x: jax.Array) -> jax.Array:
        total = x
        for g, d in zip(gate_up, down, strict=True):
            gate, up = jnp.split(matmul(g, x), 2)
            total = total + matmul(d, jax.nn.silu(gate) * up)
        return total

    def model(layers: list[tuple[list[jax.Array], list[jax.Array]]], x: jax.Array) -> jax.Array:
        for gate_up, down in layers:
            x = layer(gate_up, down, x)
        return x

    x = make(hidden, tokens)
    found = {}
    for name, width, parts in (("chunks", dims.ffn_chunk, dims.max_tp), ("whole", ffn, 1)):
        layers = [
            ([make(2 * width, hidden) for _ in range(parts)], [make(hidden, width) for _ in range(parts)])
            for _ in range(dims.config.num_layers)
        ]
        run = jax.jit(model)
        found[f"{name}_s"] = seconds(lambda run=run, layers=layers: run(layers, x).block_until_ready(), repeats)
    padding = store.padding()
    stored = sum(padding[kind].stored for kind in ("mlp.gate_up", "mlp.down"))
    wanted = sum(padding[kind].model for kind in ("mlp.gate_up", "mlp.down"))
    return found | {"padding": stored / wanted - 1, "ffn_bytes": stored * jnp.dtype(dims.dtype).itemsize}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything for one model."""
    with tempfile.TemporaryDirectory() as scratch:
        model, settings = scratch, {"load_format": "random"}
        if name in REAL_MODEL:
            model, settings = REAL_MODEL[name], {}
        else:
            (Path(scratch) / "config.json").write_text(json.dumps(RANDOM_MODELS[name]))
        rows = options.requests // DEVICES
        tokens = rows * -(-(options.prompt + NEW_TOKENS) // 16) * 16
        llm = LLM(
            model,
            num_devices=DEVICES,
            device_memory="3GiB",
            kv_cache_tokens=tokens,
            max_num_seqs=max(2, rows),
            max_model_len=options.prompt + NEW_TOKENS,
            prefix_caching=False,
            progress=False,
            **settings,
        )
        with llm:
            idle = idle_times(llm, 4 + 4 * options.repeats)
            local_s = [local_copy(llm)]
            random = np.random.default_rng(0)
            size = (options.requests, options.prompt)
            prompts = random.integers(0, llm.dims.config.vocab_size, size).tolist()
            layers = llm.dims.config.num_layers
            ways = [
                {"variant": variant, "layers_per_step": n}
                for variant in (*IN_PLACE, *BASELINES)
                for n in (options.layers_per_step if variant in IN_PLACE else [1])
                if n < layers
            ]
            ways.append({"variant": "restart"})
            if options.brief:
                ways = [{"variant": "in_place_overlapped", "layers_per_step": 1}]
            results = []
            for way in ways:
                round_trip(llm, prompts, way)  # compiles
                trips = [round_trip(llm, prompts, way) for _ in range(options.repeats)]
                results.append(way | {"trips": trips})
                log(f"{name} {way}: {trips[0]['up']['seconds']:.2f} s up, {trips[0]['down']['seconds']:.2f} s down")
            ways = [{"variant": variant, "layers_per_step": layers} for variant in (*IN_PLACE, *BASELINES)]
            for way, trips in zip(ways, in_turn(llm, prompts, ways, TURNS), strict=True):
                results.append(way | {"trips": trips})
            log(f"{name}: all layers at once, {TURNS} times by each way in turn")
            switches = []
            # So that requests still run at the end of a way with a plain step or more beside each switch.
            plain = min(3, (NEW_TOKENS - 4 * STEADY_STEPS) // layers - 1)
            for _ in range(options.repeats):
                for direction in ("up", "down"):
                    trip = round_trip(llm, prompts, {"variant": "in_place_overlapped"}, plain, direction)
                    switches += trip["switches"]
            log(f"{name}: {len(switches)} switches beside plain steps")
            local_s.append(local_copy(llm))
            cluster = llm._engine.cluster
            kv_bytes = cluster.memory_plan.num_pages * cluster.memory_plan.page_bytes * layers
            return {
                "model": name,
                "layers": layers,
                "kv_bytes": kv_bytes,
                "staging_bytes": cluster.memory_plan.staging_bytes,
                "ways": results,
                "switches": switches,
                "idle": idle,
                "local_copy_s": min(local_s),  # a floor: the machine is not as fast at all times
                "ffn": {n: ffn_times(llm, n, 9) for n in (1, 8)},
            }


def log(message: str) -> None:
    print(f"{time.strftime('%X')} {message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=RANDOM_MODELS, nargs="+", default=["SmolLM2-135M", "Deep-48"])
    parser.add_argument("--requests", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--prompt", type=int, default=448, help="tokens of each: more fill the cache further")
    parser.add_argument("--layers-per-step", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--brief", action="store_true", help="only what the lines below the table compare")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(name, options) for name in options.models]
    console = Console(width=170)
    for result in results:
        print_model(console, result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def print_model(console: Console, result: dict[str, Any]) -> None:
    use = median(trip["kv_use"] for way in result["ways"] for trip in way["trips"])
    table = Table(
        title=f"{result['model']}, {result['layers']} layers, {format_bytes(result['kv_bytes'])} of KV cache a device "
        f"{use:.0%} full when merging; medians, ms"
    )
    columns = ("variant", "layers/step", "", "all", "steps", "tokens", "plan", "KV", "weights", "longest wait")
    for column in (*columns, "TP1 step", "TP4 step", "moved", "extra a device"):
        table.add_column(column, justify="left" if column in ("variant", "") else "right")
    for way in result["ways"]:
        for direction in ("up", "down"):
            values = [trip[direction] for trip in way["trips"]]

            def ms(key: str, values: list[dict[str, Any]] = values) -> str:
                return f"{median(v[key] for v in values) * 1e3:.1f}"

            table.add_row(
                way["variant"],
                str(way.get("layers_per_step", "")),
                direction,
                ms("seconds"),
                str(int(median(v["steps"] for v in values))),
                str(int(median(v["tokens"] for v in values))),
                ms("plan_s"),
                ms("kv_s"),
                ms("weights_s"),
                ms("gap_s"),
                f"{median(trip['tp1_step_s'] for trip in way['trips']) * 1e3:.1f}",
                f"{median(trip['tp4_step_s'] for trip in way['trips']) * 1e3:.1f}",
                format_bytes(int(median(v["moved_bytes"] for v in values))),
                format_bytes(max(v["extra_bytes"] for v in values)),
            )
    console.print(table)
    console.print("plan, KV and weights: what they took, or, of in_place_overlapped, what launching them took.")
    for line in summary(result):
        console.print(f"  {line}")


def summary(result: dict[str, Any]) -> Iterator[str]:
    """The figures that the variants are held against."""
    ways = {(way["variant"], way.get("layers_per_step")): way["trips"] for way in result["ways"]}
    layers = result["layers"]

    def of(variant: str, n: int | None, read: Callable[[dict[str, Any]], float]) -> float:
        return median(read(trip) for trip in ways[variant, n])

    for way in ("up", "down"):
        kv = [of(v, layers, lambda t, way=way: t[way]["kv_s"]) for v in ("in_place", "basic", "host_memory")]
        extra = [of(v, layers, lambda t, way=way: t[way]["extra_bytes"]) for v in ("in_place", "basic")]
        moved = of("in_place", layers, lambda t, way=way: t[way]["moved_bytes"])
        local = moved * result["local_copy_s"]
        yield (
            f"{way}: KV in place {kv[0] * 1e3:.1f} ms, basic {kv[1] * 1e3:.1f} ms, host {kv[2] * 1e3:.1f} ms: "
            f"{kv[0] / kv[1]:.2f}x of basic, {kv[0] / kv[2]:.2f}x of host; extra memory {extra[0] / extra[1]:.3f}x of "
            "basic"
        )
        yield (
            f"{way}: of {format_bytes(int(moved))} a gather and a scatter on the spot take {local * 1e3:.1f} ms: "
            f"{local / kv[1]:.2f}x of basic, and {kv[0] / local:.2f} times as long in place"
        )
        waits = {
            v: of(v, n, lambda t, way=way: t[way]["gap_s"])
            for v, n in (("in_place_overlapped", 1), ("basic", layers), ("host_memory", layers), ("restart", None))
            if (v, n) in ways
        }
        yield f"{way}: longest wait for a token: " + ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in waits.items())
    switched, plain = (np.array(values) for values in zip(*result["switches"], strict=True))
    yield (
        f"step with a layer's switch / plain step of the same hybrid work: median {median(switched / plain):.3f} "
        f"({median(switched) * 1e3:.1f} / {median(plain) * 1e3:.1f} ms, {len(plain)} pairs)"
    )
    bytes_of_layer = of("in_place", layers, lambda t: t["up"]["moved_bytes"] + t["down"]["moved_bytes"]) / 2 / layers
    spot = bytes_of_layer * result["local_copy_s"]
    yield (
        f"a layer's {format_bytes(int(bytes_of_layer))} gathered and scattered on the spot take {spot * 1e3:.2f} ms: "
        f"with nothing else, a step with a switch were {1 + spot / median(plain):.3f}"
    )
    hybrid = [
        of("in_place_overlapped", 1, lambda t, way=way: hybrid_step_s(t, way) / t["tp1_step_s"]) for way in (0, 1)
    ]
    yield (
        f"steps during a transition, each with a switch, against the TP1 steps before the merge: {hybrid[0]:.2f}x up, "
        f"{hybrid[1]:.2f}x down"
    )
    delay = sum(switched - plain) / len(switched) * layers
    whole = of("host_memory", layers, lambda t: t["up"]["gap_s"] + t["down"]["gap_s"]) / 2
    yield (
        f"what all switches of one way add to the steps: {delay * 1e3:.1f} ms, {delay / layers * 1e3:.2f} ms a step; "
        f"host_memory stops requests for {whole * 1e3:.0f} ms: {delay / whole:.2f}x in all, "
        f"{delay / layers / whole:.3f}x a step"
    )
    idle = {name: value * 1e3 for name, value in result["idle"].items()}
    yield (
        f"nothing running: release of all weights {idle['release']:.2f} ms, restore {idle['restore_1']:.1f} ms; switch "
        f"of views {idle['switch_4']:.2f} ms up, {idle['switch_1']:.2f} ms down ({idle['after_4']:.2f} and "
        f"{idle['after_1']:.2f} right after programs), where JAX takes {idle['join']:.2f} ms to make an array a layer "
        f"and {idle['part']:.2f} ms to take it apart"
    )
    for tokens, ffn in result["ffn"].items():
        yield (
            f"FFN of {tokens} tokens: {ffn['chunks_s'] * 1e3:.2f} ms in padded chunks, {ffn['whole_s'] * 1e3:.2f} ms "
            f"whole: {ffn['chunks_s'] / ffn['whole_s']:.3f}x; padding {ffn['padding']:.1%} of "
            f"{format_bytes(int(ffn['ffn_bytes']))}"
        )


if __name__ == "__main__":
    main()
