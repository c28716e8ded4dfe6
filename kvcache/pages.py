"""Page pool of an instance, over the allocators of its ranks, and block table of a sequence."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.geometry import PageGeometry
from sharding.errors import LayoutError


class PagePool:
    """Pool of pages for the sequences of one instance. A page is a block on every rank.

    A table `[tp, pages]` holds the local page ids of each rank: the unit id divided by `units_per_page(tp)`. The ids of
    one page may differ between ranks. Pools of different degrees may share allocators.

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
        """Join pools of different layouts. A page of the joined pool has blocks in all of them.

        Layers that change from one layout to another need both. A table has the rows of the first pool, then the rows
        of the second, and so on. Raises `LayoutError` if two pools share an allocator.
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
        """Allocators of the ranks, in the order of a table's rows."""
        return self._allocators

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated now: the free pages of the rank that has the fewest."""
        return min(self.free_by_rank())

    def total_by_rank(self) -> list[int]:
        """Return the number of pages of each rank, free and in use."""
        return [a.total_units >> order for a, order in zip(self._allocators, self._orders, strict=True)]

    def free_by_rank(self) -> list[int]:
        """Return the number of free pages of each rank."""
        return [a.num_free(order) for a, order in zip(self._allocators, self._orders, strict=True)]

    @property
    def num_total_pages(self) -> int:
        """Pages that could be allocated if no page were in use."""
        return min(self.total_by_rank())

    def allocate(self, num_pages: int) -> Int32[np.ndarray, "tp pages"]:
        """Allocate pages on all ranks, with one reference each, and return their ids.

        Raises `OutOfPagesError` if they do not fit. Nothing is changed then.
        """
        # The check leaves nothing to roll back: `num_free` is exact, and all changes are made by this thread.
        if num_pages > self.num_free_pages:
            raise OutOfPagesError(f"{num_pages} pages do not fit: the ranks have room for {self.free_by_rank()} pages")
        units = [a.allocate_many(order, num_pages) for a, order in zip(self._allocators, self._orders, strict=True)]
        return np.asarray(units, np.int32) // self._units_per_page

    def share(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Add a reference to each page. Raises `ValueError` if one is not a live page of this degree."""
        for allocator, units in zip(self._allocators, self._live_units(table), strict=True):
            for unit in units:
                allocator.share(unit)

    def free(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Drop a reference to each page. Raises `ValueError` if one is not a live page of this degree."""
        for allocator, units in zip(self._allocators, self._live_units(table), strict=True):
            for unit in units:
                allocator.free(unit)

    def references(self, table: Int32[np.ndarray, "tp pages"]) -> Int32[np.ndarray, " pages"]:
        """Return the references to each page, the maximum over the ranks. Raises `ValueError` as `free` does."""
        ranks = [
            [allocator.references(unit) for unit in units]
            for allocator, units in zip(self._allocators, self._live_units(table), strict=True)
        ]
        return np.max(np.array(ranks, np.int32), axis=0)

    def _live_units(self, table: Int32[np.ndarray, "tp pages"]) -> list[list[int]]:
        """Check the pages of a table. Return their first units on each rank."""
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

    The sequence takes over the references of `table` (`[tp, pages]`), if given, and holds them until `release`.
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
        """Local page ids, as a read-only view. After `reserve` or `release`, read it again."""
        view = self._buffer[:, : self._num_pages]
        view.flags.writeable = False
        return view

    def num_lacking(self, num_tokens: int) -> int:
        """Return the number of pages that are missing for `num_tokens` tokens. Zero or negative: none is missing."""
        return self.pool.geometry.pages_for(num_tokens) - self._num_pages

    def reserve(self, num_tokens: int) -> int:
        """Grow the table to `num_tokens` tokens and return the number of new pages. A table never shrinks.

        Raises `OutOfPagesError` if they do not fit. The table is unchanged then.
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
        """Return whether page `index` has several references on any rank. Raises `IndexError` if it does not exist."""
        return bool(self.pool.references(self.table[:, index, None])[0] > 1)

    def copy_on_write(self, index: int) -> tuple[Int32[np.ndarray, " tp"], Int32[np.ndarray, " tp"]] | None:
        """Replace page `index` by a new page if it is shared. Return `(source, target)` ids; None if not shared.

        The caller must copy the contents from source to target (`page_copy.copy_pages`), and launch this copy before
        any other program that writes to newly allocated pages. The source is safe until then, although this sequence's
        reference to it is dropped: programs run in launch order, so nothing can overwrite it earlier.

        Raises `OutOfPagesError` if no page is free (nothing is changed), and `IndexError` if page `index` does not
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
        """Drop all pages. The sequence is empty afterwards, and may `reserve` again."""
        self.pool.free(self.table)
        self._num_pages = 0
