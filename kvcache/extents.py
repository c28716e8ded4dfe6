"""Extents: the buffers that hold the KV cache of a layer, and the page ids that count over them."""

import itertools
from collections.abc import Iterable

from jaxtyping import Array, Float

Extent = Float[Array, "_ elems"]
"""Buffer `[pages, page_elems]` of whole KV pages of one layer. Each extent has its own number of pages. As an array
over the devices of an instance it is `[tp * pages, page_elems]`, rank after rank."""

LayerKV = list[Extent]
"""All extents of a layer. The first one has always been KV cache; the others held weights before."""


def extent_starts(num_pages: Iterable[int]) -> tuple[int, ...]:
    """Return the first page id of each extent, and the end of the last one. Ids count over all extents.

    Args:
        num_pages: number of pages of each extent, or of sub-pages at some degree.
    """
    return tuple(itertools.accumulate(num_pages, initial=0))
