"""Body of the Mosaic GPU kernel: attention of tiles of query rows over the pages of their sequences.

The kernel's work is divided into items. An *item* is a tile of query rows of one KV head, with one part (split) of the
keys. The kernel starts at most one thread block for each processor, and the thread blocks take items in turn. In a
thread block, one or two warpgroups compute, and one warpgroup issues copies (TMA).

A *stage* is a buffer in shared memory. It holds one *block*: the keys and values of `block_tokens` tokens. One copy
into a stage is a *unit*: a page, or `block_tokens` tokens of a larger page. All units of a block are from one KV buffer
(extent), so the last block of an extent may be only partly full. Several extents have no other cost.

    computing    wait K -> Q K^T -> free K -> scale, cap, mask, softmax -> wait V -> P V -> free V
    copying      wait free -> look up pages -> copy K, V           (runs ahead, into the next item)

There are two ways to divide work between two computing warpgroups. For prefill, each warpgroup has its own 64 query
rows, and both use every stage. For decode (`split_keys`), both warpgroups have the same 64 rows and take stages in
turn, because one warpgroup computes more slowly than memory delivers the keys.

A stage may have *hidden* tokens, which no query of the tile sees. Their keys and values may be NaN, because other
sequences used the pages before. The scores become -inf and the weights zero, but zero times a NaN value is still NaN.
In the few stages with hidden tokens, their rows of V are therefore set to zero before the product.
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
    """Run the kernel in one warpgroup. The grid axis is `block`, and the thread axis is `wg` (warpgroup)."""
    worker = lax.axis_index("wg")
    # Three warpgroups start with 168 registers per thread. The copying one needs few and passes them to the others.
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
    """Call `run(number, item, step)` for each item (piece of work) of this thread block.

    `number` is the index of the item in this thread block. `step` is the number of blocks of keys in the earlier items
    of this thread block. Return the number of blocks of keys in all items of this thread block.
    """
    block = lax.axis_index("block")

    def body(n: jax.Array, step: jax.Array) -> jax.Array:
        rest = block + n * v.thread_blocks
        rest, split = lax.div(rest, jnp.int32(v.splits)), lax.rem(rest, jnp.int32(v.splits))
        rest, head = lax.div(rest, jnp.int32(v.kv_heads)), lax.rem(rest, jnp.int32(v.kv_heads))
        tile, batch = lax.div(rest, jnp.int32(v.batch)), lax.rem(rest, jnp.int32(v.batch))
        tile = v.tiles - 1 - tile  # tiles with the most keys first, so that all thread blocks end together
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
