"""Small prefix caches, and sequences in them."""

from kvcache.allocator import BuddyAllocator
from kvcache.geometry import PageGeometry
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PageKeys, PrefixCache

SIZE = 2  # tokens in a page
GEOMETRY = PageGeometry(kv_heads=4, page_size=SIZE, head_dim=8, max_tp=4)


def make_cache(num_pages: int, tp: int = 1, enabled: bool = True) -> PrefixCache:
    """Return a cache with `num_pages` pages, whose ids differ between ranks. Only the last rank has no spare pages."""
    allocators = [BuddyAllocator(GEOMETRY.max_tp) for _ in range(tp)]
    for rank, allocator in enumerate(allocators):
        allocator.add_extent(num_pages + tp)
        spare = tp - 1 - rank
        allocator.allocate_many(GEOMETRY.order(tp), (num_pages + tp) * tp - num_pages - spare)
    cache = PrefixCache(PagePool(GEOMETRY, allocators, tp), enabled)
    assert cache.pool.num_free_pages == num_pages
    return cache


def forked(pages: SequencePages) -> SequencePages:
    """Return a sequence that shares all pages of another."""
    pages.pool.share(pages.table)
    return SequencePages(pages.pool, pages.table)


def keys_of(tokens: tuple[int, ...] | range, salt: str = "") -> list[bytes]:
    keys = PageKeys(SIZE, salt)
    keys.extend(tokens)
    return keys.keys


def admit(cache: PrefixCache, tokens: range, salt: str = "") -> SequencePages:
    """Return a sequence of these tokens, computed and cached."""
    keys = keys_of(tokens, salt)
    pages = cache.match(keys)
    cache.reserve(pages, len(tokens))
    cache.insert(keys, pages)
    return pages


def state(cache: PrefixCache) -> tuple:
    blocks = [allocator.live_blocks() for allocator in cache.pool._allocators]
    return blocks, list(cache._evictable), dict(cache._columns)
