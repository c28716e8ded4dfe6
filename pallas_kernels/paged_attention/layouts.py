"""The orders in which the pages of an extent can lie in memory.

Attention indexes the logical axes `[page, KV head, keys/values, token, element]`. A *stride order* is the permutation
with which `physical.transpose(stride_order)` is that view; three are known. In header-centric order, which everything
runs on unless told otherwise, a head's share of a page is contiguous. The others are there to measure what they cost.
"""

import enum

import jax
from jaxtyping import Shaped


class PageLayout(enum.Enum):
    """A memory order; the value is its stride order."""

    HEADER_CENTRIC = (0, 1, 2, 3, 4)
    """`[page, KV head, keys/values, token, element]`"""
    PAGE_FRIENDLY = (0, 3, 1, 2, 4)
    """`[page, keys/values, token, KV head, element]`"""
    RAW = (1, 3, 0, 2, 4)
    """`[keys/values, page, token, KV head, element]`"""

    @staticmethod
    def of(stride_order: tuple[int, ...]) -> "PageLayout":
        """The layout of a stride order. Raises `ValueError` for one that is not supported."""
        try:
            return PageLayout(tuple(stride_order))
        except ValueError:
            known = ", ".join(f"{layout.value} ({layout.name.lower()})" for layout in PageLayout)
            raise ValueError(
                f"stride_order={tuple(stride_order)} is not supported; it must be one of {known}"
            ) from None

    @property
    def heads_inside_tokens(self) -> bool:
        """Whether the heads of a token lie together, so that one head's tokens are not contiguous."""
        return self is not PageLayout.HEADER_CENTRIC

    def logical_shape(self, physical: tuple[int, ...]) -> tuple[int, ...]:
        """`[pages, K, 2, S, h]` of an array in this order."""
        return tuple(physical[axis] for axis in self.value)

    def physical_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array in this order whose logical view is `[pages, K, 2, S, h]`."""
        return tuple(logical[self.value.index(axis)] for axis in range(5))

    def physical(self, logical: Shaped[jax.Array, "P K two S h"]) -> jax.Array:
        """The array in this order whose logical view is given. Copies, except for header-centric order."""
        return logical.transpose([self.value.index(axis) for axis in range(5)])

    def rows(self, extent: jax.Array, piece_tokens: int) -> jax.Array:
        """A free view by pieces of pages: `[rows, piece_tokens, h]`, or with `K, h` at the end if heads are inside."""
        _, kv_heads, _, _, head_dim = self.logical_shape(extent.shape)
        inner = (kv_heads, head_dim) if self.heads_inside_tokens else (head_dim,)
        return extent.reshape(-1, piece_tokens, *inner)

    def row(
        self,
        page: jax.Array,
        head: jax.Array,
        kv: int,
        piece: jax.Array | int,
        *,
        num_rows: int,
        kv_heads: int,
        pieces: int,
    ) -> jax.Array:
        """Index in `rows` of a piece of a page, `pieces` to a page; the head counts where heads are rows."""
        if self is PageLayout.HEADER_CENTRIC:
            return ((page * kv_heads + head) * 2 + kv) * pieces + piece
        if self is PageLayout.PAGE_FRIENDLY:
            return (page * 2 + kv) * pieces + piece
        return page * pieces + (kv * (num_rows // 2) + piece)
