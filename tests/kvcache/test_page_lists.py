"""Block tables split by extent, against a loop over Python lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.page_lists import split_by_extent
from sharding.errors import LayoutError

# The shape is fixed, so that each tuple of extents compiles once.
BATCH, WIDTH = 3, 7
EXTENT_STARTS = [(0, 12), (0, 5, 12), (0, 1, 6, 12), (0, 3, 4, 9, 12)]


@functools.cache
def compiled(extent_starts):
    return jax.jit(functools.partial(split_by_extent, extent_starts=extent_starts))


def reference(row: list[int], extent_starts: tuple[int, ...], e: int) -> list[tuple[int, int]]:
    """Return (page id in extent `e`, logical position) of the valid entries of one row."""
    start, end = extent_starts[e], extent_starts[e + 1]
    return [(page - start, position) for position, page in enumerate(row) if start <= page < end]


@settings(max_examples=75)
@given(
    extent_starts=st.sampled_from(EXTENT_STARTS),
    table=st.lists(st.lists(st.integers(0, 11), min_size=WIDTH, max_size=WIDTH), min_size=BATCH, max_size=BATCH),
    num_pages=st.lists(st.integers(0, WIDTH), min_size=BATCH, max_size=BATCH),
)
def test_lists_hold_each_extents_pages_in_logical_order(extent_starts, table, num_pages):
    args = jnp.asarray(table, jnp.int32), jnp.asarray(num_pages, jnp.int32)
    lists = compiled(extent_starts)(*args)
    assert len(lists) == len(extent_starts) - 1
    for e, (page_ids, page_positions, count) in enumerate(jax.tree.map(np.asarray, lists)):
        assert page_ids.shape == page_positions.shape == (BATCH, WIDTH)
        assert page_ids.dtype == page_positions.dtype == count.dtype == np.int32
        # Kernels may prefetch padding, so it must be readable too.
        assert np.all((page_ids >= 0) & (page_ids < extent_starts[e + 1] - extent_starts[e]))
        assert np.all((page_positions >= 0) & (page_positions < WIDTH))
        for b in range(BATCH):
            expected = reference(table[b][: num_pages[b]], extent_starts, e)
            assert count[b] == len(expected)
            got = zip(page_ids[b].tolist(), page_positions[b].tolist(), strict=True)
            assert list(got)[: len(expected)] == expected


def test_one_extent_takes_the_table_as_it_is():
    table, num_pages = jnp.arange(6, dtype=jnp.int32).reshape(2, 3), jnp.array([3, 1], jnp.int32)
    (pages,) = split_by_extent(table, num_pages, (0, 6))
    assert pages.page_ids is table
    assert pages.num_pages is num_pages
    np.testing.assert_array_equal(pages.page_positions, [[0, 1, 2]] * 2)
    jaxpr = jax.make_jaxpr(lambda *args: split_by_extent(*args, (0, 6)))(table, num_pages)
    assert "sort" not in str(jaxpr)


def test_several_extents_are_sorted_once():
    args = jnp.zeros((BATCH, WIDTH), jnp.int32), jnp.zeros(BATCH, jnp.int32)
    jaxpr = jax.make_jaxpr(lambda *args: split_by_extent(*args, EXTENT_STARTS[-1]))(*args)
    assert str(jaxpr).count("sort[") == 1


def test_tables_without_pages_give_empty_lists():
    args = jnp.zeros((0, WIDTH), jnp.int32), jnp.zeros(0, jnp.int32)
    assert all(pages.page_ids.shape == (0, WIDTH) for pages in split_by_extent(*args, (0, 4, 8)))


@pytest.mark.parametrize("extent_starts", [(), (0,), (0, 0), (0, 4, 4), (1, 4), (0, 5, 3)])
def test_extents_must_rise_from_zero(extent_starts):
    args = jnp.zeros((BATCH, WIDTH), jnp.int32), jnp.zeros(BATCH, jnp.int32)
    with pytest.raises(LayoutError, match="extent_starts is"):
        split_by_extent(*args, extent_starts)
