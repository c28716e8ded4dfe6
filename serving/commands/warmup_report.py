"""What `amoeba warmup` prints: tables of programs, and of a device's memory."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from amoeba_jax import EngineConfig
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.views import ExecutableInfo
from sharding.ledger import format_bytes


def layouts(infos: Sequence[ExecutableInfo]) -> list[dict[str, Any]]:
    """Totals of each layout's programs; those that run on one device are TP1's, whichever layout uses them."""
    rows = []
    for tp in sorted({info.tensor_parallel_size for info in infos}):
        mine = [info for info in infos if info.tensor_parallel_size == tp]
        hits = sum(info.cached for info in mine)
        rows.append(
            {
                "tensor_parallel_size": tp,
                "programs": len(mine),
                "hits": hits,
                "misses": len(mine) - hits,
                "seconds": sum(info.compile_s for info in mine),
                "code_bytes": sum(info.code_bytes for info in mine),
                "largest_temp_bytes": max(info.temp_bytes for info in mine),
            }
        )
    return rows


def print_layouts(infos: Sequence[ExecutableInfo]) -> None:
    """A row for each layout."""
    table = Table("layout", "programs", "hits", "misses", "seconds", "code", "most temporaries")
    for row in layouts(infos):
        table.add_row(
            f"TP{row['tensor_parallel_size']}",
            *(str(row[name]) for name in ("programs", "hits", "misses")),
            f"{row['seconds']:.1f}",
            format_bytes(row["code_bytes"]) if row["code_bytes"] else "-",
            format_bytes(row["largest_temp_bytes"]),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("Seconds are those of all threads together, tracing included.")


def print_plan(config: EngineConfig, plan: EnginePlan, short_bytes: int) -> None:
    """How a device's memory is divided, and what instances hold."""
    memory, console = plan.memory, Console(highlight=False, soft_wrap=True)
    kv_bytes = memory.num_pages * memory.page_bytes * plan.dims.config.num_layers
    table = Table("of each device", "", title=f"{config.model}, {config.num_devices} devices, {plan.dims.dtype}")
    for name, size in (
        ("budget", memory.budget_bytes - short_bytes),
        ("weights", memory.weight_bytes),
        ("KV cache", kv_bytes),
        ("temporaries of steps, at most", memory.activation_bytes),
        ("sampling", memory.sampling_bytes),
        ("staging", memory.staging_bytes),
    ):
        table.add_row(name, format_bytes(size))
    console.print(table)
    if short_bytes:
        needed = format_bytes(memory.budget_bytes)
        console.print(
            f"It does not fit: {format_bytes(short_bytes)} a device are missing. Every device holds all weights, so "
            f"that its layout can change; {needed} would be enough for one KV page, with which all below is reckoned."
        )
    for tp in plan.sub_meshes.degrees():
        num_instances = len(plan.sub_meshes.groups(tp))
        console.print(f"{num_instances} x TP{tp}: {plan.capacity_tokens(tp, tp):,} tokens of KV cache each")
    console.print(f"longest prompt plus output: {plan.max_model_len:,} tokens")


def print_requests(requests: Sequence[ProgramSpec]) -> None:
    """How many programs of each kind a layout has, and the bytes that each updates in place."""
    table = Table("layout", "kind", "programs", "in place on each device")

    def group(request: ProgramSpec) -> tuple[int, str]:
        return len(request.devices), request.kind

    for (tp, kind), members in groupby(sorted(requests, key=group), group):
        sizes = [request.donated_bytes for request in members]
        low, high = min(sizes), max(sizes)
        text = format_bytes(high) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
        table.add_row(f"TP{tp}", kind, str(len(sizes)), text if high else "-")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(requests)} programs in all.")
