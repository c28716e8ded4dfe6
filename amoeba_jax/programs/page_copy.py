"""Program that copies a page, for a sequence that writes to a shared page."""

import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from amoeba_jax.models.dims import ModelDims
from kvcache.page_copy import copy_pages
from sharding.mesh import TP_AXIS, SubMesh


def compile_page_copy(dims: ModelDims, group: SubMesh, extent_pages: tuple[int, ...]) -> jax.stages.Compiled:
    """Compile a program `(extents, ids) -> extents` that copies one page of one layer on every rank.

    `extents` are donated arrays `[tp * pages, page_elems]`. `ids` `[tp, 2]` are the source and target page of each
    rank. The program copies a page of one layer only: a program for all 30 layers of SmolLM2 would take 7 s to compile
    and 150 MiB, at each degree.
    """
    starts = tuple(itertools.accumulate((pages * group.tp for pages in extent_pages), initial=0))

    def copy(extents: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
        return copy_pages(extents, starts, group.tp, ids[0, :1], ids[0, 1:])

    shapes = [(group.tp * pages, dims.pages.page_elems) for pages in extent_pages]
    extents = [jax.ShapeDtypeStruct(shape, jnp.dtype(dims.dtype)) for shape in shapes]
    mapped = jax.shard_map(
        copy, mesh=group.mesh, in_specs=(P(TP_AXIS), P(TP_AXIS)), out_specs=P(TP_AXIS), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=(0,), in_shardings=group.sharded, out_shardings=group.sharded)
    return jitted.lower(extents, jax.ShapeDtypeStruct((group.tp, 2), jnp.int32)).compile()
