"""Pages that paused instances keep on the devices of the instance that serves there."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool


class PausedPages:
    """Pages of paused instances, counted in pages of the serving instance. Used by the dispatcher thread only.

    If the serving instance needs pages, paused instances release the pages of cached prefixes (`PageLender`).

    Args:
        pool: pool of the serving instance, over the ranks of all paused ones.
        lanes: lanes of the paused instances, in the order of their devices.
    """

    def __init__(self, pool: PagePool, lanes: SequenceOf[Lane]):
        self._pool, self._lanes = pool, lanes
        self._tp = pool.tp // len(lanes)
        self._per_page = pool.geometry.units_per_page(self._tp) // pool.geometry.units_per_page(pool.tp)

    def num_free_pages(self, without: Collection[Sequence] = ()) -> int:
        """Return the free pages if all cached prefixes, and the paused sequences `without`, released theirs."""
        return min(self._free_by_rank(without))

    def make_free(self, num_pages: int) -> None:
        """Evict as few cached prefixes as needed for `num_pages` free pages, or all."""
        free = self._pool.free_by_rank()
        for index, lane in enumerate(self._lanes):
            missing = num_pages - min(free[rank] for rank in self._ranks(index))
            if missing > 0:
                lane.cache.evict(-(-missing // self._per_page))

    def holders(self, num_pages: int, without: Collection[Sequence] = ()) -> list[Sequence]:
        """Return the sequences of each paused instance that has a rank with fewer than `num_pages` free pages.

        Pages that cached prefixes and the sequences `without` would release count as free (see `num_free_pages`). The
        sequences `without` are not returned.
        """
        free = self._free_by_rank(without)
        return [
            sequence
            for index, lane in enumerate(self._lanes)
            if min(free[rank] for rank in self._ranks(index)) < num_pages
            for sequence in lane.running
            if sequence not in without
        ]

    def victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return the paused sequences to preempt for `num_pages` free pages, the last in order first.

        Only sequences of `rank`, or of a worse rank, are preempted. Empty if these do not suffice.
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
        for index, lane in enumerate(self._lanes):
            pages = lane.cache.num_evictable_pages + _pages_of(lane, without)
            for rank in self._ranks(index):
                free[rank] += pages * self._per_page
        return free

    def _ranks(self, index: int) -> range:
        return range(index * self._tp, (index + 1) * self._tp)


def _pages_of(lane: Lane, sequences: Collection[Sequence]) -> int:
    """Return the number of a lane's pages that only the given sequences use."""
    if not sequences:
        return 0
    mine, others = set[int](), set[int]()
    for sequence in lane.running:
        if sequence.pages is not None:
            (mine if sequence in sequences else others).update(sequence.pages.table[0].tolist())
    return len(mine - others)
