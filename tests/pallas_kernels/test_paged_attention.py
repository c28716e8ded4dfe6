"""Paged attention against contiguous attention in float64 NumPy, with NaN wherever nothing may be read."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import PageTable, paged_attention

IMPLEMENTATIONS = ("xla", "reference")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Shape:
    """`T` query tokens of each of `B` sequences over `extents` extents; tables `width` pages wide."""

    B: int
    T: int
    K: int
    G: int
    h: int
    page_size: int
    width: int
    extents: int
    window: int | None
    dtype: str


# Each shape compiles once: awkward head counts and sizes, one extent and several, one block and many.
SHAPES = (
    Shape(B=1, T=1, K=1, G=1, h=2, page_size=1, width=5, extents=1, window=None, dtype="float32"),
    Shape(B=5, T=1, K=2, G=3, h=8, page_size=4, width=7, extents=3, window=None, dtype="float32"),
    Shape(B=3, T=1, K=1, G=4, h=16, page_size=16, width=20, extents=2, window=None, dtype="float32"),
    Shape(B=2, T=5, K=3, G=1, h=6, page_size=2, width=11, extents=4, window=None, dtype="float32"),
    Shape(B=2, T=9, K=1, G=2, h=4, page_size=8, width=25, extents=1, window=6, dtype="float32"),
    Shape(B=4, T=1, K=4, G=2, h=8, page_size=4, width=9, extents=2, window=1, dtype="float32"),
    Shape(B=1, T=16, K=2, G=7, h=4, page_size=128, width=3, extents=2, window=100, dtype="float32"),
    Shape(B=3, T=1, K=2, G=2, h=16, page_size=8, width=12, extents=2, window=None, dtype="bfloat16"),
    Shape(B=2, T=6, K=1, G=3, h=8, page_size=4, width=10, extents=3, window=9, dtype="bfloat16"),
)


@dataclass
class Case:
    """Arguments of one call, and what it must return."""

    queries: jax.Array
    extents: list[jax.Array]
    tables: list[PageTable]
    positions: jax.Array
    expected: np.ndarray


def dense_attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, window: int | None
) -> np.ndarray:
    """One sequence in float64: `[T, H, h]` queries over `[tokens, K, h]` keys and values, head by head."""
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for t, position in enumerate(positions):
        if position < 0:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            scores = keys[first : position + 1, head // group] @ queries[t, head] / np.sqrt(queries.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ values[first : position + 1, head // group] / weights.sum()
    return out


def query_positions(random: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Up to `count` of the positions below `length`, in order, at random places among padding."""
    out = np.full(count, -1, np.int32)
    used = random.integers(0, min(length, count) + 1) if random.random() < 0.3 else min(length, count)
    chosen = np.arange(length - used, length) if random.random() < 0.7 else random.choice(length, used, replace=False)
    places = np.arange(used) if random.random() < 0.5 else random.choice(count, used, replace=False)
    out[np.sort(places)] = np.sort(chosen)
    return out


def make_case(shape: Shape, lengths: list[int], seed: int) -> Case:
    """Random contents in random pages. What no query may see is NaN: pages, slots, keys out of windows."""
    random = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    s, heads = shape.page_size, shape.K * shape.G
    pages = shape.B * shape.width + 3  # of each extent, so that any spread over the extents fits
    pool = np.full((shape.extents, pages, shape.K, 2, s, shape.h), np.nan, np.float32)
    free = [list(random.permutation(pages)) for _ in range(shape.extents)]
    # What no table uses lies in pages of their own, which padding entries of tables point to.
    spare = np.array([ids.pop() for ids in free])
    ids = np.broadcast_to(spare[:, None, None], (shape.extents, shape.B, shape.width)).astype(np.int32)
    places = random.integers(0, shape.width, ids.shape).astype(np.int32)
    counts = np.zeros((shape.extents, shape.B), np.int32)
    queries = random.standard_normal((shape.B, shape.T, heads, shape.h)).astype(dtype)
    positions = np.stack([query_positions(random, length, shape.T) for length in lengths])
    expected = np.zeros(queries.shape)
    for b, length in enumerate(lengths):
        kv = random.standard_normal((2, length, shape.K, shape.h)).astype(dtype)
        exact = kv.astype(np.float64)
        expected[b] = dense_attention(queries[b].astype(np.float64), *exact, positions[b], shape.window)
        live = positions[b][positions[b] >= 0]
        for token in range(length):
            page, slot = divmod(token, s)
            if slot == 0:
                extent = int(random.integers(shape.extents))
                page_id, place = free[extent].pop(), counts[extent, b]
                ids[extent, b, place], places[extent, b, place] = page_id, page
                counts[extent, b] += 1
            seen = (live >= token) & (True if shape.window is None else live - token < shape.window)
            if seen.any():
                pool[extent, page_id, :, :, slot] = kv[:, token].astype(np.float32).swapaxes(0, 1)
    tables = [PageTable(*map(jnp.asarray, table)) for table in zip(ids, places, counts, strict=True)]
    extents = [jnp.asarray(extent, dtype) for extent in pool]
    return Case(jnp.asarray(queries), extents, tables, jnp.asarray(positions), expected)


@cache
def compiled(implementation: str, window: int | None, head_dim: int):
    return jax.jit(partial(paged_attention, scale=head_dim**-0.5, sliding_window=window, implementation=implementation))


