"""The Mosaic GPU kernel: tiles of query rows, each of one KV head, against the pages of their sequences.

As many blocks of threads as the device has processors take *items* in turn: a tile of query rows, and one of the
splits of the keys it sees. In a block of threads one or two warpgroups compute and one issues copies (TMA). A *stage*
of shared memory holds `block_tokens` keys and values gathered from pages, one copy for each *unit*: a page, or a piece
of `block_tokens` tokens of a larger page. A stage never mixes extents. The computing warpgroups know of pages only the
position of each unit's first token, so a list of extents costs them nothing but stages that are not full.

    computing    wait K -> Q K^T -> free K -> scale, cap, mask, softmax -> wait V -> P V -> free V
    copying      wait free -> look up pages -> copy K, V           (runs ahead, into the next item)

Two computing warpgroups either have 64 query rows each and share every stage (prefill), or the same 64 rows and take
stages in turn (`split_keys`: decode, where one alone would not keep up with memory).

Keys that no query of the tile sees may be any bits, as pages come from other owners. Their scores are replaced by
-inf, but a weight of zero times NaN is NaN. So in the few stages where such keys can be, the rows of V without weight
are replaced by zeros in shared memory before they are multiplied.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu.compute import compute_item
from pallas_kernels.paged_attention.mosaic_gpu.copy import copy_item, drain
from pallas_kernels.paged_attention.mosaic_gpu.variant import Item, Refs, Variant


def attend(v: Variant, refs: Refs, scratch: dict[str, Any]) -> None:
    """The kernel's body. Grid axis `block`, thread axis `wg`."""
    worker = lax.axis_index("wg")
    # Three warpgroups start with 168 registers a thread, of which the copying one needs few. Two have all they can use.
    share_registers = v.warpgroups == 2

    @pl.when(worker == v.warpgroups)
    def _copy():
        if share_registers:
            plgpu.set_max_registers(40, action="decrease")
        steps = _for_items(v, refs, lambda n, item, step: copy_item(v, refs, scratch, n, item, step))
        drain(v, scratch, steps)

    @pl.when(worker < v.warpgroups)
    def _compute():
        if share_registers:
            plgpu.set_max_registers(232, action="increase")
        _for_items(v, refs, lambda n, item, step: compute_item(v, refs, scratch, worker, item, step))


def _for_items(v: Variant, refs: Refs, run: Callable[[jax.Array, Item, jax.Array], None]) -> jax.Array:
    """Calls `run(number, item, step)` for the items of this block of threads; `step` counts their stages.

    Returns how many stages there were.
    """
    block = lax.axis_index("block")

    def body(n: jax.Array, step: jax.Array) -> jax.Array:
        rest = block + n * v.thread_blocks
        rest, split = lax.div(rest, jnp.int32(v.splits)), lax.rem(rest, jnp.int32(v.splits))
        rest, head = lax.div(rest, jnp.int32(v.kv_heads)), lax.rem(rest, jnp.int32(v.kv_heads))
        tile, batch = lax.div(rest, jnp.int32(v.batch)), lax.rem(rest, jnp.int32(v.batch))
        tile = v.tiles - 1 - tile  # later tiles see more keys: those first, so that all end together
        total = jnp.int32(0)
        for extent in range(v.num_extents):
            total += refs.blocks[batch, tile, extent, 1]
        share = lax.div(total + v.splits - 1, jnp.int32(v.splits))
        first = jnp.minimum(split * share, total)
        last = jnp.minimum(first + share, total)
        run(n, Item(batch, head, tile, split, first, last), step)
        return step + last - first

    count = lax.div(v.items - block + v.thread_blocks - 1, jnp.int32(v.thread_blocks))
    return lax.fori_loop(0, count, body, jnp.int32(0))
