"""What this machine can do at best: the ceilings that benchmarks are held against."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

_BYTES = 512 << 20


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after one call to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes per second that all cores together read from memory: the better of NumPy threads and XLA."""
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
    """f32 floating-point operations per second of a large square matrix product."""
    matrix = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds(lambda: product(matrix, matrix).block_until_ready(), repeats)
