"""Weights restored from extents: values, buffers and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amoeba_jax.programs.restore import compile_restore, source_place
from sharding.mesh import SubMesh, assemble, disassemble
from sharding.owners import Owner
from sharding.params import ParamSpec, Source
from sharding.release import released_shards

MAX_TP, PAGES, PAGE_ELEMS, STEP_PAGES = 4, 13, 96, 5
SPEC = ParamSpec(
    "gate_up", (Source("w", (MAX_TP * PAGES, PAGE_ELEMS)),), (PAGES, PAGE_ELEMS), MAX_TP, "sharded", PAGE_ELEMS,
    strided=True, owner=Owner.FFN,
)  # fmt: skip


# On CPU, XLA before JAX 0.12 converts whole bfloat16 extents to float32.
BFLOAT16_IS_CONVERTED = jax.__version_info__ < (0, 12)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("start", "tp"), [(0, 2), (2, 2), (0, 4)])
def test_each_rank_gets_the_shard_that_its_extent_stands_for(start, tp, dtype):
    group = SubMesh(start, tuple(jax.devices()[start : start + tp]))
    shards = np.random.default_rng(0).standard_normal((MAX_TP, PAGES, PAGE_ELEMS)).astype(jnp.dtype(dtype))
    bytes_of = jnp.dtype(dtype).itemsize * PAGES * PAGE_ELEMS
    released = [shard for shard in released_shards((SPEC,), MAX_TP) if shard.degree <= tp]
    assert released

    def put(arrays: list[np.ndarray]) -> jax.Array:
        pairs = zip(arrays, group.devices, strict=True)
        return assemble(group, [jax.device_put(jnp.array(array, copy=True), device) for array, device in pairs])

    program = compile_restore(released, MAX_TP, jnp.dtype(dtype), group, STEP_PAGES)
    places = [source_place(one, MAX_TP, group) for one in released]
    sources = [put([shards[SPEC.shard_indices(tp, rank)[place]] for rank in range(tp)]) for place in places]
    extents = [put([np.full((PAGES, PAGE_ELEMS), 7, jnp.dtype(dtype))] * tp) for _ in released]
    before = [pointers(extent) for extent in extents]
    restored = program(sources, extents)
    for one, array in zip(released, restored, strict=True):
        for buffer, device in zip(disassemble(group, array), group.device_indices, strict=True):
            np.testing.assert_array_equal(
                np.asarray(buffer).view(np.uint8), shards[one.shards[device % MAX_TP]].view(np.uint8)
            )
    assert [pointers(array) for array in restored] == before
    assert all(extent.is_deleted() for extent in extents)
    assert not any(source.is_deleted() for source in sources)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == bytes_of * len(released)
    if dtype != "bfloat16":
        assert memory.temp_size_in_bytes == 0
    elif not BFLOAT16_IS_CONVERTED:  # sent and received pages of a step, and its counter
        assert memory.temp_size_in_bytes <= 2 * STEP_PAGES * PAGE_ELEMS * jnp.dtype(dtype).itemsize + 1024
