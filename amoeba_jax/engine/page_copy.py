"""Copies of pages in all layers of an instance, for sequences that stop sharing one."""

import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from amoeba_jax.models.dims import ModelDims
from kvcache.page_copy import copy_pages
from sharding.mesh import TP_AXIS, SubMesh


def compile_page_copy(
    dims: ModelDims, group: SubMesh, extent_pages: tuple[int, ...], num_layers: int
) -> jax.stages.Compiled:
    """A program `(kv, ids) -> kv` that copies a page on every rank, in every layer.

    `kv[layer]` is the layer's list of extents (donated), `ids` `[tp, 2]` each rank's source and target page.
    """
    starts = tuple(itertools.accumulate((pages * group.tp for pages in extent_pages), initial=0))

    def copy(kv: list[list[jax.Array]], ids: jax.Array) -> list[list[jax.Array]]:
        return [copy_pages(extents, starts, group.tp, ids[0, :1], ids[0, 1:]) for extents in kv]

    shapes = [(group.tp * pages, dims.pages.page_elems) for pages in extent_pages]
    kv = [[jax.ShapeDtypeStruct(shape, jnp.dtype(dims.dtype)) for shape in shapes] for _ in range(num_layers)]
    mapped = jax.shard_map(
        copy, mesh=group.mesh, in_specs=(P(TP_AXIS), P(TP_AXIS)), out_specs=P(TP_AXIS), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=(0,), in_shardings=group.sharded, out_shardings=group.sharded)
    return jitted.lower(kv, jax.ShapeDtypeStruct((group.tp, 2), jnp.int32)).compile()
