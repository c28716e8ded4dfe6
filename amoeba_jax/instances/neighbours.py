"""Cached pages of lanes that share page allocators."""

from collections.abc import Sequence as SequenceOf

from amoeba_jax.instances.lane import Lane


class NeighbourPages:
    """Pages that the prefix caches of other lanes hold in a lane's allocators (`PageLender`).

    Args:
        lane: lane that needs pages.
        others: lanes with allocators of `lane`: lanes of its instance, or of another instance on its devices.
    """

    def __init__(self, lane: Lane, others: SequenceOf[Lane]):
        self._lane, self._others = lane, others

    def num_free_pages(self) -> int:
        """Return the free pages if the other lanes evicted all prefixes that no sequence uses."""
        free = dict(zip(self._lane.pages.ranks, self._lane.pages.free_by_rank(), strict=True))
        for other in self._others:
            for rank in other.pages.ranks:
                if rank in free:
                    free[rank] += other.cache.num_evictable_pages
        return min(free.values())

    def make_free(self, num_pages: int) -> None:
        """Evict prefixes of the other lanes until `num_pages` pages are free, or no prefix is left."""
        for other in sorted(self._others, key=lambda other: -other.cache.num_evictable_pages):
            if (missing := num_pages - self._lane.pages.num_free_pages) > 0:
                other.cache.evict(missing)
