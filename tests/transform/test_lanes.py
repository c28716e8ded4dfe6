"""Assignment of cached prefixes to instances when a group splits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amoeba_jax import SamplingParams
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.sampling.rows import sampling_row
from amoeba_jax.transform.lanes import adopt_prefixes, deal, settle_references
from kvcache.allocator import BuddyAllocator
from kvcache.geometry import PageGeometry
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PageKeys, PrefixCache
from sharding.placement import Home

GEOMETRY = PageGeometry(kv_heads=4, page_size=4, head_dim=2)
HOME = Home(0, 4)


def greedy(pages: SequencePages) -> Sequence:
    """Return a greedy sequence with these pages."""
    params = SamplingParams(temperature=0)
    sequence = Sequence("request", (1,), params, sampling_row(params, 0, 100, ()), lambda _: None)
    sequence.pages = pages
    return sequence


def lane_with(prefixes: list[list[int]], running: list[int], pages: int = 40) -> Lane:
    """Return a TP4 lane with cached prompts and running sequences.

    Prompts are evicted in the order of `prefixes`. Each index in `running` adds a sequence with that prompt's pages.
    """
    allocators = []
    for _ in range(4):
        allocators.append(BuddyAllocator(4))
        allocators[-1].add_extent(pages // 4)
    cache = PrefixCache(PagePool(GEOMETRY, allocators, 4))
    lane = Lane(cache.pool, cache, {HOME: slice(0, 4)}, max_running=16)
    for tokens in prefixes:
        keys = PageKeys(4)
        keys.extend(tokens)
        own = cache.match(keys.keys)
        cache.reserve(own, len(tokens))
        cache.insert(keys.keys, own)
        cache.release(own)
    for index in running:
        keys = PageKeys(4)
        keys.extend(prefixes[index])
        lane.running.append(greedy(cache.match(keys.keys)))
    return lane


def tokens_of(prefix: int, pages: int, shared: int = 0) -> list[int]:
    """Return the tokens of a prompt. All prompts have the same first `shared` pages."""
    return [1] * 4 * shared + [prefix + 2] * 4 * (pages - shared)


def test_what_is_used_goes_with_its_sequence_and_the_rest_where_there_is_room():
    lane = lane_with([tokens_of(i, 3) for i in range(4)], running=[1])
    parts = deal(lane, [10, 10, 10, 10], [16] * 4)
    (home,) = [part for part in parts if part.sequences]
    used = {page.key for page in home.cached} & {page.key for page in lane.cache.pages()[:3]}
    assert len(used) == 3
    assert sorted(len(part.cached) for part in parts) == [3, 3, 3, 3], "spread evenly"


def test_what_finds_no_room_is_dropped_from_its_end():
    lane = lane_with([tokens_of(i, 4) for i in range(3)], running=[])
    (part, other) = deal(lane, [4, 3], [16] * 2)
    assert [len(part.cached), len(other.cached)] == [4, 3]
    latest = lane.cache.pages()[-4:]
    assert {page.key for page in latest} <= {page.key for page in part.cached}, "the last to be evicted is kept whole"


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    shared=st.integers(0, 2),
    room=st.lists(st.integers(0, 12), min_size=2, max_size=4).filter(lambda room: len(room) in (2, 4)),
    running=st.sets(st.integers(0, 5), max_size=2),
)
def test_any_deal_keeps_whole_beginnings_within_the_room_and_every_reference(
    lengths: list[int], shared: int, room: list[int], running: set[int]
):
    prefixes = [tokens_of(i, length, min(shared, length)) for i, length in enumerate(lengths)]
    lane = lane_with(prefixes, [i for i in running if i < len(prefixes)])
    room = [free + sum(lengths) if lane.running else free for free in room]
    before = lane.cache.pages()
    parts = deal(lane, room, [16] * len(room))
    assert sum(len(part.sequences) for part in parts) == len(lane.running)
    for part, free in zip(parts, room, strict=True):
        keys = {page.key for page in part.cached}
        assert all(page.parent is None or page.parent in keys for page in part.cached)
        assert part.num_pages <= free
    settle_references(lane.pages, before, parts)
    allocator_pages = {block.unit: block.references for block in lane.pages._allocators[0].live_blocks()}
    counted: dict[int, int] = {}
    for part in parts:
        for page in part.cached:
            counted[page.column[0]] = counted.get(page.column[0], 0) + 1
        for sequence in part.sequences:
            for page in sequence.pages.table[0].tolist():
                counted[page] = counted.get(page, 0) + 1
    assert allocator_pages == counted


def test_lanes_of_one_home_share_what_both_have_cached():
    lane = lane_with([tokens_of(0, 3)], running=[])
    pages = lane.cache.pages()
    lane.pages.share(lane.cache.table())  # one reference for each of two lanes
    twin = Lane(lane.pages, PrefixCache(lane.pages), lane.ranks, 16)
    twin.cache.adopt(pages)
    merged = Lane(lane.pages, PrefixCache(lane.pages), lane.ranks, 16)
    adopt_prefixes(merged, lane, HOME)
    adopt_prefixes(merged, twin, HOME)
    assert [page.key for page in merged.cache.pages()] == [page.key for page in pages]
    np.testing.assert_array_equal(lane.pages.references(merged.cache.table()), 1)
    assert merged.cache.num_evictable_pages == 3
