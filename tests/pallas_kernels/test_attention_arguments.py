"""Invalid arguments are refused before anything is launched, with the reason in the message."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.paged_attention import PageTable, paged_attention

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """Switch off jaxtyping's checks, which raise other errors and are only on in tests."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def arguments(**changes) -> dict:
    """Return valid arguments, with some replaced."""
    good = {
        "queries": jnp.zeros((2, 3, 4, 8)),
        "extents": [jnp.zeros((5, 2, 2, 4, 8))] * 2,
        "tables": [PageTable(jnp.zeros((2, 6), jnp.int32), jnp.zeros((2, 6), jnp.int32), jnp.zeros(2, jnp.int32))] * 2,
        "query_positions": jnp.zeros((2, 3), jnp.int32),
    }
    return good | changes


FP8 = jnp.float8_e4m3fn


def table(ids: tuple[int, ...], places: tuple[int, ...], counts: tuple[int, ...], dtype=jnp.int32) -> list[PageTable]:
    return [PageTable(*(jnp.zeros(shape, dtype) for shape in (ids, places, counts)))] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extents": [], "tables": []}, "at least one"),
        ({"extents": [jnp.zeros((5, 2, 2, 4, 8))]}, "1 extents and 2 page tables"),
        ({"query_positions": jnp.zeros((3, 2), jnp.int32)}, "query_positions"),
        ({"extents": [jnp.zeros((5, 2, 2, 4, 16))] * 2}, "head size"),
        ({"extents": [jnp.zeros((5, 2, 3, 4, 8))] * 2}, "does not fit queries"),
        ({"extents": [jnp.zeros((5, 2, 2, 4, 8), jnp.bfloat16)] * 2}, "same dtype"),
        ({"extents": [jnp.zeros((5, 3, 2, 4, 8))] * 2}, "4 query heads cannot be grouped over 3 KV heads"),
        ({"extents": [jnp.zeros((5, 2, 2, 4, 8)), jnp.zeros((5, 4, 2, 4, 8))]}, "2 and 4 KV heads"),
        ({"extents": [jnp.zeros((5, 2, 2, 6, 8))] * 2}, "page size 6 must be a power of two"),
        ({"tables": table((3, 6), (3, 6), (3,))}, "page table"),
        ({"tables": table((2, 6), (2, 5), (2,))}, "page table"),
        ({"tables": table((2, 6), (2, 6), (1,))}, "page table"),
        ({"tables": table((2, 0), (2, 0), (2,))}, "page table"),
        ({"implementation": "fastest"}, "implementation='fastest' must be one of"),
        ({"queries": jnp.zeros((2, 3, 4, 8), jnp.int32)}, "queries int32"),
        ({"extents": [jnp.zeros((5, 2, 2, 4, 8)), jnp.zeros((5, 2, 2, 4, 8), FP8)]}, "same dtype"),
        ({"extents": [jnp.zeros((5, 2, 2, 4, 8)), jnp.zeros((5, 2, 2, 8, 8))]}, "4 and 8 tokens a page"),
        ({"extents": [jnp.zeros((5, 64))] * 2}, "does not fit queries"),
        ({"extents": [jnp.zeros((0, 2, 2, 4, 8))] * 2}, "does not fit queries"),
        ({"tables": table((2, 6), (2, 6), (2,), jnp.uint32)}, "must be int32"),
        ({"query_positions": jnp.zeros((2, 3), jnp.int16)}, "query_positions int16"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
        ({"sinks": jnp.zeros(3)}, "sinks \\(3,\\) must be"),
        ({"kv_scales": jnp.zeros((2, 4))}, "kv_scales \\(2, 4\\) must be"),
        ({"stride_order": (0, 1, 2, 4, 3)}, "stride_order=\\(0, 1, 2, 4, 3\\) is not supported"),
        ({"implementation": "mosaic_gpu"}, "cannot compute this: queries are float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_launch(without_shape_checks, changes, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments(**changes), scale=1.0)


@pytest.mark.first_by_default
@pytest.mark.parametrize("implementation", ["auto", "xla", "reference"])
def test_arguments_that_fit_are_taken(implementation):
    call = jax.jit(partial(paged_attention, scale=1.0, implementation=implementation))
    assert call(**arguments()).shape == (2, 3, 4, 8)


def half(head_dim: int = 64, page_size: int = 16, extents: int = 1, dtype=jnp.bfloat16) -> dict:
    """Return arguments that the GPU kernel supports, with some sizes changed."""
    table = PageTable(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))
    return {
        "queries": jnp.zeros((1, 1, 2, head_dim), dtype),
        "extents": [jnp.zeros((3, 1, 2, page_size, head_dim), dtype)] * extents,
        "tables": [table] * extents,
        "query_positions": jnp.zeros((1, 1), jnp.int32),
    }


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 72}, "head size 72"),
        ({"page_size": 4}, "page size 4"),
        ({"page_size": 512}, "page size 512"),
        ({"extents": 17}, "17 extents"),
        ({"dtype": jnp.float32}, "queries are float32"),
    ],
)
def test_gpu_kernel_says_what_it_cannot_compute_and_auto_does_without_it(changes, reason):
    with pytest.raises(ValueError, match=reason):
        paged_attention(**half(**changes), scale=1.0, implementation="mosaic_gpu")
    arguments = half(**changes)
    assert jax.jit(partial(paged_attention, scale=1.0))(**arguments).shape == arguments["queries"].shape


