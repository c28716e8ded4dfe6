"""Page sizes at each tensor-parallel degree, and geometries that cannot exist."""

import math

import numpy as np
import pytest

from kvcache.geometry import PageGeometry
from sharding.errors import LayoutError

GEOMETRY = PageGeometry(kv_heads=8, page_size=16, head_dim=64, max_tp=4)


@pytest.mark.parametrize(
    ("tp", "shape", "units", "order"),
    [(1, (8, 2, 16, 64), 4, 2), (2, (4, 2, 16, 64), 2, 1), (4, (2, 2, 16, 64), 1, 0)],
)
def test_sub_pages_divide_a_page(tp, shape, units, order):
    assert GEOMETRY.sub_page_shape(tp) == shape
    assert GEOMETRY.units_per_page(tp) == units
    assert GEOMETRY.order(tp) == order
    assert math.prod(shape) * GEOMETRY.sub_pages(tp) == GEOMETRY.page_elems == 8 * 2 * 16 * 64


def test_splitting_pages_is_a_reshape():
    geometry = PageGeometry(kv_heads=4, page_size=8, head_dim=5, max_tp=4)
    extent = np.arange(3 * geometry.page_elems).reshape(3, geometry.page_elems)
    whole = extent.reshape(3, *geometry.sub_page_shape(1))
    for tp in (2, 4):
        heads = 4 // tp
        sub_pages = extent.reshape(3 * geometry.sub_pages(tp), *geometry.sub_page_shape(tp))
        assert np.shares_memory(sub_pages, extent)
        for page, rank in np.ndindex(3, tp):
            np.testing.assert_array_equal(sub_pages[page * tp + rank], whole[page, rank * heads : (rank + 1) * heads])


def test_units_are_sub_pages_of_the_largest_degree():
    geometry = PageGeometry(kv_heads=2, page_size=1, head_dim=8, max_tp=2)
    assert (geometry.units_per_page(1), geometry.order(1)) == (2, 1)
    assert (geometry.units_per_page(2), geometry.order(2)) == (1, 0)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_pages_for_rounds_up(tokens, pages):
    assert GEOMETRY.pages_for(tokens) == pages


def test_pages_for_rejects_negative_tokens():
    with pytest.raises(ValueError, match="num_tokens is -1"):
        GEOMETRY.pages_for(-1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_heads": 6}, r"kv_heads is 6.*multiple of max_tp \(4\)"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"page_size": 12}, "page_size is 12.*power of two"),
        ({"page_size": 0}, "page_size is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"max_tp": 3}, "max_tp is 3.*power of two"),
        ({"max_tp": 0}, "max_tp is 0"),
    ],
)
def test_impossible_geometry_is_refused(changed, message):
    with pytest.raises(LayoutError, match=message):
        PageGeometry(**{"kv_heads": 8, "page_size": 16, "head_dim": 64, "max_tp": 4, **changed})


@pytest.mark.parametrize(("tp", "max_tp"), [(0, 4), (3, 4), (8, 4), (4, 2)])
@pytest.mark.parametrize("method", ["sub_pages", "sub_page_shape", "units_per_page", "order"])
def test_impossible_degree_is_refused(method, tp, max_tp):
    geometry = PageGeometry(kv_heads=8, page_size=16, head_dim=64, max_tp=max_tp)
    with pytest.raises(LayoutError, match=f"TP degree is {tp}.*max_tp \\({max_tp}\\)"):
        getattr(geometry, method)(tp)
