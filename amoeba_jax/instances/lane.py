"""A share of an instance's sequences that travel through its layers together, and their pages."""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PrefixCache
from sharding.placement import Homes


class Lane:
    """Sequences with pages in one pool. An instance has one lane, and one for each instance of the lower degree while
    it merges or splits. Used by the dispatcher thread only.

    A page is a column of a table. The table has a row for each rank of the lane's home in each page group: while layers
    change their homes, a page has a place in both groups.

    Args:
        pages: of its sequences.
        cache: of their prefixes.
        ranks: rows of a table that belong to a page group.
        max_running: sequences that it runs at once.

    Attributes:
        running: its sequences.
        closed: no others start.
    """

    def __init__(self, pages: PagePool, cache: PrefixCache, ranks: Mapping[Homes, slice], max_running: int):
        self.pages, self.cache, self.ranks, self.max_running = pages, cache, dict(ranks), max_running
        self.running: list[Sequence] = []
        self.closed = False

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it holds when nothing else does."""
        return self.pages.num_total_pages * self.pages.geometry.page_size

    @property
    def has_free_slot(self) -> bool:
        return not self.closed and len(self.running) < self.max_running

    def lacks_own_pages(self, num_pages: int, lanes: Iterable["Lane"]) -> bool:
        """Return whether fewer than `num_pages` pages are free in the allocators that no other of `lanes` uses."""
        shared = {allocator for lane in lanes if lane is not self for allocator in lane.pages.allocators}
        own = zip(self.pages.free_by_rank(), self.pages.allocators, strict=True)
        return any(free < num_pages for free, allocator in own if allocator not in shared)

    def make_free(self, num_pages: int, lanes: Iterable["Lane"]) -> None:
        """Evict cached prefixes for that many free pages, its own first, then those of other lanes, which may share
        ranks with it: as few of these as needed, or all."""
        self.cache.evict(min(num_pages, self.cache.num_evictable_pages))
        for other in sorted(lanes, key=lambda other: -other.cache.num_evictable_pages):
            if other is not self and self.pages.num_free_pages < num_pages:
                other.cache.evict(min(num_pages - self.pages.num_free_pages, other.cache.num_evictable_pages))

    def table(self, pages: SequencePages, group: Homes) -> Int32[np.ndarray, "tp pages"]:
        """Return the pages of a sequence on the ranks of this lane's home in a page group."""
        return pages.table[self.ranks[group]]

    def live_pages(self) -> Int32[np.ndarray, "rows pages"]:
        """All pages that sequences or the cache hold, each once, in the order of their ids on rank 0."""
        tables = [s.pages.table for s in self.running if s.pages is not None] + [self.cache.table()]
        table = np.concatenate(tables, axis=1)
        _, first = np.unique(table[0], return_index=True)
        return table[:, first]
