"""The three memory orders against NumPy indexing and strides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcache.geometry import PageGeometry
from kvcache.stride_order import KVLayout, contiguous_runs, logical_view, physical_shape, stride_order

BLOCKS, HEADS, TOKENS, DIM = 3, 4, 8, 5
SIZES = {"blocks": BLOCKS, "heads": HEADS, "tokens": TOKENS, "dim": DIM}
# Written out by hand, independent of the table in the module: how (b, h, kv, t) is looked up in memory.
PHYSICAL_INDEX = {
    KVLayout.RAW: lambda b, h, kv, t: (kv, b, t, h),
    KVLayout.PAGE_FRIENDLY: lambda b, h, kv, t: (b, kv, t, h),
    KVLayout.HEADER_CENTRIC: lambda b, h, kv, t: (b, h, kv, t),
}

all_layouts = pytest.mark.parametrize("layout", list(KVLayout))


def pool(layout: KVLayout, **sizes: int) -> np.ndarray:
    """A pool whose elements are their own offsets in memory."""
    shape = physical_shape(layout, **sizes)
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


@all_layouts
def test_logical_view_reads_each_layout_alike(layout):
    physical = pool(layout, **SIZES)
    view = logical_view(physical, layout)
    assert view.shape == (BLOCKS, HEADS, 2, TOKENS, DIM)
    assert np.shares_memory(view, physical)
    for index in np.ndindex(BLOCKS, HEADS, 2, TOKENS):
        np.testing.assert_array_equal(view[index], physical[PHYSICAL_INDEX[layout](*index)])


@all_layouts
def test_stride_order_permutes_strides_to_logical_order(layout):
    physical = pool(layout, **SIZES)
    strides = tuple(physical.strides[axis] for axis in stride_order(layout))
    assert logical_view(physical, layout).strides == strides


def test_header_centric_is_already_logical():
    assert stride_order(KVLayout.HEADER_CENTRIC) == (0, 1, 2, 3, 4)
    assert physical_shape(KVLayout.HEADER_CENTRIC, **SIZES) == (BLOCKS, HEADS, 2, TOKENS, DIM)


@all_layouts
def test_logical_view_is_the_same_in_jax(layout):
    physical = pool(layout, **SIZES)
    view = jax.jit(logical_view, static_argnums=1)(jnp.asarray(physical), layout)
    np.testing.assert_array_equal(np.asarray(view), logical_view(physical, layout))


@all_layouts
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_contiguous_runs_are_what_memory_shows(layout, tp):
    geometry = PageGeometry(kv_heads=HEADS, page_size=TOKENS, head_dim=DIM, max_tp=4)
    page = logical_view(pool(layout, **SIZES), layout)[1]
    heads = HEADS // tp
    for rank in range(tp):
        offsets = np.sort(page[rank * heads : (rank + 1) * heads], axis=None)
        assert 1 + np.count_nonzero(np.diff(offsets) != 1) == contiguous_runs(layout, geometry, tp)


def test_only_header_centric_splits_a_page_without_copies():
    geometry = PageGeometry(kv_heads=8, page_size=16, head_dim=64, max_tp=4)
    runs = {layout: contiguous_runs(layout, geometry, 4) for layout in KVLayout}
    assert runs == {KVLayout.RAW: 32, KVLayout.PAGE_FRIENDLY: 32, KVLayout.HEADER_CENTRIC: 1}


def test_splitting_header_centric_pages_is_a_reshape():
    geometry = PageGeometry(kv_heads=HEADS, page_size=TOKENS, head_dim=DIM, max_tp=4)
    extent = pool(KVLayout.HEADER_CENTRIC, **SIZES).reshape(BLOCKS, geometry.page_elems)
    whole = extent.reshape(BLOCKS, *geometry.sub_page_shape(1))
    for tp in (2, 4):
        heads = HEADS // tp
        sub_pages = extent.reshape(BLOCKS * geometry.sub_pages(tp), *geometry.sub_page_shape(tp))
        assert np.shares_memory(sub_pages, extent)
        for page, rank in np.ndindex(BLOCKS, tp):
            expected = whole[page, rank * heads : (rank + 1) * heads]
            np.testing.assert_array_equal(sub_pages[page * tp + rank], expected)
