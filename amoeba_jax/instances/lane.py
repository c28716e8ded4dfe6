"""Sequences of an instance that travel through its layers together, and their pages."""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PrefixCache
from sharding.placement import Home


class Lane:
    """Sequences with pages in one pool. Used by the dispatcher thread only.

    An instance has one lane. While it merges or splits, it has one lane for each instance of the lower degree. With a
    start placement, it has one lane for each microbatch.

    A page is a column of a table. The table has a row for each rank of each home of the lane's attention: while layers
    change their homes, a page has a place at both.

    Args:
        pages: pool of the sequences' pages.
        cache: cache of their prefixes.
        ranks: rows of a table that belong to a home.
        max_running: largest number of running sequences.

    Attributes:
        running: sequences of the lane.
        closed: whether no further sequence may start.
    """

    def __init__(self, pages: PagePool, cache: PrefixCache, ranks: Mapping[Home, slice], max_running: int):
        self.pages, self.cache, self.ranks, self.max_running = pages, cache, dict(ranks), max_running
        self.running: list[Sequence] = []
        self.closed = False

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit if no page is in use."""
        return self.pages.num_total_pages * self.pages.geometry.page_size

    @property
    def has_free_slot(self) -> bool:
        return not self.closed and len(self.running) < self.max_running

    def lacks_own_pages(self, num_pages: int, lanes: Iterable["Lane"]) -> bool:
        """Return whether fewer than `num_pages` pages are free in the allocators that no other of `lanes` uses."""
        shared = {allocator for lane in lanes if lane is not self for allocator in lane.pages.allocators}
        own = zip(self.pages.free_by_rank(), self.pages.allocators, strict=True)
        return any(free < num_pages for free, allocator in own if allocator not in shared)

    def table(self, pages: SequencePages, home: Home) -> Int32[np.ndarray, "tp pages"]:
        """Return the rows of a sequence's block table for one home: page ids on the ranks of the home."""
        return pages.table[self.ranks[home]]

    def live_pages(self) -> Int32[np.ndarray, "rows pages"]:
        """Return each page that a sequence or the cache holds, in the order of their ids on rank 0."""
        tables = [s.pages.table for s in self.running if s.pages is not None] + [self.cache.table()]
        table = np.concatenate(tables, axis=1)
        _, first = np.unique(table[0], return_index=True)
        return table[:, first]
