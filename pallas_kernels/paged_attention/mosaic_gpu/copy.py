"""Copying warpgroup of the Mosaic GPU kernel.

It copies KV pages to shared memory before the computing warpgroups need them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu.variant import ROWS, Item, Refs, Variant, extent_range


def copy_item(v: Variant, refs: Refs, scratch: dict, number: jax.Array, item: Item, step: jax.Array) -> None:
    @pl.when(number > 0)
    def _wait_for_queries():
        plgpu.barrier_wait(scratch["queries_free"])

    rows = min(v.rows, ROWS)
    for part in range(v.parts):
        tile = item.tile * v.parts + part
        heads_tile = item.head * (v.tiles * v.parts) + tile
        ready = scratch["queries_ready"]
        source = refs.queries.at[item.batch * (v.kv_heads * v.tiles * v.parts) + heads_tile]
        plgpu.copy_gmem_to_smem(source, scratch["queries"].at[part, pl.ds(0, rows)], ready)
        positions = refs.row_positions.at[item.batch * (v.tiles * v.parts) + tile]
        plgpu.copy_gmem_to_smem(positions, scratch["positions"].at[part], ready)
        if v.has_sinks:
            plgpu.copy_gmem_to_smem(refs.sinks.at[heads_tile], scratch["sinks"].at[part], ready)

    before = jnp.int32(0)
    for extent in range(v.num_extents):
        begin, start, stop, count = extent_range(refs, item, extent, before)
        first_step = step + before - item.first

        @pl.when(start < stop)
        def _copy(extent=extent, begin=begin, start=start, stop=stop, first_step=first_step):
            _copy_extent(v, refs, scratch, item, extent, begin, start, stop, first_step)

        before += count


def _copy_extent(
    v: Variant,
    refs: Refs,
    scratch: dict[str, Any],
    item: Item,
    extent: int,
    begin: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    first_step: jax.Array,
) -> None:
    pages = refs.extents[extent]
    units = refs.num_pages[item.batch, extent] * v.units_per_page

    def look_up(block: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        found = []
        for place in range(v.units_per_block):
            # Behind the end the last unit is read again, from cache. Its keys are masked.
            unit = jnp.minimum(block * v.units_per_block + place, units - 1)
            page = lax.div(unit, jnp.int32(v.units_per_page))
            found.append((refs.page_ids[item.batch, extent, page], lax.rem(unit, jnp.int32(v.units_per_page))))
        return tuple(found)

    def block(index: jax.Array, found: tuple[tuple[jax.Array, jax.Array], ...]):
        step = first_step + index
        slot = lax.rem(step, jnp.int32(v.stages))
        for kv, name in enumerate(("keys", "values")):

            @pl.when(step >= v.stages)
            def _wait(name=name):
                plgpu.barrier_wait(scratch[f"{name}_free"].at[slot])

            for place, (page, piece) in enumerate(found):
                row = v.layout.row(
                    page,
                    item.head,
                    kv,
                    piece,
                    num_rows=pages.shape[0],
                    kv_heads=v.kv_heads,
                    pieces=v.units_per_page,
                )
                source = pages.at[row, :, item.head] if v.layout.heads_inside_tokens else pages.at[row]
                target = scratch[name].at[slot, pl.ds(place * v.unit_tokens, v.unit_tokens)]
                plgpu.copy_gmem_to_smem(source, target, scratch[f"{name}_ready"].at[slot])
        return look_up(begin + index + 1)  # before the next wait, which hides the latency of the look-up

    lax.fori_loop(start, stop, block, look_up(begin + start))


def drain(v: Variant, scratch: dict[str, Any], steps: jax.Array) -> None:
    """Wait until the computing warpgroups have read all `steps` blocks that were copied.

    Each completion of a barrier needs a wait before the kernel ends.
    """
    plgpu.barrier_wait(scratch["queries_free"])
    for slot in range(v.stages):

        @pl.when(steps > slot)
        def _wait(slot=slot):
            plgpu.barrier_wait(scratch["keys_free"].at[slot])
            plgpu.barrier_wait(scratch["values_free"].at[slot])
