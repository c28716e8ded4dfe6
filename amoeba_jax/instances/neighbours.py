"""Cached pages of other lanes that share page allocators with a lane."""

from collections.abc import Sequence as SequenceOf

from amoeba_jax.instances.lane import Lane


class NeighbourPages:
    """Pages in a lane's allocators that the prefix caches of other lanes hold. An implementation of `PageLender`.

    Args:
        lane: lane that needs pages.
        others: lanes that share allocators with `lane`. They belong to the same instance, or to another instance on the
            same devices.
    """

    def __init__(self, lane: Lane, others: SequenceOf[Lane]):
        self._lane, self._others = lane, others

    def num_free_pages(self) -> int:
        """Return the number of free pages of the lane if the other lanes evicted all prefixes that no sequence uses."""
        free = dict(zip(self._lane.pages.ranks, self._lane.pages.free_by_rank(), strict=True))
        for other in self._others:
            for rank in other.pages.ranks:
                if rank in free:
                    free[rank] += other.cache.num_evictable_pages
        return min(free.values())

    def make_free(self, num_pages: int) -> None:
        """Evict prefixes of the other lanes until `num_pages` pages are free, or until no prefix can be evicted."""
        for other in sorted(self._others, key=lambda other: -other.cache.num_evictable_pages):
            if (missing := num_pages - self._lane.pages.num_free_pages) > 0:
                other.cache.evict(missing)
