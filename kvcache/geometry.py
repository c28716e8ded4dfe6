"""The size of a KV page, and of the pieces that it falls into at each tensor-parallel degree."""

from dataclasses import dataclass

from sharding.degrees import DEGREES
from sharding.errors import LayoutError


@dataclass(frozen=True)
class PageGeometry:
    """Shape of one page: the KV of `page_size` tokens for all KV heads of one layer.

    A page is `[kv_heads, 2, page_size, head_dim]` in that order (header-centric), so that the `tp` sub-pages
    that it falls into at degree `tp` are contiguous and splitting it is a reshape.

    Raises `LayoutError` for a geometry that cannot exist.
    """

    kv_heads: int
    """KV heads as stored. A model with fewer KV heads than `max_tp` stores each several times."""
    page_size: int
    """Tokens in a page, a power of two."""
    head_dim: int
    """Elements of one head's key (or value) of one token."""
    max_tp: int = 4
    """The largest TP degree that pages are split for."""

    def __post_init__(self) -> None:
        if self.max_tp not in DEGREES:
            raise LayoutError(f"max_tp is {self.max_tp}; it must be one of {DEGREES}")
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
        """Elements of a whole page: the row length of an extent."""
        return self.kv_heads * 2 * self.page_size * self.head_dim

    def sub_pages(self, tp: int) -> int:
        """Sub-pages of one page at degree `tp`: an extent of `n` pages holds `n * sub_pages(tp)`."""
        if tp not in DEGREES or tp > self.max_tp:
            raise LayoutError(f"TP degree is {tp}; it must be one of {DEGREES} and at most max_tp ({self.max_tp})")
        return tp

    def sub_page_shape(self, tp: int) -> tuple[int, int, int, int]:
        """`(heads, 2, page_size, head_dim)` of what one rank holds of a page at degree `tp`."""
        return (self.kv_heads // self.sub_pages(tp), 2, self.page_size, self.head_dim)

    def units_per_page(self, tp: int) -> int:
        """Allocator units (sub-pages of degree `max_tp`) in a sub-page of degree `tp`."""
        return self.max_tp // self.sub_pages(tp)

    def order(self, tp: int) -> int:
        """Buddy order of a sub-page of degree `tp`: log2 of its units, so 0 at `max_tp`."""
        return self.units_per_page(tp).bit_length() - 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence take, at any degree."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; it must not be negative")
        return -(-num_tokens // self.page_size)
