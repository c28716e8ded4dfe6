"""Benchmark of paged attention on the local device, with competing implementations in the same run.

    python -m pallas_kernels.paged_attention.bench [--json results.json] [--quick]

On a Hopper GPU, the benchmark compares the kernel with XLA, JAX's own kernel and cuDNN. It also measures the bandwidth
of copies and the rate of matrix products. On CPU, the benchmark compares the XLA implementation with attention that
gathers all pages first, and with attention over a dense cache. It prints Markdown tables. Calls that are compared run
in turns.
"""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append import append_kv
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.layouts import PageLayout
from pallas_kernels.paged_attention.measure import Workload, compare, matmul_rate, memory_probe

MEMORY = "memory alone (copy on a GPU, read on CPU)"


@dataclass(frozen=True)
class Row:
    """Result of measuring a call: name, median seconds, bytes to move and operations to do.

    A count of 0 means that the number is not meaningful.
    """

    name: str
    time_s: float
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Machine:
    """Device that is measured, and sizes that suit it.

    Attributes:
        device: name of the device.
        gpu: whether the device is a GPU.
        kernel: implementation of paged attention to measure.
        dtype: dtype of queries and cache.
        probe_bytes: bytes of the call that measures memory bandwidth.
        flop_rate: floating-point operations per second of a matrix product.
        budget_s: seconds for the measurement of each comparison.
    """

    device: str
    gpu: bool
    kernel: str
    dtype: Any
    probe_bytes: int
    flop_rate: float
    budget_s: float


def attention(workload: Workload, machine: Machine, implementation: str, **options: Any) -> Callable[[], jax.Array]:
    """Return a function that runs compiled `paged_attention` on a workload.

    `options` are keyword arguments of `Workload.make` or of `paged_attention`. The option `layout` also sets the
    `stride_order` of `paged_attention`.
    """
    made = {name: options.pop(name) for name in ("extents", "scattered", "kv_dtype", "layout") if name in options}
    arguments = workload.make(machine.dtype, **made)
    if "layout" in made:
        options["stride_order"] = made["layout"].value
    scale = workload.head_dim**-0.5
    call = jax.jit(partial(paged_attention, scale=scale, implementation=implementation, **options))
    return lambda: call(*arguments)


