"""The program that makes weights again of extents that were KV cache: each rank gets its shards from its peers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from kvcache.exchange import as_bits, of_bits
from sharding.mesh import TP_AXIS, SubMesh
from sharding.release import ReleasedShard, holder


def compile_restore(
    released: ReleasedShard, max_tp: int, dtype: jnp.dtype, group: SubMesh, step_pages: int
) -> jax.stages.Compiled:
    """A program `(shard, extent) -> extent` that fills an extent of one layer with the weights that it stands for.

    Both are `[tp * pages, page_elems]` over the group's ranks. `extent` is donated; `shard` is the one at
    `source_place`, which every rank has at the group's degree: shards are dealt so that each rank sends its own to one
    peer. What comes from the peer is written to the extent at once, without temporaries.

    XLA's CPU backend sends bf16 as f32. There it goes as integers, `step_pages` pages at a time, and temporaries are
    twice as many.
    """
    holders = [holder(released.spec, group.tp, released.shards[device % max_tp])[0] for device in group.device_indices]
    exchange = [(source, rank) for rank, source in enumerate(holders)]
    num_pages = released.num_pages
    size = min(step_pages, num_pages)

    def whole(shard: jax.Array, extent: jax.Array) -> jax.Array:
        return lax.ppermute(shard, TP_AXIS, exchange)

    def in_steps(shard: jax.Array, extent: jax.Array) -> jax.Array:
        def step(index: jax.Array, extent: jax.Array) -> jax.Array:
            start = jnp.minimum(index * size, num_pages - size)  # the last step goes over pages of the one before
            pages = lax.dynamic_slice_in_dim(shard, start, size)
            received = of_bits(lax.ppermute(as_bits(pages), TP_AXIS, exchange), pages.dtype)
            return lax.dynamic_update_slice_in_dim(extent, received, start, axis=0)

        return lax.fori_loop(0, -(-num_pages // size), step, extent)

    run = in_steps if group.devices[0].platform == "cpu" and dtype == jnp.bfloat16 else whole
    shape = jax.ShapeDtypeStruct((group.tp * num_pages, released.spec.stored_shape[1]), dtype)
    mapped = jax.shard_map(run, mesh=group.mesh, in_specs=P(TP_AXIS), out_specs=P(TP_AXIS), check_vma=False)
    jitted = jax.jit(
        mapped, donate_argnums=1, keep_unused=True, in_shardings=group.sharded, out_shardings=group.sharded
    )
    return jitted.lower(shape, shape).compile()


def source_place(released: ReleasedShard, max_tp: int, group: SubMesh) -> int:
    """Which of its shards at the group's degree each rank sends, for one of `compile_restore`'s extents."""
    places = {holder(released.spec, group.tp, released.shards[d % max_tp])[1] for d in group.device_indices}
    (place,) = places
    return place
