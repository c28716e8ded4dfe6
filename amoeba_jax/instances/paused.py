"""What paused instances keep on the devices of the instance that has taken their place."""

from collections.abc import Collection, Sequence

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence as Continuation
from kvcache.pages import PagePool


class PausedPages:
    """Pages of paused instances, as the pool of the instance over their devices sees them.

    Those that hold cached prefixes are given up for pages of that pool (`PageLender`). Used by the dispatcher thread
    only.

    Args:
        pool: at the higher degree, over the ranks of all of them.
        lanes: of the paused instances, by their first device.
    """

    def __init__(self, pool: PagePool, lanes: Sequence[Lane]):
        self._pool, self._lanes = pool, lanes
        self._tp = pool.tp // len(lanes)
        self._per_page = pool.geometry.units_per_page(self._tp) // pool.geometry.units_per_page(pool.tp)

    def num_free_pages(self, without: Collection[Continuation] = ()) -> int:
        """Pages that would be free if all cached prefixes went, and some paused sequences as well."""
        return min(self._free_by_rank(without))

    def make_free(self, num_pages: int) -> None:
        """Evict as few cached prefixes as needed for that many free pages, or all."""
        free = self._pool.free_by_rank()
        for index, lane in enumerate(self._lanes):
            missing = num_pages - min(free[rank] for rank in self._ranks(index))
            if missing > 0:
                lane.cache.evict(-(-missing // self._per_page))

    def in_the_way(self, num_pages: int, without: Collection[Continuation] = ()) -> list[Continuation]:
        """The paused sequences with pages on ranks that would still have fewer than that many free."""
        free = self._free_by_rank(without)
        return [
            sequence
            for index, lane in enumerate(self._lanes)
            if min(free[rank] for rank in self._ranks(index)) < num_pages
            for sequence in lane.running
            if sequence not in without
        ]

    def yielding(self, num_pages: int, rank: tuple[int, int]) -> list[Continuation]:
        """The paused sequences, of this rank or behind it, that would have to go for that many pages to be free: those
        that are served last first. None where that would not do."""
        going: list[Continuation] = []
        while in_the_way := self.in_the_way(num_pages, going):
            yielding = [s for s in in_the_way if s.rank >= rank]
            if not yielding:
                return []
            going.append(max(yielding, key=lambda s: s.order))
        return going if self.num_free_pages(going) >= num_pages else []

    def _free_by_rank(self, without: Collection[Continuation]) -> list[int]:
        free = self._pool.free_by_rank()
        for index, lane in enumerate(self._lanes):
            pages = lane.cache.num_evictable_pages + _pages_of(lane, without)
            for rank in self._ranks(index):
                free[rank] += pages * self._per_page
        return free

    def _ranks(self, index: int) -> range:
        return range(index * self._tp, (index + 1) * self._tp)


def _pages_of(lane: Lane, sequences: Collection[Continuation]) -> int:
    """Pages that only some of a lane's sequences use."""
    going, staying = set[int](), set[int]()
    for sequence in lane.running if sequences else ():
        if sequence.pages is not None:
            (going if sequence in sequences else staying).update(sequence.pages.table[0].tolist())
    return len(going - staying)
