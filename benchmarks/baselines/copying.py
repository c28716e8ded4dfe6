"""Programs that copy all pages of a layer into new extents.

A piece is the part of a page that one rank of the higher degree stores. Each layer has two programs. `migrate` sends
all pieces that change their rank at once, into a separate buffer. `defragment` then fills new extents with the pieces
that stay on their rank and with the received pieces, both at their ids of the new layout. The caller drops the old
extents afterwards, so a layer's cache exists twice for a moment.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvcache.exchange import as_bits, as_pieces, gather_pieces, of_bits, scatter_pieces, swap_pieces
from kvcache.extents import LayerKV
from kvcache.geometry import PageGeometry
from sharding.mesh import TP_AXIS, SubMesh


def compile_migrate(
    geometry: PageGeometry, dtype: jnp.dtype, group: SubMesh, extent_pages: tuple[int, ...], num_pieces: int
) -> jax.stages.Compiled:
    """Compile a program `(extents, send) -> received` for one layer. Nothing is donated.

    `extents` are arrays `[tp * pages, page_elems]` over the ranks of the group, which stay unchanged. `send` is the
    array of a general `Phase`: int32 `[tp, tp, num_pieces]`. `received` has one array `[tp * num_pieces, elements of a
    piece]` for each distance of ranks (`Phase`) from 1 to `tp - 1`.
    """

    def run(extents: LayerKV, send: jax.Array) -> list[jax.Array]:
        rows = as_pieces(extents, group.tp)
        sent = [as_bits(gather_pieces(rows, send[0, i])) for i in range(1, group.tp)]
        return [of_bits(swap_pieces(bits, i), jnp.dtype(dtype)) for i, bits in enumerate(sent, 1)]

    extents, ids = _shapes(geometry, dtype, group, extent_pages, num_pieces)
    return _compile(run, group, (extents, ids))


def compile_defragment(
    geometry: PageGeometry,
    dtype: jnp.dtype,
    group: SubMesh,
    old_extent_pages: tuple[int, ...],
    new_extent_pages: tuple[int, ...],
    num_pieces: int,
) -> jax.stages.Compiled:
    """Compile a program `(extents, received, send, receive) -> new extents` for one layer. Nothing is donated.

    Its inputs are the old extents, the result of `migrate`, and both id arrays of the `Phase`. `num_pieces`: see
    `compile_migrate`.
    """

    piece_elems = geometry.page_elems // group.tp

    def run(extents: LayerKV, received: list[jax.Array], send: jax.Array, receive: jax.Array) -> list[jax.Array]:
        fresh = [jnp.zeros((pages * group.tp, piece_elems), dtype) for pages in new_extent_pages]
        kept = gather_pieces(as_pieces(extents, group.tp), send[0, 0])
        for places, pieces in zip(receive[0], [kept, *received], strict=True):
            fresh = scatter_pieces(fresh, places, pieces)
        return [f.reshape(-1, geometry.page_elems) for f in fresh]

    extents, ids = _shapes(geometry, dtype, group, old_extent_pages, num_pieces)
    received = [jax.ShapeDtypeStruct((group.tp * num_pieces, piece_elems), dtype)] * (group.tp - 1)
    return _compile(run, group, (extents, received, ids, ids))


def _shapes(geometry: PageGeometry, dtype: jnp.dtype, group: SubMesh, extent_pages: tuple[int, ...], num_pieces: int):
    extents = [jax.ShapeDtypeStruct((group.tp * pages, geometry.page_elems), dtype) for pages in extent_pages]
    return extents, jax.ShapeDtypeStruct((group.tp, group.tp, num_pieces), jnp.int32)


def _compile(run, group: SubMesh, shapes: tuple) -> jax.stages.Compiled:
    spec = P(TP_AXIS)
    mapped = jax.shard_map(run, mesh=group.mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False)
    jitted = jax.jit(mapped, in_shardings=group.sharded, out_shardings=group.sharded)
    return jitted.lower(*shapes).compile()
