"""Sequences of an instance that travel through its layers together, and their pages."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

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

    def num_pages_of(self, sequences: Collection[Sequence]) -> int:
        """Return the number of pages that only the given sequences use."""
        of = {True: set[int](), False: set[int]()}
        for sequence in self.running if sequences else ():
            if sequence.pages is not None:
                of[sequence in sequences].update(sequence.pages.table[0].tolist())
        return len(of[True] - of[False])


class SharedPages:
    """Pages that other lanes hold in the allocators of a lane's pool. An implementation of `PageLender`.

    The other lanes belong to the same instance, to another instance on the same devices, or to paused instances. Their
    degree may be lower, so one of their pages may be several pages of the pool.

    Args:
        pool: page pool of the lane that needs pages.
        others: lanes that share allocators with `pool`.
    """

    def __init__(self, pool: PagePool, others: SequenceOf[Lane]):
        self._pool, self.others = pool, others
        own = {allocator: (rank, order) for rank, (allocator, order) in enumerate(pool.ranks)}
        self._ranks = {
            lane: {own[a][0]: 1 << (order - own[a][1]) for a, order in lane.pages.ranks if a in own} for lane in others
        }
        """For each lane, the ranks of the pool that it shares, and the pages of the pool in one of the lane's pages."""

    def num_free_pages(self, without: Collection[Sequence] = ()) -> int:
        """Return the number of free pages after a release of all cached prefixes and the sequences `without`."""
        return min(self._free_by_rank(without))

    def make_free(self, num_pages: int) -> None:
        """Evict cached prefixes of the other lanes until `num_pages` pages are free, or until none can be evicted."""
        for lane in sorted(self.others, key=lambda lane: -lane.cache.num_evictable_pages):
            free = self._pool.free_by_rank()
            missing = [-(-(num_pages - free[rank]) // count) for rank, count in self._ranks[lane].items()]
            lane.cache.evict(max(0, *missing))

    def holders(self, num_pages: int, without: Collection[Sequence] = ()) -> list[Sequence]:
        """Return the sequences of other lanes on ranks with fewer than `num_pages` free pages, except `without`.

        Pages count as free if they would be released with the cached prefixes or the sequences `without`
        (`num_free_pages`). If one rank of a lane has too few free pages, all sequences of the lane are returned.
        """
        free = self._free_by_rank(without)
        short = [lane for lane in self.others if min(free[rank] for rank in self._ranks[lane]) < num_pages]
        return [sequence for lane in short for sequence in lane.running if sequence not in without]

    def victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return the sequences to preempt so that `num_pages` pages become free. The last in order comes first.

        Only sequences of the given `rank` or of a lower priority are preempted. If they do not suffice, return an empty
        list.
        """
        found: list[Sequence] = []
        while holders := self.holders(num_pages, found):
            candidates = [s for s in holders if s.rank >= rank]
            if not candidates:
                return []
            found.append(max(candidates, key=lambda s: s.order))
        return found if self.num_free_pages(found) >= num_pages else []

    def _free_by_rank(self, without: Collection[Sequence]) -> list[int]:
        free = self._pool.free_by_rank()
        for lane, ranks in self._ranks.items():
            pages = lane.cache.num_evictable_pages + lane.num_pages_of(without)
            for rank, count in ranks.items():
                free[rank] += pages * count
        return free
