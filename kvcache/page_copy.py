"""Copy whole pages within one layer's extents, for sequences that stop sharing a page."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvcache.exchange import as_pieces, gather_pieces, scatter_pieces
from kvcache.extents import Extent, extent_starts


def copy_pages(
    extents: Sequence[Extent],
    first_ids: tuple[int, ...],
    tp: int,
    source_ids: Int32[Array, " N"],
    target_ids: Int32[Array, " N"],
) -> list[jax.Array]:
    """Extents in which page `target_ids[n]` holds what `source_ids[n]` held; in place where they are donated.

    One rank's part, for use inside `shard_map`. All sources are read before the first target is written, so a page
    may be the source of one copy and the target of another. Temporaries are `N` sub-pages.

    Args:
        extents: one layer's, each `[pages, page_elems]`.
        first_ids: first page id of each extent, and one past the last (`extent_starts`).
        tp: degree of the ids: an extent of `pages` pages has `pages * tp` of them, and a page `page_elems / tp`
            elements.
        source_ids: local page ids over all extents.
        target_ids: likewise, all different. A negative source or target copies nothing (padding).
    """
    rows = as_pieces(extents, tp)

    def places(ids: jax.Array) -> jax.Array:
        """Where ids are among all rows; -1 where there is no page."""
        found = jnp.full_like(ids, -1)
        for r, start, first in zip(rows, first_ids[:-1], extent_starts(map(len, rows)), strict=False):
            inside = (ids >= start) & (ids < start + len(r))
            found = jnp.where(inside, ids - start + first, found)
        return found

    source_ids, target_ids = places(source_ids), places(target_ids)
    # In a branch, so that XLA has all contents before it writes: else each write would read the extents for itself, and
    # they would have to be copied.
    contents = jax.lax.cond(
        jnp.any(source_ids >= 0),
        lambda: gather_pieces(rows, source_ids),
        lambda: jnp.zeros((len(source_ids), rows[0].shape[1]), rows[0].dtype),
    )
    written = scatter_pieces(rows, jnp.where(source_ids < 0, -1, target_ids), contents)
    return [r.reshape(extent.shape) for r, extent in zip(written, extents, strict=True)]
