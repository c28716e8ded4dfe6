"""Copy whole pages within one layer's extents, for sequences that stop sharing a page."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def copy_pages(
    extents: Sequence[Float[Array, "_ elems"]],
    extent_starts: tuple[int, ...],
    tp: int,
    source_ids: Int32[Array, " N"],
    target_ids: Int32[Array, " N"],
) -> list[jax.Array]:
    """Extents in which page `target_ids[n]` holds what `source_ids[n]` held; in place where they are donated.

    One rank's part, for use inside `shard_map`. All sources are read before the first target is written, so a page
    may be the source of one copy and the target of another. Temporaries are `N` sub-pages.

    Args:
        extents: one layer's, each `[pages, page_elems]`.
        extent_starts: first page id of each extent, and one past the last (`PagePool.extent_starts`).
        tp: degree of the ids: an extent of `pages` pages has `pages * tp` of them, and a page `page_elems / tp`
            elements.
        source_ids: local page ids over all extents.
        target_ids: likewise, all different. A negative source or target copies nothing (padding).
    """
    # Rows of one flat leading axis, as in `append_kv`, so that XLA neither transposes nor copies the extents.
    sub_pages = [extent.reshape(extent.shape[0] * tp, -1) for extent in extents]
    spans = list(zip(sub_pages, extent_starts[:-1], extent_starts[1:], strict=True))
    contents = jnp.zeros((source_ids.shape[0], sub_pages[0].shape[1]), sub_pages[0].dtype)
    for rows, start, stop in spans:
        inside = (source_ids >= start) & (source_ids < stop)
        contents = jnp.where(inside[:, None], rows[jnp.where(inside, source_ids - start, 0)], contents)
    out = []
    for extent, (rows, start, stop) in zip(extents, spans, strict=True):
        inside = (source_ids >= 0) & (target_ids >= start) & (target_ids < stop)
        row = jnp.where(inside, target_ids - start, rows.shape[0])  # past the end, so dropped
        out.append(rows.at[row].set(contents, mode="drop").reshape(extent.shape))
    return out
