"""Calls of paged attention with random contents, and their results in float64 NumPy.

Everything that no query may see is NaN: unused pages and slots, and keys outside of windows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import Options, PageLayout, PageTable

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}


@dataclass(frozen=True)
class Shape:
    """Shape of a call: `T` query tokens of `B` sequences, `extents` extents, tables `width` pages wide."""

    B: int
    T: int
    K: int
    G: int
    h: int
    page_size: int
    width: int
    extents: int
    window: int | None
    dtype: str
    soft_cap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None  # if it differs from `dtype`, scales are given too
    layout: PageLayout = PageLayout.HEADER_CENTRIC

    @property
    def longest(self) -> int:
        return self.width * self.page_size

    def options(self, case: "Case") -> Options:
        scale = self.h**-0.5
        return Options(scale, self.window, self.soft_cap, case.sinks, case.kv_scales, self.layout.value)


@dataclass
class Case:
    """Arguments of a call, and its expected result."""

    queries: jax.Array
    extents: list[jax.Array]
    tables: list[PageTable]
    positions: jax.Array
    expected: np.ndarray
    sinks: jax.Array | None
    kv_scales: jax.Array | None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.queries, self.extents, self.tables, self.positions


def dense_attention(
    shape: Shape, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, sinks: np.ndarray
) -> np.ndarray:
    """Compute one sequence in float64: `[T, H, h]` queries over `[tokens, K, h]` keys and values, head by head."""
    window = shape.window
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for t, position in enumerate(positions):
        if position < 0:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            scores = keys[first : position + 1, head // group] @ queries[t, head] / np.sqrt(queries.shape[2])
            if shape.soft_cap is not None:
                scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
            peak = max(scores.max(), sinks[head])
            weights = np.exp(scores - peak)
            total = weights.sum() + np.exp(sinks[head] - peak)
            out[t, head] = weights @ values[first : position + 1, head // group] / total
    return out


def query_positions(random: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Return up to `count` positions below `length`, in order, at random indices among padding."""
    out = np.full(count, -1, np.int32)
    used = random.integers(0, min(length, count) + 1) if random.random() < 0.3 else min(length, count)
    chosen = np.arange(length - used, length) if random.random() < 0.7 else random.choice(length, used, replace=False)
    places = np.arange(used) if random.random() < 0.5 else random.choice(count, used, replace=False)
    out[np.sort(places)] = np.sort(chosen)
    return out


def make_case(shape: Shape, lengths: list[int], seed: int) -> Case:
    """Make a call with random contents in random pages."""
    random = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    s, heads = shape.page_size, shape.K * shape.G
    pages = shape.B * shape.width + 3  # pages of each extent, enough for any distribution over the extents
    pool = np.full((shape.extents, pages, shape.K, 2, s, shape.h), np.nan, np.float32)
    free = [list(random.permutation(pages)) for _ in range(shape.extents)]
    # Padding entries of tables point to pages that no sequence uses.
    spare = np.array([ids.pop() for ids in free])
    ids = np.broadcast_to(spare[:, None, None], (shape.extents, shape.B, shape.width)).astype(np.int32)
    places = random.integers(0, shape.width, ids.shape).astype(np.int32)
    counts = np.zeros((shape.extents, shape.B), np.int32)
    queries = random.standard_normal((shape.B, shape.T, heads, shape.h)).astype(dtype)
    positions = np.stack([query_positions(random, length, shape.T) for length in lengths])
    expected = np.zeros(queries.shape)
    kv_dtype = jnp.dtype(shape.kv_dtype or shape.dtype)
    sinks = random.standard_normal(heads).astype(np.float32) if shape.sinks else np.full(heads, -np.inf)
    scales = random.uniform(0.5, 2, (2, shape.K)).astype(np.float32) if shape.kv_dtype else np.ones((2, shape.K))
    for b, length in enumerate(lengths):
        kv = random.standard_normal((2, length, shape.K, shape.h)).astype(kv_dtype)
        exact = kv.astype(np.float64) * scales[:, None, :, None].astype(np.float64)
        expected[b] = dense_attention(shape, queries[b].astype(np.float64), *exact, positions[b], sinks)
        live = positions[b][positions[b] >= 0]
        for token in range(length):
            page, slot = divmod(token, s)
            if slot == 0:
                extent = int(random.integers(shape.extents))
                page_id, place = free[extent].pop(), counts[extent, b]
                ids[extent, b, place], places[extent, b, place] = page_id, page
                counts[extent, b] += 1
            seen = (live >= token) & (True if shape.window is None else live - token < shape.window)
            if seen.any():
                pool[extent, page_id, :, :, slot] = kv[:, token].astype(np.float32).swapaxes(0, 1)
    tables = [PageTable(*map(jnp.asarray, table)) for table in zip(ids, places, counts, strict=True)]
    extents = [shape.layout.physical(jnp.asarray(extent, kv_dtype)) for extent in pool]
    return Case(
        jnp.asarray(queries),
        extents,
        tables,
        jnp.asarray(positions),
        expected,
        jnp.asarray(sinks) if shape.sinks else None,
        jnp.asarray(scales) if shape.kv_dtype else None,
    )


def check_output(shape: Shape, case: Case, out: jax.Array) -> None:
    """Check that padding gives zeros, garbage is not read, and all other results are close to the expected ones."""
    assert out.dtype == case.queries.dtype
    assert out.shape == case.queries.shape
    got = np.asarray(out, np.float64)
    assert np.isfinite(got).all(), "read garbage"
    np.testing.assert_array_equal(got[np.asarray(case.positions) < 0], 0, err_msg="padded queries give zeros")
    error, size = np.linalg.norm(got - case.expected), np.linalg.norm(case.expected)
    assert error <= TOLERANCE[shape.dtype] * size
