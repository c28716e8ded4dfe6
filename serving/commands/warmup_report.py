"""Tables of `amoeba warmup`: programs, and memory of a device."""

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
    """Return a dict with the totals of the programs for each tensor-parallel degree, lowest degree first.

    `hits` is the number of programs that were in the compile cache. A program that runs on one device counts as degree
    1, even if instances of other degrees use it.
    """
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
    """Print the totals of the programs for each tensor-parallel degree."""
    table = Table("layout", "programs", "hits", "misses", "seconds", "code", "largest temporaries")
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
    console.print("Seconds are the sum over all threads and include tracing.")


def weight_padding(plan: EnginePlan) -> float:
    """Return the padding and copied heads of all weights, as a fraction of the model's weights."""
    kinds = plan.weights.padding().values()
    return sum(kind.stored for kind in kinds) / sum(kind.model for kind in kinds) - 1


def degree_name(plan: EnginePlan, tp: int) -> str:
    """Return the name of a degree: `TP4`, or `TP4EP4` if the ranks divide the experts of a model among them."""
    experts = plan.dims.config.experts is not None and plan.dims.experts.whole
    return f"TP{tp}EP{tp}" if experts else f"TP{tp}"


def print_plan(config: EngineConfig, plan: EnginePlan, short_bytes: int) -> None:
    """Print the parts of a device's memory, and the tokens that an instance of each tensor-parallel degree can hold."""
    memory, console = plan.memory, Console(highlight=False, soft_wrap=True)
    kv_bytes = memory.num_pages * memory.page_bytes * plan.dims.config.num_layers
    table = Table("each device", "", title=f"{config.model}, {config.num_devices} devices, {plan.dims.dtype}")
    for name, size in (
        ("budget", memory.budget_bytes - short_bytes),
        ("weights", memory.weight_bytes),
        ("KV cache", kv_bytes),
        ("temporaries of steps (estimate)", memory.activation_bytes),
        ("sampling", memory.sampling_bytes),
        ("staging", memory.staging_bytes),
    ):
        table.add_row(name, format_bytes(size))
    console.print(table)
    console.print(f"padding of weights: {weight_padding(plan):.2%}")
    if short_bytes:
        needed = format_bytes(memory.budget_bytes)
        console.print(
            f"It does not fit: {format_bytes(short_bytes)} are missing on each device, because every device holds all "
            f"weights. {needed} would leave room for one KV page; the figures below assume it."
        )
    for tp in plan.sub_meshes.degrees():
        num_instances = len(plan.sub_meshes.groups(tp))
        console.print(
            f"{num_instances} x {degree_name(plan, tp)}: {plan.capacity_tokens(tp, tp):,} tokens of KV cache each"
        )
    console.print(f"longest prompt plus output: {plan.max_model_len:,} tokens")


def print_requests(requests: Sequence[ProgramSpec]) -> None:
    """Print, for each kind, the number of programs and the bytes that one program updates in place on each device."""
    table = Table("layout", "kind", "programs", "updated in place, each device")

    def group(request: ProgramSpec) -> tuple[int, str]:
        return len(request.devices), request.kind

    for (tp, kind), members in groupby(sorted(requests, key=group), group):
        sizes = [request.donated_bytes for request in members]
        low, high = min(sizes), max(sizes)
        text = format_bytes(high) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
        table.add_row(f"TP{tp}", kind, str(len(sizes)), text if high else "-")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(requests)} programs in all")
