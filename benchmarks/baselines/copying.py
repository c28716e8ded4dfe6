"""Programs that copy all pages of a layer into new extents.

A piece is the part of a page that one rank of the higher degree stores. `migrate` sends all pieces that change their
rank at once, into a separate buffer. `defragment` then fills new extents with the received pieces, and with the pieces
that stay on their rank. The caller drops the old extents only after that. So a layer's cache exists twice for a moment.
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
    """Compile the program `(extents, send) -> received`, which sends the pieces of a layer to their new ranks.

    Nothing is donated. `extents`: old extents of the layer, arrays `[tp * pages, page_elems]` over the ranks of
    `group`. `send`: ids of the pieces that each rank sends to each rank, int32 `[tp, tp, num_pieces]` (see
    `Phase.send`). `received`: `tp - 1` arrays `[tp * num_pieces, elements of a piece]`. Array `i - 1` has, for each
    rank `r`, the pieces from rank `r ^ i`.
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
    """Compile the program `(extents, received, send, receive) -> new extents`, which fills the new extents of a layer.

    Nothing is donated. `extents`: old extents. `received`: result of the program of `compile_migrate`, with the same
    `send` and `num_pieces`. `receive`: ids of the slots to which the pieces are written (see `Phase.receive`).
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
