"""Writes of new keys and values: every token in its slot, nothing else changed, no copy of the extents."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_append import append_kv

# (pages of each extent, KV heads, page size, head size, tokens, dtype)
SHAPES = (
    ((6,), 1, 4, 8, 5, "float32"),
    ((3, 1, 7), 2, 2, 6, 8, "float32"),
    ((4, 4), 1, 16, 4, 1, "bfloat16"),
    ((2, 5, 1, 3), 3, 8, 2, 12, "bfloat16"),
)


def starts_of(extent_pages: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *np.cumsum(extent_pages).tolist())


def bits(array: jax.Array) -> np.ndarray:
    """Return the bits, to compare NaN and negative zero exactly."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


append = jax.jit(append_kv, static_argnums=1, donate_argnums=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_tokens_land_in_their_slots_and_nothing_else_changes(shape, data, seed):
    extent_pages, kv_heads, page_size, head_dim, tokens, dtype = shape
    random = np.random.default_rng(seed)
    starts = starts_of(extent_pages)
    # Slots differ, as in sequences. A token may be padding, with an arbitrary slot.
    slots_in_all = st.integers(0, starts[-1] * page_size - 1)
    targets = data.draw(st.lists(slots_in_all, min_size=tokens, max_size=tokens, unique=True), "targets")
    padding = data.draw(st.lists(st.sampled_from([None, None, -1, -7]), min_size=tokens, max_size=tokens), "padding")
    page_ids = np.array([t // page_size if p is None else p for t, p in zip(targets, padding, strict=True)], np.int32)
    slots = np.array([t % page_size for t in targets], np.int32)
    # Any bit pattern may lie in the cache.
    raw = [random.integers(0, 256, (p, kv_heads, 2, page_size, head_dim, 4), np.uint8) for p in extent_pages]
    with np.errstate(invalid="ignore"):
        before = [r.view(np.float32)[..., 0].astype(jnp.dtype(dtype)) for r in raw]
    keys, values = random.standard_normal((2, tokens, kv_heads, head_dim)).astype(jnp.dtype(dtype))

    expected = [extent.copy() for extent in before]
    for n, page in enumerate(page_ids):
        for extent, start, stop in zip(expected, starts[:-1], starts[1:], strict=True):
            if start <= page < stop:
                extent[page - start, :, 0, slots[n]] = keys[n]
                extent[page - start, :, 1, slots[n]] = values[n]

    extents = [jnp.array(extent, copy=True) for extent in before]
    after = append(extents, starts, *map(jnp.asarray, (keys, values, page_ids, slots)))
    assert len(after) == len(expected)
    for got, want in zip(after, expected, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


def test_keys_and_values_are_stored_in_the_dtype_of_the_cache():
    extent = jnp.zeros((1, 1, 2, 2, 2), jnp.bfloat16)
    keys, values = jnp.full((1, 1, 2), 1 / 3, jnp.float32), jnp.full((1, 1, 2), 2 / 3, jnp.float32)
    (after,) = append([extent], (0, 1), keys, values, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after[0, 0, 0, 1], keys[0, 0].astype(jnp.bfloat16))
    np.testing.assert_array_equal(after[0, 0, 1, 1], values[0, 0].astype(jnp.bfloat16))


# XLA's CPU backend of JAX 0.10 computes scatters of bf16 in f32: it converts the whole extent and back.
BFLOAT16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.xfail(jax.__version_info__ < (0, 12), reason="XLA converts bf16 extents to f32", strict=False),
)


@pytest.mark.first_by_default
@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_donated_extents_are_written_in_place(kv_heads, dtype):
    """With separate indices for pages and slots, XLA once transposed and so copied the whole extent."""
    page_size, head_dim, tokens = 16, 64, 32
    pages = 2**21 // (kv_heads * 2 * page_size * head_dim)
    shape = (pages, kv_heads, 2, page_size, head_dim)
    starts = starts_of((pages, pages))
    new = [jnp.ones((tokens, kv_heads, head_dim), dtype)] * 2
    ids = [jnp.arange(tokens, dtype=jnp.int32), jnp.zeros(tokens, jnp.int32)]

    def step(flat: list[jax.Array], *rest: jax.Array) -> list[jax.Array]:
        extents = [extent.reshape(shape) for extent in flat]  # as the engine keeps them: [pages, page_elems]
        return [e.reshape(f.shape) for e, f in zip(append_kv(extents, starts, *rest), flat, strict=True)]

    flat = [jnp.zeros((pages, int(np.prod(shape[1:]))), dtype) for _ in range(2)]
    compiled = jax.jit(step, donate_argnums=0).lower(flat, *new, *ids).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(extent.nbytes for extent in flat)
    assert memory.temp_size_in_bytes < flat[0].nbytes / 8
    pointers = [extent.unsafe_buffer_pointer() for extent in flat]
    after = compiled(flat, *new, *ids)
    assert [extent.unsafe_buffer_pointer() for extent in after] == pointers
    assert all(extent.is_deleted() for extent in flat)


@pytest.mark.parametrize("pages", [2**16, 2**17])
def test_extent_of_more_than_two_giga_elements_can_be_addressed(pages):
    """The cache of a layer on a large GPU: 4 GiB in bfloat16 are 2**31 elements, one more than int32 can count."""
    extent = jax.ShapeDtypeStruct((pages, 8, 2, 16, 128), jnp.bfloat16)
    new, ids = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    (after,) = jax.eval_shape(lambda e, k, v, p, s: append_kv([e], (0, pages), k, v, p, s), extent, new, new, ids, ids)
    assert after.shape == extent.shape


def test_scatter_says_that_its_rows_differ():
    """All rows must differ, also rows of padding and of other extents. Otherwise a GPU writes by atomic operations."""
    extents = [jnp.zeros((pages, 2, 2, 4, 8)) for pages in (3, 2)]
    tokens, ids = jnp.ones((5, 2, 8)), jnp.asarray([0, -1, 4, -1, 3])
    written = jax.make_jaxpr(lambda *a: append_kv(a[:2], (0, 3, 5), *a[2:]))(*extents, tokens, tokens, ids, ids % 4)
    scatters = [e for e in written.eqns if e.primitive.name == "scatter"]
    assert len(scatters) == 2
    for scatter in scatters:
        assert scatter.params["unique_indices"]
        before = written.jaxpr.replace(eqns=written.eqns, outvars=[scatter.invars[1]])
        rows_of = jax.jit(partial(jax.core.eval_jaxpr, before, written.consts))
        (rows,) = rows_of(*extents, tokens, tokens, ids, ids % 4)
        assert len(np.unique(rows)) == 5 * 2 * 2
