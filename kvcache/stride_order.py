"""The orders in which a KV pool can lie in memory, all read through one logical view.

The logical axes are `[Block, Head, K/V, Token, Dim]`. Kernels and benchmarks index those and never the
physical ones, so that each of them runs on all three layouts.
"""

import enum
import math
from typing import TypeVar

import jax
import numpy as np

from kvcache.geometry import PageGeometry

ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array)

LOGICAL_AXES = ("block", "head", "kv", "token", "dim")


class KVLayout(enum.Enum):
    """Physical axis order of a pool, outermost first; `dim` is always innermost."""

    RAW = "raw"
    """[K/V, Block, Token, Head, Dim]: one key pool and one value pool."""
    PAGE_FRIENDLY = "page_friendly"
    """[Block, K/V, Token, Head, Dim]: a page is contiguous, a head's share of it is not."""
    HEADER_CENTRIC = "header_centric"
    """[Block, Head, K/V, Token, Dim]: a head's share of a page is contiguous. What the engine runs on."""


_PHYSICAL_AXES = {
    KVLayout.RAW: ("kv", "block", "token", "head", "dim"),
    KVLayout.PAGE_FRIENDLY: ("block", "kv", "token", "head", "dim"),
    KVLayout.HEADER_CENTRIC: ("block", "head", "kv", "token", "dim"),
}


def stride_order(layout: KVLayout) -> tuple[int, ...]:
    """The permutation with which `physical.transpose(stride_order(layout))` is the logical view."""
    return tuple(_PHYSICAL_AXES[layout].index(axis) for axis in LOGICAL_AXES)


def physical_shape(layout: KVLayout, blocks: int, heads: int, tokens: int, dim: int) -> tuple[int, ...]:
    """Shape of the array in memory for a pool of `blocks` blocks of `tokens` tokens."""
    sizes = {"block": blocks, "head": heads, "kv": 2, "token": tokens, "dim": dim}
    return tuple(sizes[axis] for axis in _PHYSICAL_AXES[layout])


def logical_view(array: ArrayT, layout: KVLayout) -> ArrayT:
    """`[Block, Head, K/V, Token, Dim]` of a pool in memory order `layout`.

    In NumPy a view. In JAX a transpose that XLA folds into the reads of the program it is part of; outside
    `jit` it copies, unless the layout is header-centric already.
    """
    return array.transpose(stride_order(layout))


def contiguous_runs(layout: KVLayout, geometry: PageGeometry, tp: int) -> int:
    """Contiguous runs of memory in one rank's share (its heads) of one page at degree `tp`.

    This is the number of copies (or DMA descriptors) that it takes to move the share to another device:
    at `tp > 1` one for header-centric, `2 * page_size` for page-friendly and raw. The page is one of several
    in its pool.
    """
    heads, kv, tokens, dim = geometry.sub_page_shape(tp)
    taken = {"block": 1, "head": heads, "kv": kv, "token": tokens, "dim": dim}
    # A run ends where an axis is taken in part. So everything inside the innermost such axis is one run, and
    # each index combination of the axes outside it starts another.
    in_part = {"block", "head"} if tp > 1 else {"block"}
    axes = _PHYSICAL_AXES[layout]
    innermost = max(axes.index(axis) for axis in in_part)
    return math.prod(taken[axis] for axis in axes[:innermost])
