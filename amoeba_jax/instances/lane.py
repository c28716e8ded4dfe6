"""Sequences of an instance that travel through its layers together, and their pages."""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PrefixCache
from sharding.placement import Home


class Lane:
    """Sequences of an instance that travel through its layers together. Their pages come from one pool.

    In steady state, an instance has one lane. While it merges or splits, it has one lane for each instance of the lower
    degree. With several microbatches (`sharding.placement`), it has one lane for each microbatch.

    A page is a column of a block table. The table has a row for each rank of each home that computes the lane's
    attention. While layers change their homes, a page therefore has an id at both homes. Used by the dispatcher thread
    only.

    Args:
        pages: pool of the sequences' pages.
        cache: prefix cache of the pool.
        ranks: rows of a block table that belong to each home.
        max_running: maximum number of running sequences.

    Attributes:
        running: running sequences of the lane.
        closed: whether no further sequence may start.
    """

    def __init__(self, pages: PagePool, cache: PrefixCache, ranks: Mapping[Home, slice], max_running: int):
        self.pages, self.cache, self.ranks, self.max_running = pages, cache, dict(ranks), max_running
        self.running: list[Sequence] = []
        self.closed = False

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit in the pages of the lane if no page is in use."""
        return self.pages.num_total_pages * self.pages.geometry.page_size

    @property
    def has_free_slot(self) -> bool:
        return not self.closed and len(self.running) < self.max_running

    def lacks_own_pages(self, num_pages: int, lanes: Iterable["Lane"]) -> bool:
        """Return whether fewer than `num_pages` pages are free in the lane's own allocators.

        An allocator is the lane's own if no other lane in `lanes` uses it.
        """
        shared = {allocator for lane in lanes if lane is not self for allocator in lane.pages.allocators}
        own = zip(self.pages.free_by_rank(), self.pages.allocators, strict=True)
        return any(free < num_pages for free, allocator in own if allocator not in shared)

    def table(self, pages: SequencePages, home: Home) -> Int32[np.ndarray, "tp pages"]:
        """Return the rows of a sequence's block table that belong to one home: page ids on the home's ranks."""
        return pages.table[self.ranks[home]]

    def live_pages(self) -> Int32[np.ndarray, "rows pages"]:
        """Return all pages that a sequence or the prefix cache holds, each once, ordered by their id on rank 0."""
        tables = [s.pages.table for s in self.running if s.pages is not None] + [self.cache.table()]
        table = np.concatenate(tables, axis=1)
        _, first = np.unique(table[0], return_index=True)
        return table[:, first]