def dense(workload: Workload, machine: Machine) -> Callable[[], jax.Array]:
    """Return a function that runs causal attention over a dense cache in plain XLA, as a baseline for the time.

    Keys and values are contiguous arrays `[B, K, tokens, h]` with the sizes of the workload. The order of the tokens is
    arbitrary, so the result is not the result of `attention`.
    """
    queries, (extent,), _, positions = workload.make(machine.dtype)
    w = workload
    contents = extent.reshape(w.batch, w.pages, w.kv_heads, 2, w.page_size, w.head_dim)
    kv = contents.transpose(3, 0, 2, 1, 4, 5).reshape(2, w.batch, w.kv_heads, -1, w.head_dim)
    precision = "highest" if machine.dtype == jnp.float32 else None

    @jax.jit
    def call(queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
        grouped = queries.reshape(w.batch, w.queries, w.kv_heads, w.group, w.head_dim)
        scores = jnp.einsum("btkgh,bknh->bkgtn", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
        mask = jnp.arange(keys.shape[2]) <= positions[:, None, None, :, None]
        weights = jax.nn.softmax(jnp.where(mask, scores * w.head_dim**-0.5, -jnp.inf)).astype(values.dtype)
        return jnp.einsum("bkgtn,bknh->btkgh", weights, values, precision=precision).reshape(queries.shape)

    keys, values = jnp.array(kv[0]), jnp.array(kv[1])
    return lambda: call(queries, keys, values, positions)


def cudnn(workload: Workload, machine: Machine) -> Callable[[], jax.Array]:
    """Return a function that runs cuDNN's attention over contiguous keys and values.

    If all tokens are new, the attention is causal. If not, every query attends to all keys.
    """
    w, key = workload, jax.random.key(1)
    queries = jax.random.normal(key, (w.batch, w.queries, w.kv_heads * w.group, w.head_dim), machine.dtype)
    keys = jax.random.normal(key, (w.batch, w.tokens, w.kv_heads, w.head_dim), machine.dtype)
    causal = w.queries == w.tokens
    call = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"))
    return lambda: call(queries, keys, keys)


def jax_kernel(workload: Workload, machine: Machine) -> Callable[[], jax.Array]:
    """Return a function that runs JAX's own decode kernel (Triton), over keys and values `[K, pages, S, h]`."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as own

    w = workload
    queries, (extent,), (table,), _ = w.make(machine.dtype)
    keys, values = (jnp.array(extent[:, :, kv].swapaxes(0, 1)) for kv in range(2))
    lengths = jnp.full(w.batch, w.tokens, jnp.int32)
    scaled = queries[:, 0] * w.head_dim**-0.5
    call = jax.jit(own)
    return lambda: call(scaled, keys, values, table.page_ids, lengths)


def rows_of(
    machine: Machine, calls: dict[str, Callable[[], Callable[[], Any]]], num_bytes: int, flops: int
) -> list[Row]:
    """Measure calls in turns, and return a row for each. Calls that fail are printed and left out.

    Args:
        machine: device of the run.
        calls: functions by name. Each function prepares a workload and returns the call to measure.
        num_bytes: bytes that a call must move. If not 0, a row for memory bandwidth is added.
        flops: floating-point operations of a call.
    """
    ready = {}
    for name, make in calls.items():
        try:
            ready[name] = make()
            jax.block_until_ready(ready[name]())
        except Exception as error:  # a missing competitor must not end the run
            print(f"\n`{name}` does not run here: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            ready.pop(name, None)
    moved = 0
    if num_bytes:  # measured in turns too, because the speed of a shared machine changes
        ready[MEMORY], moved = memory_probe(machine.probe_bytes)
    times = compare(ready, machine.budget_s)
    rows = [Row(name, seconds, num_bytes, flops) for name, seconds in times.items() if name != MEMORY]
    return rows + ([Row(MEMORY, times[MEMORY], moved, 0)] if num_bytes else [])


def decode(machine: Machine, workload: Workload) -> list[Row]:
    calls = {machine.kernel: partial(attention, workload, machine, machine.kernel)}
    if machine.gpu:
        calls["xla"] = partial(attention, workload, machine, "xla")
        calls["JAX's own kernel, its layout"] = partial(jax_kernel, workload, machine)
    else:
        calls["gather everything"] = partial(attention, workload, machine, "reference")
        calls["dense contiguous cache"] = partial(dense, workload, machine)
    return rows_of(machine, calls, workload.kv_bytes(jnp.dtype(machine.dtype).itemsize), workload.flops())


def prefill(machine: Machine, workload: Workload) -> list[Row]:
    calls = {machine.kernel: partial(attention, workload, machine, machine.kernel)}
    if machine.gpu:
        calls["cuDNN, contiguous"] = partial(cudnn, workload, machine)
    else:
        calls["dense contiguous cache"] = partial(dense, workload, machine)
    return rows_of(machine, calls, 0, workload.flops())


def variants(machine: Machine, workload: Workload) -> list[Row]:
    """Measure the cost of attention with several KV buffers, other memory orders and options."""
    one = partial(attention, workload, machine, machine.kernel)
    heads = workload.kv_heads * workload.group
    calls: dict[str, Callable[[], Callable[[], Any]]] = {"1 extent": one}
    calls |= {f"{n} extents": partial(one, extents=n) for n in (4, 13)}
    calls |= {f"{n} extents, a sequence in one": partial(one, extents=n, scattered=False) for n in (4, 13)}
    orders = [order for order in PageLayout if order is not PageLayout.HEADER_CENTRIC]
    calls |= {f"{order.name.lower()} order": partial(one, layout=order) for order in orders}
    calls["soft cap"] = partial(one, soft_cap=30.0)
    calls["sinks"] = partial(one, sinks=jnp.zeros(heads))
    scales = jnp.ones((2, workload.kv_heads))
    rows = rows_of(machine, calls, workload.kv_bytes(jnp.dtype(machine.dtype).itemsize), 0)
    fp8 = {"fp8 cache": partial(one, kv_dtype=jnp.float8_e4m3fn, kv_scales=scales)}
    return rows + [row for row in rows_of(machine, fp8, workload.kv_bytes(1), 0) if row.name != MEMORY]


def cache_writes(machine: Machine, workload: Workload) -> list[Row]:
    """Measure writes of new tokens, copies of pages to and from a staging buffer, and memory bandwidth."""
    w = workload
    _, (extent,), (table,), _ = w.make(machine.dtype)
    num_pages, itemsize = extent.shape[0], extent.dtype.itemsize
    tokens = w.batch
    new = jnp.ones((tokens, w.kv_heads, w.head_dim), extent.dtype)
    targets = table.page_ids[:, 0], jnp.zeros(tokens, jnp.int32)
    append = jax.jit(lambda e, *a: append_kv([e], (0, num_pages), *a)[0], donate_argnums=0)
    moved = table.page_ids.reshape(-1)[: max(1, num_pages // 4)]
    flat = extent.reshape(num_pages, -1)
    pack = jax.jit(lambda e, ids: e[ids])
    unpack = jax.jit(
        lambda e, ids, contents: e.at[ids].set(contents, mode="drop", unique_indices=True), donate_argnums=0
    )
    staged = pack(flat, moved)
    held = {"pages": jnp.copy(extent), "flat": jnp.copy(flat)}

    def run_append() -> jax.Array:
        held["pages"] = append(held["pages"], new, new, *targets)
        return held["pages"]

    def run_unpack() -> jax.Array:
        held["flat"] = unpack(held["flat"], moved, staged)
        return held["flat"]

    calls = {"append": run_append, "pack": lambda: pack(flat, moved), "unpack": run_unpack}
    probe, moved_by_probe = memory_probe(machine.probe_bytes)
    times = compare(calls | {MEMORY: probe}, machine.budget_s)
    written = 2 * new.size * itemsize
    return [
        Row(f"append of {tokens} tokens", times["append"], 2 * written, 0),
        Row(f"pack of {moved.size} pages", times["pack"], 2 * staged.size * itemsize, 0),
        Row(f"unpack of {moved.size} pages", times["unpack"], 2 * staged.size * itemsize, 0),
        Row(MEMORY, times[MEMORY], moved_by_probe, 0),
    ]


def show(title: str, rows: list[Row], machine: Machine) -> dict[str, Any]:
    """Print the table of one comparison, with ratios to its first row. Return the table as a dict for JSON."""
    if not rows:
        return {"title": title, "rows": []}
    memory = [row.num_bytes / row.time_s for row in rows if row.name == MEMORY]
    print(f"\n**{title}**\n")
    print("| | time, us | to the first | GB/s | of bandwidth | TFLOP/s | of matmul |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        rate, work = row.num_bytes / row.time_s, row.flops / row.time_s
        moved = f"{rate / 1e9:.1f} | {rate / memory[0]:.0%}" if row.num_bytes else " | "
        done = f"{work / 1e12:.3g} | {work / machine.flop_rate:.0%}" if row.flops else " | "
        print(f"| {row.name} | {row.time_s * 1e6:.1f} | {row.time_s / rows[0].time_s:.2f} | {moved} | {done} |")
    return {"title": title, "rows": [asdict(row) for row in rows]}


def measure_machine(quick: bool) -> Machine:
    device = jax.devices()[0]
    hopper = getattr(device, "compute_capability", "").startswith("9.")
    gpu = device.platform == "gpu"
    dtype = jnp.bfloat16 if gpu else jnp.float32
    probe_bytes = (1 << 22) if quick else (1 << 30) if gpu else (1 << 28)
    flop_rate = matmul_rate(256 if quick else 8192 if gpu else 2048, dtype)
    name = device.device_kind if gpu else f"{platform.machine()} CPU"
    return Machine(name, gpu, "mosaic_gpu" if hopper else "xla", dtype, probe_bytes, flop_rate, 0.02 if quick else 4.0)


def run(quick: bool) -> dict[str, Any]:
    """Run and print all comparisons. Return their results as a dict for JSON.

    `quick` uses tiny workloads. Their times mean nothing.
    """
    machine = measure_machine(quick)
    print(f"{machine.device}, JAX {jax.__version__}, Python {platform.python_version()}, {jnp.dtype(machine.dtype)}")
    print(f"matmul {machine.flop_rate / 1e12:.3g} TFLOP/s")
    base = Workload(16, 2048, 1, kv_heads=8, group=4, head_dim=64, page_size=16)
    decodes, chunk, contexts = [base], 256, (0, 2048)
    if machine.gpu:
        base = replace(base, head_dim=128)
        decodes = [replace(base, batch=b, tokens=n) for b, n in ((8, 32768), (64, 4096), (256, 1024))]
        chunk, contexts = 2048, (0, 32768)
    if quick:
        decodes, chunk, contexts = [replace(base, batch=2, tokens=64)], 16, (0, 32)
    chunks = [replace(base, batch=1, tokens=chunk + before, queries=chunk) for before in contexts]
    results = [show(f"Decode: {w.name}", decode(machine, w), machine) for w in decodes]
    results += [show(f"Prefill: {w.name}", prefill(machine, w), machine) for w in chunks]
    results.append(show(f"What variants cost: {decodes[0].name}", variants(machine, decodes[0]), machine))
    results.append(show(f"Cache writes: {decodes[-1].name}", cache_writes(machine, decodes[-1]), machine))
    about = {"device": machine.device, "jax": jax.__version__, "python": platform.python_version()}
    return about | {"flop_rate": machine.flop_rate, "results": results}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="tiny workloads, to check that everything runs")
    arguments = parser.parse_args(argv)
    results = run(arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
