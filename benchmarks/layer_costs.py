"""Measurements of `transformation.py` without requests: release and restoration of weights, copies, padded FFNs."""

import time
from collections import defaultdict
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import array_seconds, local_copy_seconds, seconds

from amoeba_jax import LLM
from amoeba_jax.models.layers import matmul
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import SubMesh

DEVICES = 4


def idle_times(llm: LLM, repeats: int) -> dict[str, float]:
    """Return the median seconds of changes between TP1 and TP4 without requests. `_4` is a merge, `_1` is a split.

    - `release`: only the release of weights in a merge.
    - `restore_1`: split that restores the weights.
    - `switch_4`, `switch_1`: changes that keep the weights. Only views of buffers change.
    - `after_4`, `after_1`: as `switch`, but right after programs have run, so that the processor's caches are cold.
    - `join`, `part`: see `array_seconds`.
    """

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
                # Right after programs on the same cores, with cold processor caches.
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
    """Return the seconds for each byte that devices copy between pages of the model (see `local_copy_seconds`)."""
    plan, group = llm._engine.cluster.memory_plan, SubMesh(0, tuple(jax.devices()[:DEVICES]))
    dtype = jnp.dtype(llm.dims.dtype)
    return local_copy_seconds(group, llm.dims.pages, dtype, plan.num_pages, plan.phase_pages)


def ffn_times(llm: LLM, tokens: int, repeats: int) -> dict[str, float]:
    """Return the seconds of all FFNs on one device, with padded shards and with whole matrices without padding.

    The result also has the share of padding, and the bytes of the padded shards.
    """
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
    for name, width, parts in (("shards", dims.ffn_shard, dims.max_tp), ("whole", ffn, 1)):
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
