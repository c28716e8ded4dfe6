"""Sizes of a KV page and of its sub-pages at each tensor-parallel degree."""

from dataclasses import dataclass

from sharding.degrees import is_degree
from sharding.errors import LayoutError


@dataclass(frozen=True)
class PageGeometry:
    """Shape of one KV cache page: keys and values of `page_size` tokens for all KV heads of one layer.

    A page is stored as `[kv_heads, 2, page_size, head_dim]`, heads first. At tensor-parallel degree `tp`, each rank has
    one of `tp` contiguous sub-pages, so splitting a page is a reshape.

    Raises `LayoutError` if a size is not supported.
    """

    kv_heads: int
    """Stored KV heads, a multiple of `max_tp`, with copies and zero heads (`sharding.heads`)."""
    page_size: int
    """Tokens in a page, a power of two."""
    head_dim: int
    """Elements of the key (or value) of one token in one head."""
    max_tp: int = 4
    """Largest TP degree, and number of units of a page."""

    def __post_init__(self) -> None:
        if not is_degree(self.max_tp):
            raise LayoutError(f"max_tp is {self.max_tp}; it must be a power of two")
        if self.kv_heads < 1 or self.kv_heads % self.max_tp:
            raise LayoutError(
                f"kv_heads is {self.kv_heads}; it must be a positive multiple of max_tp ({self.max_tp}): "
                "store each KV head several times"
            )
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise LayoutError(f"page_size is {self.page_size}; it must be a power of two, at least 1")
        if self.head_dim < 1:
            raise LayoutError(f"head_dim is {self.head_dim}; it must be at least 1")

    @property
    def page_elems(self) -> int:
        """Number of elements of a whole page. It is the row length of a KV buffer (extent)."""
        return self.kv_heads * 2 * self.page_size * self.head_dim

    def sub_pages(self, tp: int) -> int:
        """Return the number of sub-pages of a page at tensor-parallel degree `tp`: `tp` itself, if it is valid.

        Raises `LayoutError` if `tp` is not a power of two from 1 to `max_tp`.
        """
        if not is_degree(tp) or tp > self.max_tp:
            raise LayoutError(f"TP degree is {tp}; it must be a power of two and at most max_tp ({self.max_tp})")
        return tp

    def sub_page_shape(self, tp: int) -> tuple[int, int, int, int]:
        """Return the shape `(heads, 2, page_size, head_dim)` of a sub-page at degree `tp`."""
        return (self.kv_heads // self.sub_pages(tp), 2, self.page_size, self.head_dim)

    def units_per_page(self, tp: int) -> int:
        """Return the number of allocator units (sub-pages at degree `max_tp`) in a sub-page at degree `tp`."""
        return self.max_tp // self.sub_pages(tp)

    def order(self, tp: int) -> int:
        """Return the order of the allocator block for a sub-page at degree `tp`: log2 of its number of units."""
        return self.units_per_page(tp).bit_length() - 1

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens of one sequence.

        The number of pages does not depend on the tensor-parallel degree.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; it must not be negative")
        return -(-num_tokens // self.page_size)
