"""What a layer's KV cache consists of on a device, and how pages are numbered over it."""

import itertools
from collections.abc import Iterable

from jaxtyping import Array, Float

Extent = Float[Array, "pages elems"]
"""A buffer of whole KV pages of one layer: `pages` counts whole pages, `elems` is `PageGeometry.page_elems`. Over the
devices of an instance, extents of the ranks lie one after the other: `[tp * pages, elems]`."""

LayerKV = list[Extent]
"""All extents of a layer: the first was KV cache from the start, the others were weights."""


def extent_starts(num_pages: Iterable[int]) -> tuple[int, ...]:
    """First page id of each extent, where ids count over all extents, and one past the last.

    Args:
        num_pages: pages, or sub-pages of a degree, of each extent.
    """
    return tuple(itertools.accumulate(num_pages, initial=0))
