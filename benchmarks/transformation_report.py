"""Report of `transformation.py` for a model: a table of all methods, and comparisons."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sharding.ledger import format_bytes


def print_model(console: Console, result: dict[str, Any]) -> None:
    use = median(trip["kv_use"] for way in result["ways"] for trip in way["trips"])
    table = Table(
        title=f"{result['model']}, {result['layers']} layers, {format_bytes(result['kv_bytes'])} of KV cache a device "
        f"{use:.0%} full when merging; medians, ms"
    )
    columns = ("variant", "order", "layers/step", "", "all", "steps", "tokens", "plan", "KV", "weights", "longest wait")
    for column in (*columns, "TP1 step", "TP4 step", "moved", "extra a device"):
        table.add_column(column, justify="left" if column in ("variant", "order", "") else "right")
    for way in result["ways"]:
        for direction in ("up", "down"):
            values = [trip[direction] for trip in way["trips"]]

            def ms(key: str, values: list[dict[str, Any]] = values) -> str:
                return f"{median(v[key] for v in values) * 1e3:.1f}"

            table.add_row(
                way["variant"],
                way.get("order", ""),
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
    for line in summary(result) if "switches" in result else ():
        console.print(f"  {line}")


def summary(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines that compare the variants."""
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
        f"nothing running: release of all weights {idle['release']:.2f} ms, restore {idle['restore_1']:.1f} ms; "
        f"weights kept {idle['switch_4']:.2f} ms up, {idle['switch_1']:.2f} ms down ({idle['after_4']:.2f} and "
        f"{idle['after_1']:.2f} right after programs), where JAX takes {idle['join']:.2f} ms to make an array a layer "
        f"and {idle['part']:.2f} ms to take it apart"
    )
    for tokens, ffn in result["ffn"].items():
        yield (
            f"FFN of {tokens} tokens: {ffn['shards_s'] * 1e3:.2f} ms in padded shards, {ffn['whole_s'] * 1e3:.2f} ms "
            f"whole: {ffn['shards_s'] / ffn['whole_s']:.3f}x; padding {ffn['padding']:.1%} of "
            f"{format_bytes(int(ffn['ffn_bytes']))}"
        )


def hybrid_step_s(trip: dict[str, Any], way: int) -> float:
    """Return the median step time on the first device, during a merge (`way` 0) or the following split (`way` 1)."""
    steps = [step for step in trip["steps"] if step["device"] == 0]
    split = next(i for i in range(1, len(steps)) if steps[i]["boundary"] > steps[i - 1]["boundary"])
    part = (steps[:split], steps[split:])[way]
    return float(median(np.diff([step["arrived"] for step in part])))
