"""Copies of pages within the extents of a layer: results compared with NumPy, in-place updates, several ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from prefix_cache_cases import forked

from kvcache.allocator import BuddyAllocator
from kvcache.extents import extent_starts
from kvcache.geometry import PageGeometry
from kvcache.page_copy import copy_pages
from kvcache.pages import PagePool, SequencePages
from sharding.mesh import TP_AXIS, SubMesh

COPIES = 6
# (pages of each extent, elements of a page, tp, dtype)
SHAPES = (
    ((7,), 8, 1, "float32"),
    ((5,), 16, 4, "bfloat16"),
    ((3, 4), 8, 2, "float32"),
    ((2, 1, 5), 8, 4, "float16"),
)

copy = jax.jit(copy_pages, static_argnums=(1, 2), donate_argnums=0)


def starts_of(extent_pages: tuple[int, ...], tp: int) -> tuple[int, ...]:
    return (0, *(tp * np.cumsum(extent_pages)).tolist())


def bits(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return the bits, to compare NaN and negative zero exactly."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_targets_hold_what_sources_held_and_nothing_else_changes(shape, data, seed):
    extent_pages, page_elems, tp, dtype = shape
    starts = starts_of(extent_pages, tp)
    ids = st.integers(0, starts[-1] - 1)
    # A page may be copied to several pages, and be source and target.
    sources = data.draw(st.lists(ids, min_size=COPIES, max_size=COPIES), "sources")
    targets = data.draw(st.lists(ids, min_size=COPIES, max_size=COPIES, unique=True), "targets")
    for n, padding in enumerate(
        data.draw(st.lists(st.sampled_from(["", "source", "target", "both"]), max_size=COPIES))
    ):
        sources[n] = -1 if padding in ("source", "both") else sources[n]
        targets[n] = -3 if padding in ("target", "both") else targets[n]

    random = np.random.default_rng(seed)
    # Any bit pattern may lie in the cache.
    raw = [random.integers(0, 256, (pages, page_elems, 4), np.uint8) for pages in extent_pages]
    with np.errstate(invalid="ignore", over="ignore"):
        before = [r.view(np.float32)[..., 0].astype(jnp.dtype(dtype)) for r in raw]
    old = np.concatenate(before).reshape(starts[-1], -1)  # sub-pages over all extents
    expected = old.copy()
    for source, target in zip(sources, targets, strict=True):
        if source >= 0 and target >= 0:
            expected[target] = old[source]

    extents = [jnp.array(extent, copy=True) for extent in before]
    after = copy(extents, starts, tp, jnp.array(sources, jnp.int32), jnp.array(targets, jnp.int32))
    assert [(e.shape, e.dtype) for e in after] == [((pages, page_elems), dtype) for pages in extent_pages]
    got = np.concatenate([bits(extent) for extent in after])
    np.testing.assert_array_equal(got.reshape(starts[-1], -1), bits(expected))


def test_there_may_be_unused_ids_between_extents():
    extents = [jnp.full((1, 2), 1.0), jnp.full((1, 2), 2.0)]
    ids = jnp.array([0, 2], jnp.int32), jnp.array([2, -1], jnp.int32)
    after = copy(extents, (0, 2, 3), 1, *ids)
    np.testing.assert_array_equal(np.concatenate(after), [[1, 1], [1, 1]])


# XLA's CPU backend of JAX 0.10 computes scatters of bf16 in f32: it converts the whole extent and back.
BFLOAT16 = pytest.param(
    4,
    "bfloat16",
    marks=pytest.mark.xfail(jax.__version_info__ < (0, 12), reason="XLA converts bf16 extents to f32", strict=False),
)


@pytest.mark.first_by_default
@pytest.mark.parametrize("extent_pages", [pytest.param((128,), marks=pytest.mark.slow), (32, 64, 32)], ids=str)
@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "float32"), (4, "float16"), BFLOAT16])
def test_donated_extents_are_written_in_place_on_every_rank(tp, extent_pages, dtype):
    group = SubMesh(0, tuple(jax.devices()[:tp]))
    page_elems = 8 * 2 * 16 * 64
    starts = starts_of(extent_pages, tp)

    def per_rank(extents: list[jax.Array], sources: jax.Array, targets: jax.Array) -> list[jax.Array]:
        return copy_pages(extents, starts, tp, sources[0], targets[0])

    spec = P(TP_AXIS)
    mapped = jax.shard_map(per_rank, mesh=group.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    # Each rank copies other pages: the first pages of the first extent to the last pages of the last extent.
    sources = np.arange(tp * COPIES, dtype=np.int32).reshape(tp, COPIES)
    targets = starts[-1] - 1 - sources
    contents = [np.random.default_rng(e).random((tp * p, page_elems)) for e, p in enumerate(extent_pages)]
    extents = [jax.device_put(jnp.array(c, dtype), group.sharded) for c in contents]
    expected = [np.array(extent).reshape(tp, -1, page_elems // tp) for extent in extents]
    for rank in range(tp):
        last = extent_pages[-1] * tp - 1 - sources[rank]
        expected[-1][rank][last] = expected[0][rank][sources[rank]]

    jitted = jax.jit(mapped, donate_argnums=0, in_shardings=group.sharded, out_shardings=group.sharded)
    ids = [jax.device_put(i, group.sharded) for i in (sources, targets)]
    compiled = jitted.lower(extents, *ids).compile()
    memory = compiled.memory_analysis()
    extent_bytes = sum(extent_pages) * page_elems * jnp.dtype(dtype).itemsize
    copied_bytes = COPIES * page_elems // tp * jnp.dtype(dtype).itemsize
    assert memory is not None
    assert memory.alias_size_in_bytes >= extent_bytes
    assert memory.temp_size_in_bytes < 2 * copied_bytes < extent_bytes / 8
    pointers = [[s.data.unsafe_buffer_pointer() for s in e.addressable_shards] for e in extents]
    after = compiled(extents, *ids)
    assert [[s.data.unsafe_buffer_pointer() for s in e.addressable_shards] for e in after] == pointers
    assert all(extent.is_deleted() for extent in extents)
    for got, want in zip(after, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want)


def test_forked_sequence_writes_to_its_copy():
    """`copy_pages` takes the columns of `copy_on_write`, rank by rank."""
    geometry = PageGeometry(kv_heads=2, page_size=4, head_dim=2, max_tp=2)
    allocators = [BuddyAllocator(2) for _ in range(2)]
    for allocator in allocators:
        allocator.add_extent(1)
        allocator.add_extent(2)
    PagePool(geometry, allocators[1:], 1).allocate(1)  # so that ids differ between ranks
    pool = PagePool(geometry, allocators, 2)
    parent = SequencePages(pool)
    parent.reserve(8)
    child = forked(parent)
    copied = child.copy_on_write(1)
    assert copied is not None
    source, target = copied
    for rank in range(2):
        extents = [jnp.arange(pages * geometry.page_elems, dtype=jnp.float32).reshape(pages, -1) for pages in (1, 2)]
        before = np.concatenate(extents).reshape(6, -1)
        ids = jnp.asarray(source[rank, None]), jnp.asarray(target[rank, None])
        after = copy(extents, extent_starts((2, 4)), 2, *ids)
        rows = np.concatenate(after).reshape(6, -1)
        np.testing.assert_array_equal(rows[child.table[rank]], before[parent.table[rank]])
        np.testing.assert_array_equal(rows[parent.table[rank]], before[parent.table[rank]])
