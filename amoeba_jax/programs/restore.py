"""Program that turns KV cache back into weights when a group splits.

After a merge, each rank keeps only some of its weight shards. In the split, each rank gets a copy of each missing shard
from another rank.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from kvcache.exchange import as_bits, of_bits
from sharding.mesh import TP_AXIS, SubMesh
from sharding.release import ReleasedShard, holder


def compile_restore(
    released: Sequence[ReleasedShard], max_tp: int, dtype: jnp.dtype, group: SubMesh, step_pages: int
) -> jax.stages.Compiled:
    """Compile a program `(shards, extents) -> extents` that restores the released weights of one layer.

    `shards` (kept weights) and `extents` (page buffers) are lists with one array `[tp * pages, page_elems]` for each
    entry of `released`. For each entry, every rank sends one shard that it has kept (`source_place`) to another rank.
    The other rank writes this shard into its own part of the extent. `extents` are donated. The results hold weights.

    - With bf16 on CPU, ranks send bf16 values as integers, because XLA would send bf16 values as f32. Ranks send
      `step_pages` pages at a time, and the program needs temporaries of `2 * step_pages` pages.
    - In all other cases, ranks send whole shards, and the program needs no temporaries.
    """
    in_steps = group.devices[0].platform == "cpu" and dtype == jnp.bfloat16

    def exchange(one: ReleasedShard) -> list[tuple[int, int]]:
        holders = [holder(one.spec, group.tp, one.shards[device % max_tp])[0] for device in group.device_indices]
        return [(source, rank) for rank, source in enumerate(holders)]

    def fill(one: ReleasedShard, shard: jax.Array, extent: jax.Array) -> jax.Array:
        if not in_steps:
            return lax.ppermute(shard, TP_AXIS, exchange(one))
        size = min(step_pages, one.num_pages)

        def step(index: jax.Array, extent: jax.Array) -> jax.Array:
            start = jnp.minimum(index * size, one.num_pages - size)  # the last step may repeat pages
            pages = lax.dynamic_slice_in_dim(shard, start, size)
            received = of_bits(lax.ppermute(as_bits(pages), TP_AXIS, exchange(one)), pages.dtype)
            return lax.dynamic_update_slice_in_dim(extent, received, start, axis=0)

        return lax.fori_loop(0, -(-one.num_pages // size), step, extent)

    def run(shards: list[jax.Array], extents: list[jax.Array]) -> list[jax.Array]:
        return [fill(*each) for each in zip(released, shards, extents, strict=True)]

    shapes = [(group.tp * one.num_pages, one.spec.stored_shape[1]) for one in released]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    mapped = jax.shard_map(run, mesh=group.mesh, in_specs=P(TP_AXIS), out_specs=P(TP_AXIS), check_vma=False)
    jitted = jax.jit(
        mapped, donate_argnums=1, keep_unused=True, in_shardings=group.sharded, out_shardings=group.sharded
    )
    return jitted.lower(arguments, arguments).compile()


def source_place(released: ReleasedShard, max_tp: int, group: SubMesh) -> int:
    """Return the index of the shard that each rank sends to another rank in `compile_restore`.

    The index counts only the shards that the rank has kept. It is the same for all ranks of the group.
    """
    places = {holder(released.spec, group.tp, released.shards[d % max_tp])[1] for d in group.device_indices}
    (place,) = places
    return place
