"""Pages over several ranks: all or nothing, several degrees over the same memory, and block tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cache_cases import forked

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.geometry import PageGeometry
from kvcache.pages import PagePool, SequencePages
from sharding.errors import LayoutError

GEOMETRY = PageGeometry(kv_heads=4, page_size=16, head_dim=8, max_tp=4)


def make_allocators(*extents: tuple[int, ...]) -> list[BuddyAllocator]:
    """Return an allocator for each rank, with extents of these sizes in pages."""
    allocators = [BuddyAllocator(GEOMETRY.max_tp) for _ in extents]
    for allocator, pages in zip(allocators, extents, strict=True):
        for num_pages in pages:
            allocator.add_extent(num_pages)
    return allocators


def state(allocators: list[BuddyAllocator]) -> list[tuple]:
    return [(a.live_blocks(), a.free_units) for a in allocators]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_whole_memory_can_be_allocated_at_every_degree(tp):
    pool = PagePool(GEOMETRY, make_allocators(*[(2, 1)] * tp), tp)
    assert pool.num_total_pages == pool.num_free_pages == 3 * tp
    table = pool.allocate(3 * tp)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, [range(3 * tp)] * tp)
    assert pool.num_free_pages == 0
    pool.free(table)
    assert pool.num_free_pages == 3 * tp


@settings(max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4]),
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    taken=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=4, max_size=4),
    num_pages=st.integers(0, 20),
)
def test_allocation_is_all_or_nothing_on_unbalanced_ranks(tp, sizes, taken, num_pages):
    allocators = make_allocators(*[(size,) for size in sizes[:tp]])
    for allocator, orders in zip(allocators, taken, strict=False):
        for order in orders:
            if allocator.num_free(order):
                allocator.allocate(order)
    pool = PagePool(GEOMETRY, allocators, tp)
    before = state(allocators)
    free = pool.num_free_pages
    assert free == min(allocator.num_free(GEOMETRY.order(tp)) for allocator in allocators)
    if num_pages > free:
        with pytest.raises(OutOfPagesError, match=f"{num_pages} pages do not fit"):
            pool.allocate(num_pages)
    else:
        table = pool.allocate(num_pages)
        assert table.shape == (tp, num_pages)
        assert pool.num_free_pages == free - num_pages
        pool.free(table)
    assert state(allocators) == before


def test_failure_on_the_last_rank_leaves_the_others_as_they_were():
    allocators = make_allocators((4,), (1,))
    pool = PagePool(GEOMETRY, allocators, 2)
    before = state(allocators)
    with pytest.raises(OutOfPagesError, match=r"the ranks have room for \[8, 2\] pages"):
        pool.allocate(3)
    assert state(allocators) == before
    assert pool.num_total_pages == 2


def test_local_ids_of_a_page_differ_between_ranks():
    allocators = make_allocators((2,), (2,))
    PagePool(GEOMETRY, allocators[1:], 1).allocate(1)
    pool = PagePool(GEOMETRY, allocators, 2)
    np.testing.assert_array_equal(pool.allocate(2), [[0, 1], [2, 3]])


def test_paused_pages_of_a_lower_degree_stay():
    allocators = make_allocators(*[(2,)] * 4)
    singles = [PagePool(GEOMETRY, [allocator], 1) for allocator in allocators]
    paused = [single.allocate(1) for single in singles]
    merged = PagePool(GEOMETRY, allocators, 4)
    table = merged.allocate(4)
    np.testing.assert_array_equal(table, [[4, 5, 6, 7]] * 4)
    merged.free(table)
    for single, pages in zip(singles, paused, strict=True):
        single.free(pages)
        assert single.num_free_pages == 2


def test_shared_pages_are_freed_with_their_last_reference():
    pool = PagePool(GEOMETRY, make_allocators((1,), (1,)), 2)
    table = pool.allocate(2)
    pool.share(table[:, :1])
    pool.free(table)
    assert pool.num_free_pages == 1
    pool.free(table[:, :1])
    assert pool.num_free_pages == 2


@pytest.mark.parametrize("method", ["free", "share"])
def test_table_with_a_dead_page_changes_nothing(method):
    allocators = make_allocators((2,), (2,))
    pool = PagePool(GEOMETRY, allocators, 2)
    table = pool.allocate(2)
    pool.free(table[:, 1:])
    before = state(allocators)
    with pytest.raises(ValueError, match="no live block starts at unit 2"):
        getattr(pool, method)(table)
    assert state(allocators) == before


def test_page_of_another_degree_is_refused():
    allocators = make_allocators((2,), (2,))
    PagePool(GEOMETRY, allocators[:1], 1).allocate(1)
    pool = PagePool(GEOMETRY, allocators, 2)
    with pytest.raises(ValueError, match="unit 0 on rank 0 starts a block of 4 units; a page has 2 there"):
        pool.free(np.zeros((2, 1), np.int32))
    with pytest.raises(ValueError, match=r"shape \(1, 1\)"):
        pool.free(np.zeros((1, 1), np.int32))


def test_allocators_must_match_geometry_and_degree():
    allocators = make_allocators((1,), (1,))
    with pytest.raises(LayoutError, match=r"TP1 needs 1 allocators.* 2 were given"):
        PagePool(GEOMETRY, allocators, 1)
    with pytest.raises(LayoutError, match="one a rank"):
        PagePool(GEOMETRY, [allocators[0], allocators[0]], 2)
    with pytest.raises(LayoutError, match="rank 1's allocator splits pages 2 ways"):
        PagePool(GEOMETRY, [allocators[0], BuddyAllocator(2)], 2)


def joined_pool() -> tuple[PagePool, list[BuddyAllocator]]:
    """Return a pool of pages that lie in a TP1 pool of three pages and in a TP2 pool of six."""
    allocators = make_allocators((3,), (3,), (3,))
    return PagePool.joined([PagePool(GEOMETRY, allocators[:1], 1), PagePool(GEOMETRY, allocators[1:], 2)]), allocators


def test_joined_pool_has_a_row_for_each_rank_and_as_many_pages_as_the_fullest():
    pool, allocators = joined_pool()
    assert (pool.tp, pool.num_total_pages, pool.total_by_rank()) == (3, 3, [3, 6, 6])
    table = pool.allocate(2)
    assert table.shape == (3, 2)
    units = [GEOMETRY.units_per_page(1), GEOMETRY.units_per_page(2), GEOMETRY.units_per_page(2)]
    for row, allocator, size in zip(table.tolist(), allocators, units, strict=True):
        assert [block.unit for block in allocator.live_blocks()] == sorted(page * size for page in row)
    assert pool.free_by_rank() == [1, 4, 4]
    with pytest.raises(OutOfPagesError, match=r"room for \[1, 4, 4\]"):
        pool.allocate(2)
    pool.share(table[:, :1])
    assert pool.references(table).tolist() == [2, 1]
    pool.free(table)
    pool.free(table[:, :1])
    assert all(allocator.free_units == allocator.total_units for allocator in allocators)


def test_pools_with_a_common_allocator_are_not_joined():
    allocators = make_allocators((3,), (3,))
    with pytest.raises(LayoutError, match="common allocator"):
        PagePool.joined([PagePool(GEOMETRY, allocators[:1], 1), PagePool(GEOMETRY, allocators, 2)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sequence_grows_page_by_page_and_keeps_its_pages(tp):
    pool = PagePool(GEOMETRY, make_allocators(*[(8,)] * tp), tp)
    sequence = SequencePages(pool)
    assert sequence.table.shape == (tp, 0)
    for tokens in range(1, 100):
        before = sequence.table.copy()
        num_new = sequence.reserve(tokens)
        assert sequence.num_pages == sequence.table.shape[1] == GEOMETRY.pages_for(tokens)
        assert num_new == sequence.num_pages - before.shape[1]
        np.testing.assert_array_equal(sequence.table[:, : before.shape[1]], before)
    assert all(len(set(row)) == sequence.num_pages for row in sequence.table.tolist())
    assert sequence.reserve(5) == 0
    assert pool.num_free_pages == pool.num_total_pages - sequence.num_pages
    sequence.release()
    sequence.release()
    assert sequence.num_pages == 0
    assert pool.num_free_pages == pool.num_total_pages


def test_sequence_that_does_not_fit_keeps_its_table():
    pool = PagePool(GEOMETRY, make_allocators((1,), (1,)), 2)
    sequence = SequencePages(pool)
    sequence.reserve(16)
    with pytest.raises(OutOfPagesError):
        sequence.reserve(16 * 3)
    np.testing.assert_array_equal(sequence.table, [[0], [0]])
    assert pool.num_free_pages == 1


def test_fork_shares_pages_and_grows_on_its_own():
    pool = PagePool(GEOMETRY, make_allocators((2,), (2,)), 2)
    parent = SequencePages(pool)
    parent.reserve(32)
    child = forked(parent)
    np.testing.assert_array_equal(child.table, parent.table)
    child.reserve(48)
    assert (parent.num_pages, child.num_pages, pool.num_free_pages) == (2, 3, 1)
    parent.release()
    assert pool.num_free_pages == 1
    child.release()
    assert pool.num_free_pages == 4


def test_references_are_those_of_the_rank_that_has_most():
    allocators = make_allocators((2,), (2,))
    pool = PagePool(GEOMETRY, allocators, 2)
    table = pool.allocate(3)
    pool.share(table[:, 1:])
    allocators[1].share(2 * GEOMETRY.units_per_page(2))
    assert pool.references(table).tolist() == [1, 2, 3]
    assert pool.references(table[:, :0]).shape == (0,)
    pool.free(table[:, :1])
    with pytest.raises(ValueError, match="no live block starts at unit 0"):
        pool.references(table)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_copy_on_write_ends_the_sharing_of_one_page(tp):
    allocators = make_allocators(*[(8,)] * tp)
    PagePool(GEOMETRY, allocators[-1:], 1).allocate(1)
    pool = PagePool(GEOMETRY, allocators, tp)
    parent = SequencePages(pool)
    parent.reserve(48)
    child = forked(parent)
    before = parent.table.copy()
    assert child.is_shared(1)
    copied = child.copy_on_write(1)
    assert copied is not None
    source, target = copied
    np.testing.assert_array_equal(source, before[:, 1])
    np.testing.assert_array_equal(target, child.table[:, 1])
    assert not (source == target).any()
    np.testing.assert_array_equal(parent.table, before)
    np.testing.assert_array_equal(child.table[:, [0, 2]], before[:, [0, 2]])
    # Neither page is shared any longer, so nothing is copied.
    assert not parent.is_shared(1)
    assert parent.copy_on_write(1) is None
    assert child.copy_on_write(1) is None
    assert pool.references(parent.table).tolist() == pool.references(child.table).tolist() == [2, 1, 2]


def test_copy_on_write_reaches_pages_by_their_index_only():
    pool = PagePool(GEOMETRY, make_allocators((4,)), 1)
    # After growing page by page, the buffer behind the table is longer than the table.
    sequence = SequencePages(pool)
    for tokens in (16, 32, 48):
        sequence.reserve(tokens)
    other = forked(sequence)
    with pytest.raises(IndexError):
        sequence.copy_on_write(3)
    assert sequence.copy_on_write(-1) is not None
    np.testing.assert_array_equal(sequence.table, [[0, 1, 3]])
    np.testing.assert_array_equal(other.table, [[0, 1, 2]])


def test_copy_on_write_without_a_free_page_changes_nothing():
    allocators = make_allocators((1,), (1,))
    pool = PagePool(GEOMETRY, allocators, 2)
    parent = SequencePages(pool)
    parent.reserve(32)
    child = forked(parent)
    before = state(allocators)
    with pytest.raises(OutOfPagesError):
        child.copy_on_write(0)
    assert state(allocators) == before
    np.testing.assert_array_equal(child.table, parent.table)


def test_sequence_takes_over_given_pages():
    pool = PagePool(GEOMETRY, make_allocators((2,), (2,)), 2)
    pages = pool.allocate(3)
    sequence = SequencePages(pool, pages)
    pages[:] = -1
    np.testing.assert_array_equal(sequence.table, [[0, 1, 2]] * 2)
    sequence.release()
    assert pool.num_free_pages == 4


def test_table_view_is_read_only():
    pool = PagePool(GEOMETRY, make_allocators((1,)), 1)
    sequence = SequencePages(pool)
    sequence.reserve(1)
    with pytest.raises(ValueError, match="read-only"):
        sequence.table[0, 0] = 3
