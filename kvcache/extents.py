"""What a layer's KV cache consists of on a device, and how pages are numbered over it."""

import itertools
from collections.abc import Iterable

from jaxtyping import Array, Float

Extent = Float[Array, "_ elems"]
"""A buffer `[pages, page_elems]` of whole KV pages of one layer; those of a layer differ in the number of pages. Over
the devices of an instance, the ranks' extents lie one after the other: `[tp * pages, page_elems]`."""

LayerKV = list[Extent]
"""All extents of a layer: the first was KV cache from the start, the others were weights."""


def extent_starts(num_pages: Iterable[int]) -> tuple[int, ...]:
    """First page id of each extent, where ids count over all extents, and one past the last.

    Args:
        num_pages: pages, or sub-pages of a degree, of each extent.
    """
    return tuple(itertools.accumulate(num_pages, initial=0))