def check(shape: Shape, case: Case, implementation: str) -> None:
    attention = compiled(implementation, shape.window, shape.h)
    out = attention(case.queries, case.extents, case.tables, case.positions)
    assert out.dtype == case.queries.dtype
    got = np.asarray(out, np.float64)
    assert np.isfinite(got).all(), "read garbage"
    np.testing.assert_array_equal(got[np.asarray(case.positions) < 0], 0, err_msg="padded queries give zeros")
    error, size = np.linalg.norm(got - case.expected), np.linalg.norm(case.expected)
    assert error <= TOLERANCE[shape.dtype] * size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_attention_over_scattered_pages_is_contiguous_attention(shape, data, seed):
    longest = shape.width * shape.page_size
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=shape.B, max_size=shape.B), "lengths")
    case = make_case(shape, lengths, seed)
    for implementation in IMPLEMENTATIONS:
        check(shape, case, implementation)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_batch_of_longest_sequences_and_batch_of_none(shape, implementation):
    longest = shape.width * shape.page_size
    check(shape, make_case(shape, [longest] * shape.B, seed=1), implementation)
    check(shape, make_case(shape, [0] * shape.B, seed=2), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
    shape = SHAPES[1]
    case = make_case(shape, [9, 28, 1, 17, 4], seed=3)
    big = case.queries * 1e4
    # With scores this far apart the softmax picks one token: its value comes back as it is stored.
    out = compiled(implementation, None, shape.h)(big, case.extents, case.tables, case.positions)
    assert np.isfinite(out).all()
    for row in np.asarray(out)[np.asarray(case.positions) >= 0].reshape(-1, shape.h):
        stored = np.concatenate([np.asarray(extent)[:, :, 1].reshape(-1, shape.h) for extent in case.extents])
        assert np.nanmin(np.abs(stored - row).max(axis=1)) < 1e-3  # unused slots hold NaN


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequence_is_served_alike_whatever_its_neighbours_are(implementation):
    shape = SHAPES[1]
    case = make_case(shape, [13, 28, 0, 5, 21], seed=4)
    attention = compiled(implementation, None, shape.h)
    whole = np.asarray(attention(case.queries, case.extents, case.tables, case.positions))
    order = np.array([3, 1, 4, 0, 2])
    tables = [PageTable(*(field[order] for field in table)) for table in case.tables]
    moved = attention(case.queries[order], case.extents, tables, case.positions[order])
    np.testing.assert_allclose(moved, whole[order], rtol=1e-6, atol=1e-6)


# --- memory -------------------------------------------------------------------------------------------------


def abstract(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# XLA's CPU backend of JAX 0.10 computes gathers and scatters of bf16 in f32: it converts the whole extent.
# Fixed in 0.12 (0.11 not tried). Integer views do not help: they turn the conversion into a copy.
BFLOAT16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.xfail(jax.__version_info__ < (0, 12), reason="XLA converts bf16 extents to f32", strict=False),
)


@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
@pytest.mark.parametrize("length", [1, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_never_copies_an_extent(kv_heads, length, dtype):
    """With one KV head a rank, XLA once copied the whole extent to gather from it."""
    batch, page_size, head_dim, width = 4, 16, 64, 32
    page_elems = kv_heads * 2 * page_size * head_dim
    pages = 2**24 // page_elems  # 16 Mi elements an extent

    def attend(queries: jax.Array, flat: list[jax.Array], tables: list[PageTable], positions: jax.Array) -> jax.Array:
        extents = [extent.reshape(-1, kv_heads, 2, page_size, head_dim) for extent in flat]
        return paged_attention(queries, extents, tables, positions, scale=0.125, implementation="xla")

    table = PageTable(*(abstract(s, "int32") for s in ((batch, width), (batch, width), (batch,))))
    # Extents as the engine keeps them, in pages of a higher degree than the rank's: reshaping must be free.
    flat = [abstract((pages // 4, 4 * page_elems), dtype), abstract((pages // 8, 4 * page_elems), dtype)]
    queries = abstract((batch, length, 2 * kv_heads, head_dim), dtype)
    lowered = jax.jit(attend).lower(queries, flat, [table] * 2, abstract((batch, length), "int32"))
    memory = lowered.compile().memory_analysis()
    extent_bytes = pages * page_elems * jnp.dtype(dtype).itemsize
    assert memory.argument_size_in_bytes > extent_bytes
    assert memory.temp_size_in_bytes < extent_bytes / 8


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """As users run it: jaxtyping's checks, which raise errors of their own, are only on in tests."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def arguments(**changes) -> dict:
    """Arguments that fit together, with some replaced."""
    good = {
        "queries": jnp.zeros((2, 3, 4, 8)),
        "extents": [jnp.zeros((5, 2, 2, 4, 8))] * 2,
        "tables": [PageTable(jnp.zeros((2, 6), jnp.int32), jnp.zeros((2, 6), jnp.int32), jnp.zeros(2, jnp.int32))] * 2,
        "query_positions": jnp.zeros((2, 3), jnp.int32),
    }
    return good | changes


def table(ids: tuple[int, ...], places: tuple[int, ...], counts: tuple[int, ...]) -> list[PageTable]:
    return [PageTable(*(jnp.zeros(shape, jnp.int32) for shape in (ids, places, counts)))] * 2


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
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_launch(without_shape_checks, changes, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments(**changes), scale=1.0)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_arguments_that_fit_are_taken(implementation):
    out = paged_attention(**arguments(), scale=1.0, implementation=implementation)
    assert out.shape == (2, 3, 4, 8)
