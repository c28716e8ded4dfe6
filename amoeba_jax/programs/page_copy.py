"""Programs that copy a KV page inside a layer, and programs that read or write pages for a move to other devices."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from amoeba_jax.models.dims import ModelDims
from kvcache.page_copy import copy_pages, read_pages, write_pages
from sharding.mesh import TP_AXIS, SubMesh


def compile_page_copy(dims: ModelDims, group: SubMesh, extent_pages: tuple[int, ...]) -> jax.stages.Compiled:
    """Compile a program `(extents, ids) -> extents` that copies one page of one layer on every rank.

    `extents` are arrays `[tp * pages, page_elems]`, and are donated. `ids` is `[tp, 2]`. Row i of `ids` has the ids of
    the source page and of the target page of rank i.

    The program is for one layer, because a program for all 30 layers of SmolLM2 would take 7 s to compile and 150 MiB
    of memory.
    """
    starts = _first_ids(group, extent_pages)

    def copy(extents: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
        return copy_pages(extents, starts, group.tp, ids[0, :1], ids[0, 1:])

    ids = jax.ShapeDtypeStruct((group.tp, 2), jnp.int32)
    return _compiled(copy, group, (_extents(dims, group, extent_pages), ids), donated=(0,))


def compile_page_read(
    dims: ModelDims, group: SubMesh, extent_pages: tuple[int, ...], num_pages: int
) -> jax.stages.Compiled:
    """Compile a program `(extents, ids) -> contents` that reads up to `num_pages` pages of one layer on every rank.

    Row i of `ids`, `[tp, num_pages]`, has the ids of the pages that rank i reads. For a negative id, the contents are
    arbitrary. `contents` is `[tp * num_pages, page_elems / tp]`.
    """
    starts = _first_ids(group, extent_pages)

    def read(extents: list[jax.Array], ids: jax.Array) -> jax.Array:
        return read_pages(extents, starts, group.tp, ids[0])

    ids = jax.ShapeDtypeStruct((group.tp, num_pages), jnp.int32)
    return _compiled(read, group, (_extents(dims, group, extent_pages), ids), donated=())


def compile_page_write(
    dims: ModelDims, group: SubMesh, extent_pages: tuple[int, ...], num_pages: int
) -> jax.stages.Compiled:
    """Compile a program `(extents, ids, contents) -> extents` that writes pages of one layer on every rank.

    `contents` is the result of the program of `compile_page_read`. Row i of `ids`, `[tp, num_pages]`, has the ids of
    the pages that rank i writes. For a negative id, nothing is written. `extents` are donated.
    """
    starts = _first_ids(group, extent_pages)

    def write(extents: list[jax.Array], ids: jax.Array, contents: jax.Array) -> list[jax.Array]:
        return write_pages(extents, starts, group.tp, ids[0], contents)

    ids = jax.ShapeDtypeStruct((group.tp, num_pages), jnp.int32)
    shape = (group.tp * num_pages, dims.pages.page_elems // group.tp)
    contents = jax.ShapeDtypeStruct(shape, jnp.dtype(dims.dtype))
    return _compiled(write, group, (_extents(dims, group, extent_pages), ids, contents), donated=(0,))


def _first_ids(group: SubMesh, extent_pages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate((pages * group.tp for pages in extent_pages), initial=0))


def _extents(dims: ModelDims, group: SubMesh, extent_pages: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    shapes = [(group.tp * pages, dims.pages.page_elems) for pages in extent_pages]
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dims.dtype)) for shape in shapes]


def _compiled(
    function: Callable[..., Any], group: SubMesh, arguments: tuple[Any, ...], donated: tuple[int, ...]
) -> jax.stages.Compiled:
    mapped = jax.shard_map(
        function, mesh=group.mesh, in_specs=(P(TP_AXIS),) * len(arguments), out_specs=P(TP_AXIS), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=donated, in_shardings=group.sharded, out_shardings=group.sharded)
    return jitted.lower(*arguments).compile()
