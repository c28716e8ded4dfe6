"""Lane: sequences of an instance that travel through the layers together, and the pages of these sequences."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
from jaxtyping import Int32

from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PrefixCache
from sharding.placement import Home


class Lane:
    """Sequences of an instance that travel through the layers together. Used by the dispatcher thread only.

    An instance usually has one lane. During a merge or split, the instance has one lane for each instance of the lower
    degree. With several microbatches (`sharding.placement`), the instance has one lane for each microbatch.

    All pages of a lane come from one pool. Each sequence has a block table, with a column for each page and a row for
    each rank. Each rank has its own id for a page. The rows are for the ranks of all homes (device groups) that compute
    the lane's attention. While layers move to another home, both the old home and the new home have rows.

    Args:
        pages: pool of the lane's pages.
        cache: prefix cache of the pool.
        ranks: rows of the block tables that belong to each home.
        max_running: maximum number of running sequences.

    Attributes:
        running: running sequences of the lane.
        closed: whether no further sequence may start in the lane.
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
        """Return whether a rank that no other lane uses has fewer than `num_pages` free pages.

        `lanes` are all lanes that may have pages on the same devices. This lane may be among them.
        """
        shared = {allocator for lane in lanes if lane is not self for allocator in lane.pages.allocators}
        own = zip(self.pages.free_by_rank(), self.pages.allocators, strict=True)
        return any(free < num_pages for free, allocator in own if allocator not in shared)

    def table(self, pages: SequencePages, home: Home) -> Int32[np.ndarray, "tp pages"]:
        """Return the page ids of a sequence on the ranks of one home (device group).

        These ids are the rows of the sequence's block table that belong to the home.
        """
        return pages.table[self.ranks[home]]

    def live_pages(self) -> Int32[np.ndarray, "rows pages"]:
        """Return the ids of all pages that running sequences or the prefix cache hold.

        The result has a column for each page and a row for each rank. The columns are sorted by the ids on rank 0.
        """
        tables = [s.pages.table for s in self.running if s.pages is not None] + [self.cache.table()]
        table = np.concatenate(tables, axis=1)
        _, first = np.unique(table[0], return_index=True)
        return table[:, first]

    def num_pages_of(self, sequences: Collection[Sequence]) -> int:
        """Return the number of pages that the given sequences use and that no other sequence of the lane uses."""
        of = {True: set[int](), False: set[int]()}
        for sequence in self.running if sequences else ():
            if sequence.pages is not None:
                of[sequence in sequences].update(sequence.pages.table[0].tolist())
        return len(of[True] - of[False])


class SharedPages:
    """Pages of other lanes that are in the memory of a page pool. Some of these pages can be freed for the pool.

    This class implements `PageLender` for the prefix cache of the pool. The other lanes belong to the same instance, to
    another instance on the same devices, or to paused instances.

    A lane may have a lower degree than the pool. A page of the lane then takes the memory of several pages of the pool.
    For example, a page of a TP1 lane takes the memory of four pages of a TP4 pool. All methods count pages of the pool.

    Args:
        pool: page pool that may need more free pages.
        others: lanes that share allocators with `pool`.
    """

    def __init__(self, pool: PagePool, others: SequenceOf[Lane]):
        self._pool, self.others = pool, others
        own = {allocator: (rank, order) for rank, (allocator, order) in enumerate(pool.ranks)}
        self._ranks = {
            lane: {own[a][0]: 1 << (order - own[a][1]) for a, order in lane.pages.ranks if a in own} for lane in others
        }
        """For each lane: its ranks of the pool, and the number of pages of the pool in a page of the lane."""

    def num_free_pages(self, without: Collection[Sequence] = ()) -> int:
        """Return how many pages of the pool are free or could become free. The rank with the smallest number counts.

        Cached pages of the other lanes could become free if no sequence uses them. Pages of the sequences `without`
        could become free too.
        """
        return min(self._free_by_rank(without))

    def make_free(self, num_pages: int) -> None:
        """Evict cached prefixes of the other lanes until `num_pages` pages of the pool are free.

        The call ends earlier if no further prefix can be evicted.
        """
        for lane in sorted(self.others, key=lambda lane: -lane.cache.num_evictable_pages):
            free = self._pool.free_by_rank()
            missing = [-(-(num_pages - free[rank]) // count) for rank, count in self._ranks[lane].items()]
            lane.cache.evict(max(0, *missing))

    def holders(self, num_pages: int, without: Collection[Sequence] = ()) -> list[Sequence]:
        """Return the running sequences of all other lanes that use a rank with fewer than `num_pages` free pages.

        Pages that could become free count as free, as in `num_free_pages`. The sequences in `without` are left out.
        """
        free = self._free_by_rank(without)
        short = [lane for lane in self.others if min(free[rank] for rank in self._ranks[lane]) < num_pages]
        return [sequence for lane in short for sequence in lane.running if sequence not in without]

    def victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return the sequences of other lanes that must be preempted to make `num_pages` pages of the pool free.

        Only sequences whose sort key `Sequence.rank` is at least `rank` are chosen, the last in `Sequence.order` first.
        The result is empty if they do not suffice, or if enough pages can become free without preemption.
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
