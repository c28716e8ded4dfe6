"""Prefix cache, one operation or property at a time. `test_prefix_cache_model.py` tests all together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cache_cases import SIZE, admit, forked, keys_of, make_cache, state

from kvcache.allocator import OutOfPagesError
from kvcache.pages import SequencePages
from kvcache.prefix_cache import PageKeys


@settings(max_examples=100)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]), tokens=st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_keys_are_those_of_the_full_pages_however_the_tokens_come(data, page_size, tokens):
    whole, pieces = PageKeys(page_size, "a"), PageKeys(page_size, "a")
    whole.extend(tokens)
    while pieces.num_tokens < len(tokens):
        pieces.extend(tokens[pieces.num_tokens :][: data.draw(st.integers(1, 5))])
    assert pieces.keys == whole.keys
    assert len(set(whole.keys)) == len(whole.keys) == len(tokens) // page_size
    assert {len(key) for key in whole.keys} <= {16}


@settings(max_examples=100)
@given(a=st.lists(st.integers(0, 1), max_size=12), b=st.lists(st.integers(0, 1), max_size=12))
def test_keys_are_common_as_far_as_all_tokens_before_are(a, b):
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    keys_a, keys_b = keys_of(tuple(a)), keys_of(tuple(b))
    assert [x == y for x, y in zip(keys_a, keys_b, strict=False)] == [
        (i + 1) * SIZE <= common for i in range(min(len(keys_a), len(keys_b)))
    ]
    assert set(keys_a).isdisjoint(keys_of(tuple(b), "tenant"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_prefix_is_shared_on_all_ranks(tp):
    cache = make_cache(8, tp)
    first = admit(cache, range(6))
    second = cache.match(keys_of((0, 1, 2, 3, 9, 9)))
    np.testing.assert_array_equal(second.table, first.table[:, :2])
    assert tp == 1 or (first.table[0] != first.table[-1]).any()
    cache.release(first)
    assert (cache.num_evictable_pages, cache.num_available_pages) == (1, 6)
    cache.release(second)
    assert (cache.num_evictable_pages, cache.num_available_pages, cache.pool.num_free_pages) == (3, 8, 5)


def test_oldest_sequences_go_first_and_of_each_its_end():
    cache = make_cache(8)
    a, b = admit(cache, range(0, 6)), admit(cache, range(10, 14))
    cache.release(a)
    cache.release(b)
    cache.release(cache.match(keys_of(range(0, 2))))  # the first page of `a` is in use again
    left = []
    while cache.evict(1):
        left.append((cache.num_cached(keys_of(range(0, 6))), cache.num_cached(keys_of(range(10, 14)))))
    assert left == [(2, 2), (1, 2), (1, 1), (1, 0), (0, 0)]
    assert cache.num_cached_pages == 0


def test_tenants_share_nothing():
    cache = make_cache(8)
    cache.release(admit(cache, range(4), "a"))
    assert [cache.num_cached(keys_of(range(4), salt)) for salt in ("a", "b", "", "A", "a ")] == [2, 0, 0, 0, 0]
    admit(cache, range(4), "b")
    assert cache.num_cached_pages == 4


def test_page_computed_twice_is_cached_once():
    cache = make_cache(6)
    keys = keys_of(range(4))
    a, b = cache.match(keys), cache.match(keys)
    for pages in (a, b):
        cache.reserve(pages, 4)
        cache.insert(keys, pages)
    assert cache.num_cached_pages == 2
    first = a.table.copy()
    cache.release(a)
    # The other sequence owns the duplicates. They are cached after the first ones are evicted.
    np.testing.assert_array_equal(cache.match(keys).table, first)
    cache.clear()
    assert cache.num_cached(keys) == 0
    cache.insert(keys, b)
    np.testing.assert_array_equal(cache.match(keys).table, b.table)


def test_released_duplicates_are_free_at_once():
    cache = make_cache(6)
    keys = keys_of(range(4))
    admit(cache, range(4))
    pages = SequencePages(cache.pool)
    cache.reserve(pages, 4)
    cache.insert(keys, pages)
    assert cache.pool.num_free_pages == 2
    cache.release(pages)
    assert (cache.pool.num_free_pages, cache.num_evictable_pages) == (4, 0)


def test_matched_pages_are_no_room_for_the_rest():
    cache = make_cache(4)
    cache.release(admit(cache, range(6)))
    keys = keys_of(range(6))
    assert cache.num_available_pages == 4
    assert cache.fits(keys, 8)
    assert not cache.fits(keys, 10)
    assert cache.fits(keys[:1], 8)
    pages = cache.match(keys)
    assert cache.num_available_pages == 1
    assert cache.reserve(pages, 8) == 1
    assert cache.num_cached_pages == 3


def test_pages_of_running_sequences_are_never_evicted():
    cache = make_cache(4)
    running = admit(cache, range(4))
    cache.release(admit(cache, range(10, 14)))
    assert cache.evict(4) == 2
    assert cache.num_cached(keys_of(range(4))) == 2
    assert cache.pool.references(running.table).tolist() == [2, 2]
    cache.clear()
    assert cache.num_cached_pages == 0
    cache.release(running)
    assert cache.pool.num_free_pages == 4


def test_cached_page_is_copied_before_it_is_written():
    cache = make_cache(3, tp=2)
    pages = admit(cache, range(4))
    before = pages.table.copy()
    copied = cache.make_private(pages, 1)
    assert copied is not None
    np.testing.assert_array_equal(np.stack(copied, axis=1), np.stack([before[:, 1], pages.table[:, 1]], axis=1))
    assert cache.make_private(pages, 1) is None
    # The cached page can still be found. The next copy evicts it.
    assert cache.num_cached(keys_of(range(4))) == 2
    copied = cache.make_private(pages, 0)
    assert copied is not None
    np.testing.assert_array_equal(copied[1], before[:, 1])
    assert (cache.num_cached(keys_of(range(4))), cache.num_cached_pages) == (1, 1)


def test_forgotten_pages_are_not_found_and_free_unless_in_use():
    cache = make_cache(8)
    used, done = admit(cache, range(6)), admit(cache, range(10, 16))
    cache.release(done)
    free = cache.pool.num_free_pages
    cache.forget([*keys_of(range(6)), *keys_of(range(10, 14)), *keys_of(range(50, 54))])
    assert cache.num_cached(keys_of(range(6))) == cache.num_cached(keys_of(range(10, 16))) == 0
    assert cache.pool.num_free_pages == free + 2
    assert cache.num_evictable_pages == 1, "the end of a prefix that is forgotten"
    cache.release(used)
    cache.evict(1)
    assert cache.pool.num_free_pages == 8


def test_asking_changes_nothing():
    cache = make_cache(8)
    cache.release(admit(cache, range(6)))
    keys, before = keys_of((0, 1, 2, 3, 9, 9, 9, 9)), state(cache)
    assert cache.num_cached(keys) == 2
    assert cache.fits(keys, 8)
    assert state(cache) == before
    assert cache.match(keys).num_pages == 2


def test_disabled_cache_passes_through():
    cache = make_cache(4, enabled=False)
    pages = admit(cache, range(6))
    assert cache.num_cached(keys_of(range(6))) == cache.num_cached_pages == 0
    assert cache.match(keys_of(range(6))).num_pages == 0
    child = forked(pages)
    assert cache.make_private(child, 2) is not None
    with pytest.raises(OutOfPagesError, match="0 are free and 0 of 0 cached"):
        cache.reserve(child, 8)
    cache.release(pages)
    cache.release(child)
    assert cache.num_available_pages == cache.pool.num_free_pages == 4


def test_bad_arguments_change_nothing():
    cache = make_cache(6)
    pages = admit(cache, range(4))
    with pytest.raises(ValueError, match="3 keys for a sequence of 2 pages"):
        cache.insert(keys_of(range(6)), pages)
    # The second page of this sequence is cached for other tokens, so its first page is not cached either.
    other = SequencePages(cache.pool, np.concatenate([cache.pool.allocate(1), pages.table[:, 1:]], axis=1))
    before = state(cache)
    with pytest.raises(ValueError, match=r"page 1 of the sequence \(ids \[2\]\) is cached for other tokens"):
        cache.insert(keys_of(range(20, 24)), other)
    with pytest.raises(ValueError, match="num_pages is -1"):
        cache.evict(-1)
    with pytest.raises(IndexError):
        cache.make_private(pages, 2)
    assert state(cache) == before
