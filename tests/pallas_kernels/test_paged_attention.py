"""Paged attention, compared with contiguous attention in float64 NumPy, with NaN in everything unseen."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, check_output, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba_jax.cpu_cache import step_options
from pallas_kernels.paged_attention import PageLayout, PageTable, paged_attention

IMPLEMENTATIONS = ("xla", "reference")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
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
    Shape(B=3, T=1, K=2, G=2, h=8, page_size=4, width=9, extents=2, window=None, dtype="float32", soft_cap=2.0),
    Shape(B=2, T=5, K=2, G=3, h=8, page_size=8, width=5, extents=1, window=7, dtype="float32", sinks=True),
    Shape(B=3, T=1, K=2, G=2, h=8, page_size=4, width=9, extents=2, window=None, dtype="float32", kv_dtype=E4M3),
    Shape(B=2, T=4, K=1, G=2, h=16, page_size=8, width=4, extents=13, window=None, dtype="bfloat16", kv_dtype=E5M2),
    Shape(
        B=2,
        T=3,
        K=2,
        G=2,
        h=8,
        page_size=4,
        width=9,
        extents=2,
        window=9,
        dtype="float32",
        soft_cap=1.5,
        sinks=True,
        kv_dtype=E4M3,
        layout=PageLayout.PAGE_FRIENDLY,
    ),
    Shape(
        B=3, T=2, K=3, G=1, h=8, page_size=2, width=9, extents=2, window=None, dtype="float16", layout=PageLayout.RAW
    ),
)
# Each feature is in one of the others too.
RARE = {SHAPES[index] for index in (0, 2, 3, 5, 6, 7, 11)}
SOME_SHAPES = [pytest.param(shape, marks=[pytest.mark.slow] * (shape in RARE)) for shape in SHAPES]


@cache
def compiled(implementation: str, shape: Shape):
    def attention(queries, extents, tables, positions, sinks, kv_scales):
        return paged_attention(
            queries,
            extents,
            tables,
            positions,
            scale=shape.h**-0.5,
            sliding_window=shape.window,
            soft_cap=shape.soft_cap,
            sinks=sinks,
            kv_scales=kv_scales,
            stride_order=shape.layout.value,
            implementation=implementation,
        )

    # `xla` is compiled as for serving. The reference is only correct, so it need not be fast.
    quick = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
    return jax.jit(attention, compiler_options=quick if implementation == "reference" else step_options("cpu"))


def attend(shape: Shape, case: Case, implementation: str) -> jax.Array:
    return compiled(implementation, shape)(*case.arguments, case.sinks, case.kv_scales)


def check(shape: Shape, case: Case, implementation: str) -> None:
    check_output(shape, case, attend(shape, case, implementation))


@pytest.mark.parametrize("shape", SOME_SHAPES, ids=str)
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_attention_over_scattered_pages_is_contiguous_attention(shape, data, seed):
    lengths = data.draw(st.lists(st.integers(0, shape.longest), min_size=shape.B, max_size=shape.B), "lengths")
    case = make_case(shape, lengths, seed)
    for implementation in IMPLEMENTATIONS:
        check(shape, case, implementation)


@pytest.mark.parametrize("shape", SOME_SHAPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_batch_of_longest_sequences_and_batch_of_none(shape, implementation):
    check(shape, make_case(shape, [shape.longest] * shape.B, seed=1), implementation)
    check(shape, make_case(shape, [0] * shape.B, seed=2), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
    shape = SHAPES[1]
    case = make_case(shape, [9, 28, 1, 17, 4], seed=3)
    big = replace(case, queries=case.queries * 1e4)
    # With scores this far apart the softmax selects one token, so the result is its stored value.
    out = attend(shape, big, implementation)
    assert np.isfinite(out).all()
    for row in np.asarray(out)[np.asarray(case.positions) >= 0].reshape(-1, shape.h):
        stored = np.concatenate([np.asarray(extent)[:, :, 1].reshape(-1, shape.h) for extent in case.extents])
        assert np.nanmin(np.abs(stored - row).max(axis=1)) < 1e-3  # unused slots hold NaN


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequence_is_served_alike_whatever_its_neighbours_are(implementation):
    shape = SHAPES[1]
    case = make_case(shape, [13, 28, 0, 5, 21], seed=4)
    whole = np.asarray(attend(shape, case, implementation))
    order = np.array([3, 1, 4, 0, 2])
    tables = [PageTable(*(field[order] for field in table)) for table in case.tables]
    moved = replace(case, queries=case.queries[order], tables=tables, positions=case.positions[order])
    np.testing.assert_allclose(attend(shape, moved, implementation), whole[order], rtol=1e-6, atol=1e-6)


def test_all_extents_but_the_first_share_a_loop():
    """Whole sequences may be in separate extents. With a loop for each extent, decoding took several times as long."""
    case = make_case(SHAPES[1], [20] * SHAPES[1].B, seed=0)
    assert len(case.extents) == 3
    lowered = jax.jit(lambda *arguments: paged_attention(*arguments, scale=1.0, implementation="xla")).lower(
        *case.arguments
    )
    assert lowered.as_text().count("stablehlo.while") == 2


# --- memory -------------------------------------------------------------------------------------------------


def abstract(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# XLA's CPU backend of JAX 0.10 computes gathers and scatters of bf16 in f32: it converts the whole extent.
# Fixed in 0.12 (0.11 not tried). Integer views do not help: they turn the conversion into a copy.
BFLOAT16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.xfail(jax.__version_info__ < (0, 12), reason="XLA converts bf16 extents to f32", strict=False),
)


@pytest.mark.first_by_default
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow), BFLOAT16])
@pytest.mark.parametrize("length", [1, 16])
@pytest.mark.parametrize("kv_heads", [1, *(pytest.param(heads, marks=pytest.mark.slow) for heads in (2, 8))])
def test_attention_never_copies_an_extent(kv_heads, length, dtype):
    """With one KV head on a rank, XLA once copied the whole extent to gather from it."""
    batch, page_size, head_dim, width = 4, 16, 64, 32
    page_elems = kv_heads * 2 * page_size * head_dim
    pages = 2**24 // page_elems  # 16 Mi elements an extent

    def attend(queries: jax.Array, flat: list[jax.Array], tables: list[PageTable], positions: jax.Array) -> jax.Array:
        extents = [extent.reshape(-1, kv_heads, 2, page_size, head_dim) for extent in flat]
        return paged_attention(queries, extents, tables, positions, scale=0.125, implementation="xla")

    table = PageTable(*(abstract(s, "int32") for s in ((batch, width), (batch, width), (batch,))))
    # Extents as stored by the engine, in pages of several KV heads. Reshaping must be free.
    flat = [abstract((pages // 4, 4 * page_elems), dtype), abstract((pages // 8, 4 * page_elems), dtype)]
    queries = abstract((batch, length, 2 * kv_heads, head_dim), dtype)
    lowered = jax.jit(attend).lower(queries, flat, [table] * 2, abstract((batch, length), "int32"))
    memory = lowered.compile().memory_analysis()
    extent_bytes = pages * page_elems * jnp.dtype(dtype).itemsize
    assert memory.argument_size_in_bytes > extent_bytes
    assert memory.temp_size_in_bytes < extent_bytes / 8


@pytest.mark.parametrize("layout", PageLayout, ids=lambda layout: layout.name)
def test_other_memory_orders_are_not_converted_as_a_whole(layout):
    batch, kv_heads, page_size, head_dim, width, pages = 2, 4, 16, 64, 8, 2048
    logical = jax.ShapeDtypeStruct((pages, kv_heads, 2, page_size, head_dim), jnp.float32)
    extent = jax.eval_shape(layout.physical, logical)
    assert layout.logical_shape(extent.shape) == logical.shape

    def attend(queries, extent, table, positions):
        options = {"scale": 0.125, "implementation": "xla", "stride_order": layout.value}
        return paged_attention(queries, [extent], [table], positions, **options)

    table = PageTable(*(abstract(s, "int32") for s in ((batch, width), (batch, width), (batch,))))
    queries, positions = abstract((batch, 1, 8, head_dim), "float32"), abstract((batch, 1), "int32")
    memory = jax.jit(attend).lower(queries, extent, table, positions).compile().memory_analysis()
    assert memory.temp_size_in_bytes < logical.size * 4 / 8
