"""Lane (sequences that travel through the layers together), and memory that several lanes share."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PrefixCache
from sharding.placement import Home


class Lane:
    """Sequences of an instance that travel through the layers together. Only the dispatcher thread uses this object.

    An instance usually has one lane. An instance that merges or splits has one lane for each instance of the lower
    degree. An instance with several microbatches (`sharding.placement`) has one lane for each microbatch.

    All pages of a lane come from one pool. The block table of a sequence has the ids of the sequence's pages: a row for
    each rank, and a column for each page. The block table has rows for the ranks of all homes (device groups) that
    compute attention for the lane. During a transition, both the old homes and the new homes have rows.

    Args:
        pages: pool from which the sequences of the lane get pages.
        cache: prefix cache of the pool.
        ranks: for each home, the slice of block table rows that belong to the ranks of the home.
        max_running: maximum number of sequences that may run in the lane.

    Attributes:
        running: running sequences of the lane.
        closed: whether the lane refuses new sequences.
    """

    def __init__(self, pages: PagePool, cache: PrefixCache, ranks: Mapping[Home, slice], max_running: int):
        self.pages, self.cache, self.ranks, self.max_running = pages, cache, dict(ranks), max_running
        self.running: list[Sequence] = []
        self.closed = False

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit in all pages of the lane, in use or free."""
        return self.pages.num_total_pages * self.pages.geometry.page_size

    @property
    def has_free_slot(self) -> bool:
        return not self.closed and len(self.running) < self.max_running

    def lacks_own_pages(self, num_pages: int, lanes: Iterable["Lane"]) -> bool:
        """Return whether any rank that only this lane uses has fewer than `num_pages` free pages.

        `lanes` are all lanes that may have pages on the devices of this lane. `lanes` may include this lane.
        """
        shared = {allocator for lane in lanes if lane is not self for allocator in lane.pages.allocators}
        own = zip(self.pages.free_by_rank(), self.pages.allocators, strict=True)
        return any(free < num_pages for free, allocator in own if allocator not in shared)

    def table(self, pages: SequencePages, home: Home) -> Int32[np.ndarray, "tp pages"]:
        """Return the ids of a sequence's pages on the ranks of one home (device group).

        The result has the rows of the block table that belong to this home. `pages` is the whole block table.
        """
        return pages.table[self.ranks[home]]

    def live_pages(self) -> Int32[np.ndarray, "rows pages"]:
        """Return the ids of all pages of the lane that running sequences use or that the prefix cache holds.

        The result has a row for each rank and a column for each page. The columns are sorted by the first row.
        """
        tables = [s.pages.table for s in self.running if s.pages is not None] + [self.cache.table()]
        table = np.concatenate(tables, axis=1)
        _, first = np.unique(table[0], return_index=True)
        return table[:, first]

    def num_pages_of(self, sequences: Collection[Sequence]) -> int:
        """Return the number of pages that `sequences` use and that no other running sequence of the lane uses."""
        of = {True: set[int](), False: set[int]()}
        for sequence in self.running if sequences else ():
            if sequence.pages is not None:
                of[sequence in sequences].update(sequence.pages.table[0].tolist())
        return len(of[True] - of[False])


class SharedPages:
    """Pages that other lanes have in the memory of a lane's page pool. Some of these pages can be freed for the pool.

    The prefix cache of the pool uses this object as its `PageLender`. The other lanes belong to the same instance as
    the pool, to another instance on the devices of the pool, or to paused instances.

    If another lane has a lower degree than the pool, a page of the other lane takes the memory of several pages of the
    pool. For example, a page of a TP1 lane takes the memory of four pages of a TP4 pool. All numbers of pages in the
    methods count pages of the pool.

    Args:
        pool: page pool that may need more free pages.
        others: other lanes. Each of these lanes shares allocators with `pool`.
    """

    def __init__(self, pool: PagePool, others: SequenceOf[Lane]):
        self._pool, self.others = pool, others
        own = {allocator: (rank, order) for rank, (allocator, order) in enumerate(pool.ranks)}
        self._ranks = {
            lane: {own[a][0]: 1 << (order - own[a][1]) for a, order in lane.pages.ranks if a in own} for lane in others
        }
        """For each other lane: `{shared rank of the pool: number of pages of the pool in one page of the lane}`."""

    def num_free_pages(self, without: Collection[Sequence] = ()) -> int:
        """Return the number of free pages of the pool, on the rank with the fewest free pages.

        Pages of the other lanes count as free if they can be freed: cached pages that no sequence uses, and pages that
        only sequences in `without` use.
        """
        return min(self._free_by_rank(without))

    def make_free(self, num_pages: int) -> None:
        """Evict cached pages of the lanes in `others` until the page pool `pool` has `num_pages` free pages.

        The lanes in `others` use the memory of the pool. The call also ends if these lanes have no more pages to evict.
        """
        for lane in sorted(self.others, key=lambda lane: -lane.cache.num_evictable_pages):
            free = self._pool.free_by_rank()
            missing = [-(-(num_pages - free[rank]) // count) for rank, count in self._ranks[lane].items()]
            lane.cache.evict(max(0, *missing))

    def holders(self, num_pages: int, without: Collection[Sequence] = ()) -> list[Sequence]:
        """Return the sequences whose preemption can help the pool to get `num_pages` free pages on each rank.

        If a rank has fewer free pages, the result has the sequences of all lanes in `others` that use memory of this
        rank, except sequences in `without`. Pages of `others` count as free if they are evictable, or if only sequences
        in `without` use them (`num_free_pages`).
        """
        free = self._free_by_rank(without)
        short = [lane for lane in self.others if min(free[rank] for rank in self._ranks[lane]) < num_pages]
        return [sequence for lane in short for sequence in lane.running if sequence not in without]

    def victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return sequences of the other lanes to preempt, so that the pool gets `num_pages` free pages.

        Only sequences whose `Sequence.rank` is at least `rank` are chosen: sequences of an equal or lower priority. The
        last in `Sequence.order` is chosen first. Return an empty list if these sequences do not have enough pages, or
        if enough pages can be freed without preemption.
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