# --- contents of tables ---------------------------------------------------------------------------------------


def tables_with(row: int, entry: int, field: str, value: int) -> list[PageTable]:
    """Return two tables of two sequences, with one entry of the first table replaced."""
    ids = np.array([[1, 4, 2], [0, 3, 0]], np.int32)
    places = np.array([[0, 2, 4], [0, 1, 0]], np.int32)
    counts = np.array([3, 2], np.int32)
    second = PageTable(jnp.array([[2, 1, 0], [4, 0, 0]]), jnp.array([[1, 3, 0], [2, 0, 0]]), jnp.array([2, 1]))
    changed = {"page_ids": ids, "page_positions": places, "num_pages": counts}
    if field == "num_pages":
        counts[row] = value
    else:
        changed[field][row, entry] = value
    return [PageTable(*map(jnp.asarray, (ids, places, counts))), second]


BAD_TABLES = [
    ((0, 1, "page_ids", 5), "extent 0, sequence 0: page 5 is out of range: the extent has 5 pages"),
    ((1, 0, "page_ids", -1), "extent 0, sequence 1: page -1 is out of range"),
    ((0, 2, "page_positions", 3), "extent 1, sequence 0: page position 3 is given twice"),
    ((0, 0, "page_positions", -2), "extent 0, sequence 0: page position -2 is negative"),
    ((0, 0, "num_pages", 4), "extent 0, sequence 0: 4 pages in a table that is 3 wide"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TABLES)
def test_debug_mode_finds_bad_tables(change, message):
    call = arguments(tables=tables_with(*change))
    with pytest.raises(ValueError, match=message):
        paged_attention(**call, scale=1.0, debug=True)

    def traced(call: dict) -> jax.Array:
        return paged_attention(**call, scale=1.0, debug=True)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(traced)(call))


@pytest.mark.slow
def test_debug_mode_finds_a_negative_position_and_takes_padding():
    good = tables_with(1, 2, "page_ids", 99)  # behind the used entries
    call = arguments(tables=good)
    with pytest.raises(ValueError, match="query position -2 is negative"):
        paged_attention(**call | {"query_positions": jnp.full((2, 3), -2, jnp.int32)}, scale=1.0, debug=True)
    call["query_positions"] = jnp.array([[-1, 3, 4], [-1, -1, -1]], jnp.int32)
    plain = paged_attention(**call, scale=1.0)
    np.testing.assert_array_equal(plain, paged_attention(**call, scale=1.0, debug=True))
    np.testing.assert_array_equal(plain, jax.jit(lambda c: paged_attention(**c, scale=1.0, debug=True))(call))
