"""Checks of the arguments of paged attention, before anything is launched."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.paged_attention.base import Options, PageTable
from pallas_kernels.paged_attention.layouts import PageLayout

QUERY_DTYPES = ("float32", "bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")


def check_arguments(
    queries: jax.Array,
    extents: Sequence[jax.Array],
    tables: Sequence[PageTable],
    query_positions: jax.Array,
    options: Options,
) -> None:
    """Raise `ValueError` if shapes, dtypes or options do not fit together."""
    if not extents or len(extents) != len(tables):
        raise ValueError(
            f"{len(extents)} extents and {len(tables)} page tables: one table for each extent, at least one"
        )
    if queries.ndim != 4 or queries.dtype.name not in QUERY_DTYPES:
        raise ValueError(f"queries {queries.dtype}{queries.shape} must be [B, T, H, h] in one of {QUERY_DTYPES}")
    batch, length, heads, head_dim = queries.shape
    if query_positions.shape != (batch, length) or query_positions.dtype != jnp.int32:
        raise ValueError(
            f"query_positions {query_positions.dtype}{query_positions.shape} must be int32 [B, T] = {(batch, length)}"
        )
    layout = PageLayout.of(options.stride_order)
    shapes = [layout.logical_shape(extent.shape) if extent.ndim == 5 else extent.shape for extent in extents]
    for extent, shape in zip(extents, shapes, strict=True):
        dtype = extent.dtype.name
        fits = len(shape) == 5 and shape[2] == 2 and shape[4] == head_dim and shape[0] > 0
        if not fits or (dtype != queries.dtype.name and dtype not in FP8_DTYPES):
            raise ValueError(
                f"extent {dtype}{extent.shape} does not fit queries {queries.dtype}{queries.shape}: it must be [pages, "
                f"KV heads, 2, page size, head size] in stride order {layout.value}, of the same head size and of the "
                f"same dtype or one of {FP8_DTYPES}"
            )
    for place, name in ((1, "KV heads"), (3, "tokens a page")):
        if len(counts := {shape[place] for shape in shapes}) > 1:
            raise ValueError(f"extents have {' and '.join(map(str, sorted(counts)))} {name}: all must have the same")
    if len(dtypes := {extent.dtype.name for extent in extents}) > 1:
        raise ValueError(f"extents are {' and '.join(sorted(dtypes))}: all must have the same dtype")
    _, kv_heads, _, page_size, _ = shapes[0]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be grouped over {kv_heads} KV heads")
    if page_size & (page_size - 1):
        raise ValueError(f"page size {page_size} must be a power of two")
    for table in tables:
        _check_table(table, batch)
    _check_options(options, heads, kv_heads)


def _check_table(table: PageTable, batch: int) -> None:
    shapes = (table.page_ids.shape, table.page_positions.shape, table.num_pages.shape)
    width = table.page_ids.shape[-1]
    if shapes != ((batch, width), (batch, width), (batch,)) or width < 1:
        raise ValueError(
            f"page table {shapes} must be ids [B={batch}, W], positions [B, W] and page counts [B], with W at least 1"
        )
    if any(field.dtype != jnp.int32 for field in table):
        raise ValueError(f"page table of {', '.join(str(field.dtype) for field in table)} must be int32 throughout")


def _check_options(options: Options, heads: int, kv_heads: int) -> None:
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window={options.sliding_window} must be at least 1, or None")
    if options.soft_cap is not None and not options.soft_cap > 0:
        raise ValueError(f"soft_cap={options.soft_cap} must be positive, or None")
    if options.sinks is not None and options.sinks.shape != (heads,):
        raise ValueError(f"sinks {options.sinks.shape} must be [H] = ({heads},)")
    if options.kv_scales is not None and options.kv_scales.shape != (2, kv_heads):
        raise ValueError(f"kv_scales {options.kv_scales.shape} must be [2, K] = (2, {kv_heads})")


def check_tables(
    tables: Sequence[PageTable], num_pages: Sequence[int], query_positions: jax.Array | np.ndarray
) -> None:
    """Raise `ValueError` if the contents of a table or of `query_positions` are invalid.

    The following contents are invalid: a page out of range, a page position that is negative or occurs twice in a
    sequence, a number of pages beyond the width of the table, and a query position below -1.

    Args:
        tables: table of each extent, with concrete values.
        num_pages: number of pages of each extent.
        query_positions: `[B, T]` positions, with concrete values.
    """
    positions = np.asarray(query_positions)
    if (positions < -1).any():
        raise ValueError(f"query position {positions.min()} is negative; -1 marks padding")
    seen: list[set[int]] = [set() for _ in positions]
    for index, (table, pages) in enumerate(zip(tables, num_pages, strict=True)):
        ids, places, counts = (np.asarray(field) for field in table)
        for row, count in enumerate(counts):
            if not 0 <= count <= ids.shape[1]:
                raise ValueError(
                    f"extent {index}, sequence {row}: {count} pages in a table that is {ids.shape[1]} wide"
                )
            used = ids[row, :count]
            if (bad := used[(used < 0) | (used >= pages)]).size:
                raise ValueError(
                    f"extent {index}, sequence {row}: page {bad[0]} is out of range: the extent has {pages} pages"
                )
            for place in places[row, :count].tolist():
                if place < 0 or place in seen[row]:
                    problem = "negative" if place < 0 else "given twice"
                    raise ValueError(f"extent {index}, sequence {row}: page position {place} is {problem}")
                seen[row].add(place)


def checked_tables(
    tables: Sequence[PageTable], num_pages: Sequence[int], query_positions: jax.Array
) -> Sequence[PageTable]:
    """Check the tables with `check_tables` and return them.

    Inside `jit`, the check runs on the host before attention starts. If the check fails, the caller gets a run-time
    error of JAX with the same message.
    """
    leaves: list[Any] = [*(field for table in tables for field in table), query_positions]
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        check_tables(tables, num_pages, query_positions)
        return tables

    def check(given: Sequence[PageTable], positions: jax.Array | np.ndarray) -> list[np.ndarray]:
        check_tables(given, num_pages, positions)
        return [np.asarray(table.page_ids, np.int32) for table in given]

    # Attention reads the ids that the callback returns, so it cannot start earlier.
    types = [jax.ShapeDtypeStruct(table.page_ids.shape, jnp.int32) for table in tables]
    ids = jax.pure_callback(check, types, list(tables), query_positions)
    return [table._replace(page_ids=new) for table, new in zip(tables, ids, strict=True)]
