"""Page pool of an instance, and block table (pages) of a sequence."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.geometry import PageGeometry
from sharding.errors import LayoutError


class PagePool:
    """Pool of KV pages for the sequences of one instance. A page has an allocator block on every rank.

    A table `[tp, pages]` holds the id of each page on each rank. The id is the first unit of the page's allocator
    block, divided by `units_per_page(tp)`. A page may have different ids on different ranks. Pools of different
    tensor-parallel degrees may share allocators (`BuddyAllocator`).

    Raises `LayoutError` if the allocators do not match the geometry or the degree.
    """

    def __init__(self, geometry: PageGeometry, allocators: Sequence[BuddyAllocator], tp: int) -> None:
        self.geometry = geometry
        self.tp = tp
        self._units_per_page = np.full((tp, 1), geometry.units_per_page(tp), np.int32)
        self._orders = [geometry.order(tp)] * tp
        self._allocators = tuple(allocators)
        if len(set(self._allocators)) != tp or len(self._allocators) != tp:
            raise LayoutError(f"TP{tp} needs {tp} allocators, one a rank; {len(self._allocators)} were given")
        for rank, allocator in enumerate(self._allocators):
            if allocator.max_tp != geometry.max_tp:
                raise LayoutError(
                    f"rank {rank}'s allocator splits pages {allocator.max_tp} ways; "
                    f"the geometry's max_tp is {geometry.max_tp}"
                )

    @classmethod
    def joined(cls, pools: Sequence["PagePool"]) -> "PagePool":
        """Join several pools into one. A page of the joined pool has a block on each rank of each given pool.

        Use a joined pool for a change of degree that switches one layer after another. Each page then needs blocks for
        the old degree and for the new degree. A table of the joined pool has the rows of the first pool, then the rows
        of the second pool, and so on. `tp` of the joined pool is the sum of the degrees.

        Raises `LayoutError` if two pools share an allocator.
        """
        joined = cls.__new__(cls)
        joined.geometry, joined.tp = pools[0].geometry, sum(pool.tp for pool in pools)
        joined._units_per_page = np.concatenate([pool._units_per_page for pool in pools])
        joined._orders = [order for pool in pools for order in pool._orders]
        joined._allocators = tuple(allocator for pool in pools for allocator in pool._allocators)
        if len(set(joined._allocators)) != joined.tp:
            raise LayoutError("pools with a common allocator cannot be joined: their pages would be counted twice")
        return joined

    @property
    def allocators(self) -> tuple[BuddyAllocator, ...]:
        """Allocators of the pool, one for each rank, in the order of ranks."""
        return self._allocators

    @property
    def ranks(self) -> list[tuple[BuddyAllocator, int]]:
        """`(allocator, block order)` of each rank. Pools with an equal entry take pages from the same memory."""
        return list(zip(self._allocators, self._orders, strict=True))

    @property
    def num_free_pages(self) -> int:
        """Number of pages that can be allocated now: the number of free pages on the rank with the fewest."""
        return min(self.free_by_rank())

    def total_by_rank(self) -> list[int]:
        """Return the number of pages on each rank, free or in use."""
        return [a.total_units >> order for a, order in zip(self._allocators, self._orders, strict=True)]

    def free_by_rank(self) -> list[int]:
        """Return the number of free pages on each rank."""
        return [a.num_free(order) for a, order in zip(self._allocators, self._orders, strict=True)]

    @property
    def num_total_pages(self) -> int:
        """Number of pages that could be allocated if no page were in use."""
        return min(self.total_by_rank())

    def allocate(self, num_pages: int) -> Int32[np.ndarray, "tp pages"]:
        """Allocate pages on all ranks, with one reference each, and return their ids.

        Raises `OutOfPagesError`, and changes nothing, if fewer than `num_pages` pages are free.
        """
        # The check leaves nothing to roll back: `num_free` is exact, and all changes are made by this thread.
        if num_pages > self.num_free_pages:
            raise OutOfPagesError(f"{num_pages} pages do not fit: the ranks have room for {self.free_by_rank()} pages")
        units = [a.allocate_many(order, num_pages) for a, order in zip(self._allocators, self._orders, strict=True)]
        return np.asarray(units, np.int32) // self._units_per_page

    def share(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Add a reference to each page. Raises `ValueError` if an id is not an allocated page of the pool's degree."""
        for allocator, units in zip(self._allocators, self._live_units(table), strict=True):
            for unit in units:
                allocator.share(unit)

    def free(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Drop a reference to each page. Raises `ValueError` if an id is not an allocated page of the pool's degree."""
        for allocator, units in zip(self._allocators, self._live_units(table), strict=True):
            for unit in units:
                allocator.free(unit)

    def references(self, table: Int32[np.ndarray, "tp pages"]) -> Int32[np.ndarray, " pages"]:
        """Return the number of references to each page. If the ranks disagree, return the largest number.

        Raises `ValueError` if an id is not an allocated page of the pool's degree.
        """
        ranks = [
            [allocator.references(unit) for unit in units]
            for allocator, units in zip(self._allocators, self._live_units(table), strict=True)
        ]
        return np.max(np.array(ranks, np.int32), axis=0)

    def _live_units(self, table: Int32[np.ndarray, "tp pages"]) -> list[list[int]]:
        """Return the first unit of each page of a table, as one list for each rank.

        Raises `ValueError` if a page is free.
        """
        if table.ndim != 2 or len(table) != self.tp:
            raise ValueError(f"a table of shape {table.shape} is not [{self.tp}, pages], a row for each rank")
        ranks = (table * self._units_per_page).tolist()
        for rank, (allocator, units) in enumerate(zip(self._allocators, ranks, strict=True)):
            for unit in units:
                if (order := allocator.order_of(unit)) != self._orders[rank]:
                    raise ValueError(
                        f"unit {unit} on rank {rank} starts a block of {1 << order} units; "
                        f"a page has {1 << self._orders[rank]} there"
                    )
        return ranks


class SequencePages:
    """Block table of one sequence: its pages in logical order, on each rank.

    The sequence holds one reference to each page until `release`. If `table` is given, the sequence takes over the
    caller's references to the pages of this table.
    """

    def __init__(self, pool: PagePool, table: Int32[np.ndarray, "tp pages"] | None = None) -> None:
        self.pool = pool
        self._buffer = np.zeros((pool.tp, 0), np.int32) if table is None else table.copy()
        self._num_pages = self._buffer.shape[1]

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def table(self) -> Int32[np.ndarray, "tp pages"]:
        """Page ids on each rank, as a read-only view. Read the property again after `reserve` or `release`."""
        view = self._buffer[:, : self._num_pages]
        view.flags.writeable = False
        return view

    def num_lacking(self, num_tokens: int) -> int:
        """Return how many more pages the sequence needs for `num_tokens` tokens.

        The number is negative if the sequence has more pages than it needs.
        """
        return self.pool.geometry.pages_for(num_tokens) - self._num_pages

    def reserve(self, num_tokens: int) -> int:
        """Add pages until the table holds `num_tokens` tokens. Return the number of new pages.

        Raises `OutOfPagesError`, and leaves the table unchanged, if too few pages are free.
        """
        num_new = self.num_lacking(num_tokens)
        if num_new <= 0:
            return 0
        new = self.pool.allocate(num_new)
        end = self._num_pages + num_new
        capacity = self._buffer.shape[1]
        if end > capacity:
            # Doubling the capacity avoids copying the table for every new page of a long generation.
            grown = np.zeros((self.pool.tp, max(end, 2 * capacity)), np.int32)
            grown[:, : self._num_pages] = self.table
            self._buffer = grown
        self._buffer[:, self._num_pages : end] = new
        self._num_pages = end
        return num_new

    def is_shared(self, index: int) -> bool:
        """Return whether page `index` has more than one reference on at least one rank.

        Raises `IndexError` if the page does not exist.
        """
        return bool(self.pool.references(self.table[:, index, None])[0] > 1)

    def copy_on_write(self, index: int) -> tuple[Int32[np.ndarray, " tp"], Int32[np.ndarray, " tp"]] | None:
        """Replace page `index` by a new page if page `index` is shared.

        Return `(old, new)`, the ids `[tp]` of both pages, or None if the page is not shared. The caller must copy the
        contents to the new page (`page_copy.copy_pages`). The caller must launch this copy before any other program
        that writes to newly allocated pages.

        The sequence drops its reference to the old page at once, so the old page may become free before the copy has
        run. The copy still reads the right contents, because programs run in launch order.

        Raises `OutOfPagesError`, and changes nothing, if no page is free. Raises `IndexError` if page `index` does not
        exist.
        """
        if not self.is_shared(index):
            return None
        new = self.pool.allocate(1)
        entry = self._buffer[:, : self._num_pages][:, index]
        source = entry.copy()
        entry[:] = new[:, 0]
        self.pool.free(source[:, None])
        return source, new[:, 0]

    def release(self) -> None:
        """Drop the references to all pages. The table is empty afterwards, and `reserve` may be called again."""
        self.pool.free(self.table)
        self._num_pages = 0
