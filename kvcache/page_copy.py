"""Reads, writes and copies of whole pages in the KV buffers (extents) of a layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvcache.exchange import as_pieces, gather_pieces, scatter_pieces
from kvcache.extents import Extent, extent_starts


def read_pages(
    extents: Sequence[Extent], first_ids: tuple[int, ...], tp: int, ids: Int32[Array, " pages"]
) -> Float[Array, "pages elems"]:
    """Return the contents of pages: `page_elems / tp` elements for each page. A negative id gives arbitrary contents.

    Runs on one rank, inside `shard_map`. Arguments are as in `copy_pages`.
    """
    rows = as_pieces(extents, tp)
    return gather_pieces(rows, _rows_of(rows, first_ids, ids))


def write_pages(
    extents: Sequence[Extent],
    first_ids: tuple[int, ...],
    tp: int,
    ids: Int32[Array, " pages"],
    contents: Float[Array, "pages elems"],
) -> list[jax.Array]:
    """Write the contents of pages. Return the extents, updated in place if they are donated.

    Runs on one rank, inside `shard_map`. Arguments are as in `copy_pages`. A negative id writes nothing.
    """
    rows = as_pieces(extents, tp)
    written = scatter_pieces(rows, _rows_of(rows, first_ids, ids), contents)
    return [r.reshape(extent.shape) for r, extent in zip(written, extents, strict=True)]


def copy_pages(
    extents: Sequence[Extent],
    first_ids: tuple[int, ...],
    tp: int,
    source_ids: Int32[Array, " copies"],
    target_ids: Int32[Array, " copies"],
) -> list[jax.Array]:
    """Copy page `source_ids[n]` to page `target_ids[n]`. Return the extents, updated in place if they are donated.

    Runs on one rank, inside `shard_map`. All sources are read before the first target is written, so a page may be the
    source of one copy and the target of another. Temporary memory: one sub-page for each copy.

    Args:
        extents: KV buffers of one layer, each `[pages, page_elems]`.
        first_ids: first page id of each extent, and the end of the last extent (`extent_starts`).
        tp: tensor-parallel degree of the page ids. An extent of `pages` pages has `pages * tp` ids, each for
            `page_elems / tp` elements.
        source_ids: local page id of the source of each copy. Ids continue from one extent to the next.
        target_ids: local page id of the target of each copy. All targets differ. If the source id or the target id is
            negative (padding), nothing is copied.
    """
    rows = as_pieces(extents, tp)
    source_ids, target_ids = _rows_of(rows, first_ids, source_ids), _rows_of(rows, first_ids, target_ids)
    # A branch, because XLA then gathers all contents before it writes. Otherwise it fuses the gather into each write,
    # and has to copy the extents.
    contents = jax.lax.cond(
        jnp.any(source_ids >= 0),
        lambda: gather_pieces(rows, source_ids),
        lambda: jnp.zeros((len(source_ids), rows[0].shape[1]), rows[0].dtype),
    )
    written = scatter_pieces(rows, jnp.where(source_ids < 0, -1, target_ids), contents)
    return [r.reshape(extent.shape) for r, extent in zip(written, extents, strict=True)]


def _rows_of(
    rows: Sequence[jax.Array], first_ids: tuple[int, ...], ids: Int32[Array, " pages"]
) -> Int32[Array, " pages"]:
    """Convert page ids to row indices. An id in no KV buffer becomes -1.

    Row indices continue from one array of `rows` to the next.
    """
    found = jnp.full_like(ids, -1)
    for r, start, first in zip(rows, first_ids[:-1], extent_starts(map(len, rows)), strict=False):
        inside = (ids >= start) & (ids < start + len(r))
        found = jnp.where(inside, ids - start + first, found)
    return found
