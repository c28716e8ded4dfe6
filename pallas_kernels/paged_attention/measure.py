"""Workloads for measuring paged attention, and timing of several calls that run in turns."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.base import PageTable
from pallas_kernels.paged_attention.layouts import PageLayout
from pallas_kernels.paged_attention.tuning import KernelShape


@dataclass(frozen=True)
class Workload:
    """Batch of sequences of equal length, for one call of attention. Each sequence ends with `queries` new tokens.

    Attributes:
        batch: number of sequences.
        tokens: tokens of each sequence, including the new ones.
        queries: new tokens of each sequence.
        kv_heads: number of KV heads.
        group: query heads for each KV head.
        head_dim: elements of a head.
        page_size: tokens in a page.
    """

    batch: int
    tokens: int
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @property
    def name(self) -> str:
        new = "decode" if self.queries == 1 else f"{self.queries} new"
        heads = f"{self.kv_heads * self.group}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.batch} x {self.tokens} tokens, {new}, {heads}, pages of {self.page_size}"

    @property
    def pages(self) -> int:
        """Number of KV pages of each sequence."""
        return -(-self.tokens // self.page_size)

    def kernel_shape(self, kv_itemsize: int = 2) -> KernelShape:
        """Return the `KernelShape` of a call with this workload and with a cache in one KV buffer."""
        return KernelShape(
            batch=self.batch,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            rows=self.queries * self.group,
            kv_itemsize=kv_itemsize,
            max_tokens=self.pages * self.page_size,
        )

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of all keys and values in the cache."""
        return 2 * self.batch * self.tokens * self.kv_heads * self.head_dim * itemsize

    def flops(self) -> int:
        """Return the floating-point operations of both matrix products of attention. Only visible keys count."""
        before = self.tokens - self.queries
        keys = self.queries * before + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * self.kv_heads * self.group * self.head_dim * keys

    def make(
        self,
        dtype: Any,
        *,
        kv_dtype: Any = None,
        extents: int = 1,
        scattered: bool = True,
        layout: PageLayout = PageLayout.HEADER_CENTRIC,
    ) -> tuple[jax.Array, list[jax.Array], list[PageTable], jax.Array]:
        """Return `(queries, extents, tables, query_positions)` with random contents and random page ids.

        Extents are KV buffers, and tables are the page tables of the extents. If there are several extents and
        `scattered` is True, consecutive pages of a sequence are in different extents. If `scattered` is False, all
        pages of a sequence are in one extent.
        """
        random = np.random.default_rng(0)
        key = jax.random.key(0, impl="rbg")  # The default compiles for seconds, for each shape.
        width = -(-self.pages // extents) if scattered else self.pages
        pool, tables = [], []
        for extent in range(extents):
            places = np.arange(extent, self.pages, extents) if scattered else np.arange(self.pages)
            ids = random.permutation(self.batch * width).astype(np.int32).reshape(self.batch, width)
            row = np.zeros((self.batch, width), np.int32)
            row[:, : len(places)] = places
            here = scattered | (np.arange(self.batch) % extents == extent)
            tables.append(PageTable(*map(jnp.asarray, (ids, row, np.where(here, len(places), 0).astype(np.int32)))))
            shape = (self.batch * width, self.kv_heads, 2, self.page_size, self.head_dim)
            physical = layout.physical_shape(shape)
            contents = jax.random.normal(jax.random.fold_in(key, extent), physical, jnp.dtype(dtype))
            pool.append(contents.astype(kv_dtype or dtype))
        heads = self.kv_heads * self.group
        queries = jax.random.normal(key, (self.batch, self.queries, heads, self.head_dim), jnp.dtype(dtype))
        positions = jnp.arange(self.tokens - self.queries, self.tokens, dtype=jnp.int32)
        return queries, pool, tables, jnp.tile(positions, (self.batch, 1))


def compare(calls: dict[str, Callable[[], Any]], budget_s: float = 4.0) -> dict[str, float]:
    """Return the median wall seconds of each call. Calls run in turns, so a change of clock speed affects all calls.

    After a warm-up, the calls run in as many rounds as fit in `budget_s` seconds: at least 5 and at most 50. In each
    round, a call that takes less than a millisecond is launched ten times in a row.
    """
    repeats, round_s = {}, 0.0
    for name, call in calls.items():
        jax.block_until_ready(call())
        tries = []
        for _ in range(3):  # the first one may run at the idle clock of a GPU, several times slower
            start = time.perf_counter()
            jax.block_until_ready(call())
            tries.append(time.perf_counter() - start)
        once = min(tries)
        repeats[name] = 10 if once < 1e-3 else 1
        round_s += once * repeats[name]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(5, min(50, int(budget_s / max(round_s, 1e-9))))):
        for name, call in calls.items():
            start = time.perf_counter()
            results = [call() for _ in range(repeats[name])]
            jax.block_until_ready(results[-1])
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: median(taken) for name, taken in times.items()}


def memory_probe(num_bytes: int) -> tuple[Callable[[], Any], int]:
    """Return a function whose time depends on memory bandwidth, and the number of bytes that one call moves.

    On a GPU, the function copies memory. On CPU, it reads memory on all cores.
    """
    data = jnp.ones(num_bytes // 4, jnp.float32)
    if jax.default_backend() == "gpu":
        copy = jax.jit(lambda x: x + 1)
        return lambda: copy(data), 2 * num_bytes
    parts = np.array_split(np.asarray(data), cpu_count() or 1)
    pool = ThreadPoolExecutor(len(parts))
    return lambda: list(pool.map(np.sum, parts)), num_bytes


def matmul_rate(size: int, dtype: Any) -> float:
    """Measure the floating-point operations per second of a square matrix product."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / compare({"matmul": lambda: product(matrix, matrix)})["matmul"]
