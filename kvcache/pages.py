"""The pages of one instance over its ranks' allocators, and the block table of one sequence."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.geometry import PageGeometry
from sharding.errors import LayoutError


class PagePool:
    """Allocates pages for sequences of one instance: for each page, a block on every rank.

    A table holds each rank's local page ids at its degree: a unit id divided by `units_per_page(tp)`. The ids of one
    page may differ between ranks. Pools of different degrees may stand over the same allocators.

    While layers change from one layout to another, a page has blocks in both: `PagePool.joined` has the ranks of
    several pools, one after the other.

    Raises `LayoutError` where the allocators do not match the geometry and the degree.
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
        """Pages that lie in several pools at once. A table has the rows of the first pool, then of the second, and so
        on. The pools must have no allocator in common."""
        joined = cls.__new__(cls)
        joined.geometry, joined.tp = pools[0].geometry, sum(pool.tp for pool in pools)
        joined._units_per_page = np.concatenate([pool._units_per_page for pool in pools])
        joined._orders = [order for pool in pools for order in pool._orders]
        joined._allocators = tuple(allocator for pool in pools for allocator in pool._allocators)
        if len(set(joined._allocators)) != joined.tp:
            raise LayoutError("pools with a common allocator cannot be joined: their pages would be counted twice")
        return joined

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated right now: those of the fullest rank."""
        return min(self.free_by_rank())

    def total_by_rank(self) -> list[int]:
        """Pages that each rank could have if nothing else were live."""
        return [a.total_units >> order for a, order in zip(self._allocators, self._orders, strict=True)]

    def free_by_rank(self) -> list[int]:
        """Pages that each rank has room for."""
        return [a.num_free(order) for a, order in zip(self._allocators, self._orders, strict=True)]

    @property
    def num_total_pages(self) -> int:
        """Pages that could be allocated if nothing else were live."""
        return min(self.total_by_rank())

    def allocate(self, num_pages: int) -> Int32[np.ndarray, "tp pages"]:
        """New pages with one reference each, on all ranks, or `OutOfPagesError` and nothing changed."""
        # Asking first leaves nothing to roll back: `num_free` is exact and no one else allocates meanwhile.
        if num_pages > self.num_free_pages:
            raise OutOfPagesError(f"{num_pages} pages do not fit: the ranks have room for {self.free_by_rank()} pages")
        units = [a.allocate_many(order, num_pages) for a, order in zip(self._allocators, self._orders, strict=True)]
        return np.asarray(units, np.int32) // self._units_per_page

    def share(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Adds a reference to each page. Raises `ValueError` if one is not a live page of this degree."""
        for allocator, units in zip(self._allocators, self._live_units(table), strict=True):
            for unit in units:
                allocator.share(unit)

    def free(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Drops a reference to each page. Raises `ValueError` if one is not a live page of this degree."""
        for allocator, units in zip(self._allocators, self._live_units(table), strict=True):
            for unit in units:
                allocator.free(unit)

    def references(self, table: Int32[np.ndarray, "tp pages"]) -> Int32[np.ndarray, " pages"]:
        """References to each page, those on the rank that has most. Raises `ValueError` as `free` does."""
        ranks = [
            [allocator.references(unit) for unit in units]
            for allocator, units in zip(self._allocators, self._live_units(table), strict=True)
        ]
        return np.max(np.array(ranks, np.int32), axis=0)

    def _live_units(self, table: Int32[np.ndarray, "tp pages"]) -> list[list[int]]:
        """First units of the pages of each rank, checked before anything is changed."""
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
    """The block table of one sequence: its pages in logical order, on each rank.

    Takes over the references in `table` (`[tp, pages]`), if given, such as the pages that a migration
    allocated. Holds them until `release`.
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
        """Local page ids, a read-only view. `reserve` and `release` leave views taken earlier stale."""
        view = self._buffer[:, : self._num_pages]
        view.flags.writeable = False
        return view

    def num_lacking(self, num_tokens: int) -> int:
        """Pages that it has yet to get for `num_tokens` tokens; none where that is not above 0."""
        return self.pool.geometry.pages_for(num_tokens) - self._num_pages

    def reserve(self, num_tokens: int) -> int:
        """Grows the table to hold `num_tokens` tokens (never shrinks it). Returns the number of new pages.

        Raises `OutOfPagesError`, with the table as it was, where they do not fit.
        """
        num_new = self.num_lacking(num_tokens)
        if num_new <= 0:
            return 0
        new = self.pool.allocate(num_new)
        end = self._num_pages + num_new
        capacity = self._buffer.shape[1]
        if end > capacity:
            # Doubled, so that a long generation does not copy its table at every page.
            grown = np.zeros((self.pool.tp, max(end, 2 * capacity)), np.int32)
            grown[:, : self._num_pages] = self.table
            self._buffer = grown
        self._buffer[:, self._num_pages : end] = new
        self._num_pages = end
        return num_new

    def is_shared(self, index: int) -> bool:
        """Whether page `index` has other references too, on any rank. Raises `IndexError` beyond the table."""
        return bool(self.pool.references(self.table[:, index, None])[0] > 1)

    def copy_on_write(self, index: int) -> tuple[Int32[np.ndarray, " tp"], Int32[np.ndarray, " tp"]] | None:
        """Makes page `index` this sequence's own. Returns (source, target) columns to copy on the device, if any.

        None where the page is not shared. Otherwise a new page takes its place in the table, and the caller copies
        its contents (`page_copy.copy_pages`). This sequence's reference to the source is gone on return, yet its
        contents stay until a program launched later overwrites them: programs run in the order of their launch. So
        launch the copy before any other program that writes to pages allocated since.

        Raises `OutOfPagesError`, with nothing changed, where no page is free, and `IndexError` beyond the table.
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
        """Drops all pages. The sequence is empty then and may `reserve` again."""
        self.pool.free(self.table)
        self._num_pages = 0
