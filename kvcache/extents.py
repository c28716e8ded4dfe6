"""Extents: the device buffers with the KV cache of a layer. Page ids continue from one extent to the next."""

import itertools
from collections.abc import Iterable

from jaxtyping import Array, Float

Extent = Float[Array, "_ elems"]
"""Buffer `[pages, page_elems]` of whole KV pages of one layer on one device.

Extents may differ in their number of pages. The array over all devices of an instance has shape
`[tp * pages, page_elems]`: first the pages of rank 0, then the pages of rank 1, and so on.
"""

LayerKV = list[Extent]
"""All extents of a layer. The first extent has always been KV cache. The other extents held weights before."""


def extent_starts(num_pages: Iterable[int]) -> tuple[int, ...]:
    """Return the first page id of each extent, and the end of the last extent: (0, 100, 130) for 100 and 30 pages.

    Args:
        num_pages: number of page ids of each extent. At TP1: its pages. At a higher degree: its sub-pages.
    """
    return tuple(itertools.accumulate(num_pages, initial=0))
