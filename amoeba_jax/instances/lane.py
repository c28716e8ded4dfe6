"""A share of an instance's sequences that travel through its layers together, and their pages."""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PrefixCache
from sharding.placement import Home


class Lane:
    """Sequences with pages in one pool. An instance has one lane, and one for each instance of the lower degree while
    it merges or splits. Used by the dispatcher thread only.

    A page is a column of a table, which has a row for each rank of each home that computes layers of the lane: while
    layers change their home, a page has its place in both layouts.

    Args:
        pages: of its sequences.
        cache: of their prefixes.
        ranks: which rows of a table a home's ranks have.
        max_running: sequences that it runs at once.

    Attributes:
        running: its sequences.
        closed: no others start.
    """

    def __init__(self, pages: PagePool, cache: PrefixCache, ranks: Mapping[Home, slice], max_running: int):
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

    def lacks_own_pages(self, num_pages: int) -> bool:
        """Whether that many pages are not free on the ranks that no other lane has pages on."""
        own = min(self.ranks.values(), key=lambda ranks: ranks.stop - ranks.start)
        return min(self.pages.free_by_rank()[own]) < num_pages

    def make_free(self, num_pages: int, lanes: Iterable["Lane"]) -> None:
        """Evict cached prefixes for that many free pages, its own first, then those of other lanes, which may share
        ranks with it: as few of these as needed, or all."""
        self.cache.evict(min(num_pages, self.cache.num_evictable_pages))
        for other in sorted(lanes, key=lambda other: -other.cache.num_evictable_pages):
            if other is not self and self.pages.num_free_pages < num_pages:
                other.cache.evict(min(num_pages - self.pages.num_free_pages, other.cache.num_evictable_pages))

    @property
    def homes(self) -> tuple[Home, ...]:
        """That its tables have rows for."""
        return tuple(self.ranks)

    def table(self, pages: SequencePages, home: Home) -> Int32[np.ndarray, "tp pages"]:
        """A sequence's pages where a home's ranks have them."""
        return pages.table[self.ranks[home]]

    def live_pages(self) -> Int32[np.ndarray, "rows pages"]:
        """All pages that sequences or the cache hold, each once, in the order of their ids on rank 0."""
        tables = [s.pages.table for s in self.running if s.pages is not None] + [self.cache.table()]
        table = np.concatenate(tables, axis=1)
        _, first = np.unique(table[0], return_index=True)
        return table[:, first]
