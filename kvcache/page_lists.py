"""Block tables that are split by KV buffer (extent), as inputs of paged attention.

The KV cache of a layer is in several device buffers (extents). Attention reads the extents one by one, and merges the
partial results. For each extent, attention needs the ids of the pages and their positions in the sequence.
"""

import itertools

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.paged_attention import PageTable
from sharding.errors import LayoutError


def split_by_extent(
    table: Int32[Array, "B W"], num_pages: Int32[Array, "B"], extent_starts: tuple[int, ...]
) -> tuple[PageTable, ...]:
    """Split block tables into one `PageTable` for each KV buffer (extent).

    In each row of a result, the used entries come first, in the order of the sequence. Unused entries are 0. A single
    extent is an exception: its page ids are `table` unchanged.

    Args:
        table: `[B, W]` local page ids in logical order.
        num_pages: `[B]` number of valid entries of each row.
        extent_starts: first page id of each extent, beginning with 0, and the end of the last extent
            (`kvcache.extents.extent_starts`). Python integers, fixed when the program is compiled.

    Raises `LayoutError` if `extent_starts` does not begin with 0 or is not strictly ascending.
    """
    rises = all(a < b for a, b in itertools.pairwise(extent_starts))
    if len(extent_starts) < 2 or extent_starts[0] != 0 or not rises:
        raise LayoutError(f"extent_starts is {extent_starts}; it must rise from 0 to the end of the last extent")
    num_extents = len(extent_starts) - 1
    column = jnp.broadcast_to(jnp.arange(table.shape[1], dtype=jnp.int32), table.shape)
    if num_extents == 1:
        return (PageTable(table, column, num_pages),)

    # Padding sorts behind the last extent. The sort is stable, so the pages of an extent stay in logical order.
    inner_starts = jnp.asarray(extent_starts[1:-1], jnp.int32)
    extent = jnp.searchsorted(inner_starts, table, side="right", method="compare_all")
    extent = jnp.where(column < num_pages[:, None], extent, num_extents)
    order = jnp.argsort(extent, axis=1, stable=True).astype(jnp.int32)
    sorted_ids = jnp.take_along_axis(table, order, axis=1)

    lists = []
    first = jnp.zeros_like(num_pages)
    for e in range(num_extents):
        count = jnp.sum(extent == e, axis=1, dtype=jnp.int32)
        source = jnp.minimum(first[:, None] + column, table.shape[1] - 1)
        valid = column < count[:, None]
        ids = jnp.take_along_axis(sorted_ids, source, axis=1) - extent_starts[e]
        positions = jnp.take_along_axis(order, source, axis=1)
        lists.append(PageTable(jnp.where(valid, ids, 0), jnp.where(valid, positions, 0), count))
        first = first + count
    return tuple(lists)
