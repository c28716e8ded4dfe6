"""Limits of this machine, for comparison with benchmarks: bandwidth, FLOP rate and copies."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from kvcache.exchange import ExchangeKind, compile_exchange
from kvcache.geometry import PageGeometry
from sharding.mesh import SubMesh, assemble, disassemble

_BYTES = 512 << 20


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, after one warm-up call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def read_bandwidth(repeats: int = 7) -> float:
    """Return the bytes per second that all cores read from memory: the maximum of NumPy threads and XLA."""
    threads = cpu_count() or 1
    data = np.ones(_BYTES // 4, np.float32)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        numpy_s = seconds(lambda: list(pool.map(np.sum, parts)), repeats)
    array = jnp.asarray(data)
    total = jax.jit(jnp.sum)
    xla_s = seconds(lambda: total(array).block_until_ready(), repeats)
    return _BYTES / min(numpy_s, xla_s)


def flop_rate(repeats: int = 5, size: int = 2048) -> float:
    """Return the f32 operations per second of a large square matrix product."""
    matrix = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds(lambda: product(matrix, matrix).block_until_ready(), repeats)


def local_copy_seconds(
    group: SubMesh, geometry: PageGeometry, dtype: jnp.dtype, num_pages: int, phase_pages: int, repeats: int = 5
) -> float:
    """Return the time to copy pages within a device, in seconds for each byte, if all devices copy at the same time.

    The copies run in phases like an exchange, but send nothing to other devices. So the result is a lower bound for an
    exchange.

    Args:
        group: devices that copy at the same time.
        num_pages: pages of each of eight layers on each device. At least two.
        phase_pages: number of pieces that each rank sends to each rank in a phase of an exchange.
    """
    phase_pages = min(phase_pages, num_pages // 2)
    pages, count, num_layers = (num_pages,), group.tp * phase_pages, 8
    program = compile_exchange(geometry, dtype, group, pages, pages, phase_pages, ExchangeKind(0, 1))
    shape = (group.tp * num_pages, geometry.page_elems)
    kv = [[jnp.zeros(shape, dtype, device=group.sharded)] for _ in range(num_layers)]
    random = np.random.default_rng(0)
    phases = []
    for _ in range(max(1, num_pages * group.tp // (2 * count))):
        ids = np.stack([random.permutation(num_pages * group.tp)[: 2 * count] for _ in group.devices])
        send, receive = np.split(ids.astype(np.int32)[:, None], 2, axis=2)  # [tp, 1, count] each
        phases.append((jax.device_put(send, group.sharded), jax.device_put(receive, group.sharded)))

    def copy() -> None:
        for layer in range(num_layers):
            for send, receive in phases:
                kv[layer] = program(kv[layer], send, receive)
        jax.block_until_ready(kv)

    copied = num_layers * len(phases) * group.tp * count * geometry.page_elems // group.tp * dtype.itemsize
    return seconds(copy, repeats) / copied


def array_seconds(group: SubMesh, count: int) -> dict[str, float]:
    """Return the host seconds to make `count` arrays from device buffers ("join") and to take them apart ("part").

    A transformation that only changes views of buffers takes at least this time.
    """
    buffers = [[jnp.zeros((1, 1), device=device) for device in group.devices] for _ in range(count)]
    assemble(group, buffers[0])  # JAX checks the first array of a kind.
    jax.block_until_ready(buffers)
    start = time.perf_counter()
    arrays = [assemble(group, shards) for shards in buffers]
    joined = time.perf_counter()
    buffers = [disassemble(group, array) for array in arrays]
    return {"join": joined - start, "part": time.perf_counter() - joined}
