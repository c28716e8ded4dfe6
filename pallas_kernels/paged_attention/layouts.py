"""Memory orders of KV pages.

Attention indexes the logical axes `[page, KV head, keys/values, token, element]`. A *stride order* is the permutation
such that `physical.transpose(stride_order)` has these axes. The engine uses the header-centric order, in which the part
of a page that belongs to one head is contiguous. The other two orders exist to measure their cost.
"""

import enum

import jax
from jaxtyping import Shaped


class PageLayout(enum.Enum):
    """Memory order of KV pages. The value of a member is its stride order, a permutation of the axes."""

    HEADER_CENTRIC = (0, 1, 2, 3, 4)
    """`[page, KV head, keys/values, token, element]`"""
    PAGE_FRIENDLY = (0, 3, 1, 2, 4)
    """`[page, keys/values, token, KV head, element]`"""
    RAW = (1, 3, 0, 2, 4)
    """`[keys/values, page, token, KV head, element]`"""

    @staticmethod
    def of(stride_order: tuple[int, ...]) -> "PageLayout":
        """Return the layout of a stride order. Raises `ValueError` if it is not supported."""
        try:
            return PageLayout(tuple(stride_order))
        except ValueError:
            known = ", ".join(f"{layout.value} ({layout.name.lower()})" for layout in PageLayout)
            raise ValueError(
                f"stride_order={tuple(stride_order)} is not supported; it must be one of {known}"
            ) from None

    @property
    def heads_inside_tokens(self) -> bool:
        """Whether all heads of a token are contiguous. If False, all tokens of a head are contiguous."""
        return self is not PageLayout.HEADER_CENTRIC

    def logical_shape(self, physical: tuple[int, ...]) -> tuple[int, ...]:
        """Convert a shape in this memory order to the logical shape `[pages, K, 2, S, h]`."""
        return tuple(physical[axis] for axis in self.value)

    def physical_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Convert the logical shape `[pages, K, 2, S, h]` to a shape in this memory order."""
        return tuple(logical[self.value.index(axis)] for axis in range(5))

    def physical(self, logical: Shaped[jax.Array, "P K two S h"]) -> jax.Array:
        """Convert an array with logical axes to this memory order.

        This copies the array, except in header-centric order.
        """
        return logical.transpose([self.value.index(axis) for axis in range(5)])

    def rows(self, extent: jax.Array, piece_tokens: int) -> jax.Array:
        """Reshape a KV buffer to rows, without a copy. Each row holds `piece_tokens` tokens of one page.

        In header-centric order, a row has the keys or values of one head: `[rows, piece_tokens, h]`. In the other
        orders, a row has the keys or values of all heads: `[rows, piece_tokens, K, h]`.
        """
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
        """Return the index of a row in the result of `rows`: the row with the keys or the values of a piece of a page.

        Args:
            page: index of the page in its buffer.
            head: KV head. Used only in header-centric order.
            kv: 0 for keys, 1 for values.
            piece: index of the piece in the page.
            num_rows: number of rows of the buffer.
            kv_heads: number of KV heads.
            pieces: number of pieces of a page.
        """
        if self is PageLayout.HEADER_CENTRIC:
            return ((page * kv_heads + head) * 2 + kv) * pieces + piece
        if self is PageLayout.PAGE_FRIENDLY:
            return (page * 2 + kv) * pieces + piece
        return page * pieces + (kv * (num_rows // 2) + piece)
