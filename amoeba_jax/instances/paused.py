"""Pages of paused instances, on devices where another instance serves."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from kvcache.pages import PagePool


class PausedPages:
    """Pages of paused instances, counted in pages of the instance that serves on their devices.

    If the serving instance needs pages, the paused instances release pages of cached prefixes (`PageLender`). Used by
    the dispatcher thread only.

    Args:
        pool: page pool of the serving instance. It has the ranks of all paused instances.
        lanes: lanes of the paused instances, in the order of their devices.
    """

    def __init__(self, pool: PagePool, lanes: SequenceOf[Lane]):
        self._pool, self._lanes = pool, lanes
        self._tp = pool.tp // len(lanes)
        self._per_page = pool.geometry.units_per_page(self._tp) // pool.geometry.units_per_page(pool.tp)

    def num_free_pages(self, without: Collection[Sequence] = ()) -> int:
        """Return the number of free pages after a release of all cached prefixes and the sequences `without`."""
        return min(self._free_by_rank(without))

    def make_free(self, num_pages: int) -> None:
        """Evict cached prefixes of paused instances until `num_pages` pages are free, or until none can be evicted."""
        free = self._pool.free_by_rank()
        for index, lane in enumerate(self._lanes):
            missing = num_pages - min(free[rank] for rank in self._ranks(index))
            if missing > 0:
                lane.cache.evict(-(-missing // self._per_page))

    def holders(self, num_pages: int, without: Collection[Sequence] = ()) -> list[Sequence]:
        """Return the paused sequences on ranks with fewer than `num_pages` free pages, except the sequences `without`.

        Pages count as free if they would be released with the cached prefixes or the sequences `without`
        (`num_free_pages`). If one rank of a paused instance has too few free pages, all sequences of the instance are
        returned.
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
        """Return the paused sequences to preempt so that `num_pages` pages become free. The last in order comes first.

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
        for index, lane in enumerate(self._lanes):
            pages = lane.cache.num_evictable_pages + _pages_of(lane, without)
            for rank in self._ranks(index):
                free[rank] += pages * self._per_page
        return free

    def _ranks(self, index: int) -> range:
        return range(index * self._tp, (index + 1) * self._tp)


def _pages_of(lane: Lane, sequences: Collection[Sequence]) -> int:
    """Return the number of pages of a lane that no sequence but the given sequences uses."""
    if not sequences:
        return 0
    mine, others = set[int](), set[int]()
    for sequence in lane.running:
        if sequence.pages is not None:
            (mine if sequence in sequences else others).update(sequence.pages.table[0].tolist())
    return len(mine - others)
