"""Paged attention in plain XLA operations, for CPU and as the fallback everywhere else.

Online softmax over blocks of pages, extent after extent: a block is gathered, used and forgotten, so the working
set stays in cache. The number of blocks is read at run time from the longest sequence of the batch, so one
executable serves every context length and costs nothing for table entries that are not used.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.paged_attention.base import Options, PageTable, visible
from pallas_kernels.paged_attention.layouts import PageLayout


def block_tokens(batch: int, kv_heads: int) -> int:
    """Tokens gathered at a time.

    Measured for decode (2 cores, f32, head size 64, 2,048 tokens): 16 sequences of 8 KV heads are fastest at 32
    tokens, 8 of 4 at 128; one of 4 gains 10% from 256, but short contexts pay for what they do not use of it.
    Fewer make the loop's overhead felt, more fall out of L2.
    """
    return min(128, max(32, 4096 // (batch * kv_heads)))


def xla_paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[Shaped[Array, "_ _ _ _ h"]],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    options: Options,
) -> Float[Array, "B T H h"]:
    """Same contract as `reference_paged_attention`; f32 accumulation."""
    batch, length, heads, head_dim = queries.shape
    kv_heads = PageLayout.of(options.stride_order).logical_shape(extents[0].shape)[1]
    group = heads // kv_heads
    # [B, K, T*G, h]: all queries of a KV head are the rows of one matrix product.
    rows = queries.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, length * group, head_dim)
    if options.sinks is None:
        max_logit = jnp.full((batch, kv_heads, length * group), -jnp.inf, jnp.float32)
        total = jnp.zeros((batch, kv_heads, length * group), jnp.float32)
    else:  # a score without a value, taken in before all keys
        sinks = jnp.tile(options.sinks.astype(jnp.float32).reshape(kv_heads, group), (1, length))
        max_logit = jnp.broadcast_to(sinks, (batch, kv_heads, length * group))
        total = jnp.ones((batch, kv_heads, length * group), jnp.float32)
    carry = (jnp.zeros((batch, kv_heads, length * group, head_dim), jnp.float32), max_logit, total)
    for extent, table in zip(extents, tables, strict=True):
        carry = _accumulate(carry, rows, extent, table, query_positions, options)
    out, _, total = carry
    out = out / jnp.where(total > 0, total, 1)[..., None]
    if options.kv_scales is not None:
        out = out * options.kv_scales[1, :, None, None]
    out = out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, length, heads, head_dim).astype(queries.dtype)


def _accumulate(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    rows: jax.Array,
    extent: jax.Array,
    table: PageTable,
    query_positions: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Continue an online softmax `(sum of weighted values, running maximum, sum of weights)` over one extent."""
    batch, kv_heads, num_rows, head_dim = rows.shape
    length = query_positions.shape[1]
    group = num_rows // length
    layout = PageLayout.of(options.stride_order)
    page_size, width = layout.logical_shape(extent.shape)[3], table.page_ids.shape[1]
    block = min(max(block_tokens(batch, kv_heads) // page_size, 1), width)
    padding = -width % block
    page_ids = jnp.pad(table.page_ids, ((0, 0), (0, padding)))
    page_positions = jnp.pad(table.page_positions, ((0, 0), (0, padding)))

    # A (page, head, key or value) tile is contiguous, so a block is a gather of whole rows of this view, straight
    # into [B, K, block, S, h] order. (A gather with the head as a slice dimension made XLA copy the whole extent
    # where a rank has one KV head.) In the other layouts a row has all heads, and the block is transposed.
    tiles = layout.rows(extent, page_size)
    num_tiles = tiles.shape[0]
    tiles = tiles.reshape(num_tiles, -1)
    heads = jnp.arange(kv_heads)[:, None]

    def gather(ids: jax.Array, key_or_value: int) -> jax.Array:
        if not layout.heads_inside_tokens:
            ids = ids[:, None, :]
        index = layout.row(ids, heads, key_or_value, 0, num_rows=num_tiles, kv_heads=kv_heads, pieces=1)
        picked = tiles.at[index].get(mode="clip")  # [B, K, block, S*h], or [B, block, S*K*h]
        if layout.heads_inside_tokens:
            picked = picked.reshape(batch, -1, kv_heads, head_dim).swapaxes(1, 2)
        return picked.reshape(batch, kv_heads, block * page_size, head_dim).astype(rows.dtype)

    def scaled(scores: jax.Array) -> jax.Array:
        factor = options.scale
        if options.kv_scales is not None:
            factor = factor * options.kv_scales[0, :, None, None]
        scores = scores * factor
        return scores if options.soft_cap is None else options.soft_cap * jnp.tanh(scores / options.soft_cap)

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        acc, max_logit, total = carry
        first = index * block
        ids = lax.dynamic_slice_in_dim(page_ids, first, block, axis=1)
        places = lax.dynamic_slice_in_dim(page_positions, first, block, axis=1)
        used = first + jnp.arange(block) < table.num_pages[:, None]
        key_positions = places[:, :, None] * page_size + jnp.arange(page_size)
        key_positions = jnp.where(used[:, :, None], key_positions, -1).reshape(batch, -1)
        mask = visible(key_positions, query_positions, options.sliding_window)  # [B, T, N]
        live = jnp.any(mask, axis=1)[:, None, :, None]
        mask = jnp.broadcast_to(mask[:, None, :, None], (batch, 1, length, group, mask.shape[-1]))
        mask = mask.reshape(batch, 1, num_rows, -1)
        precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        scores = jnp.einsum(
            "bkmh,bknh->bkmn", rows, gather(ids, 0), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, scaled(scores), -jnp.inf)
        new_max = jnp.maximum(max_logit, scores.max(axis=-1))
        finite_max = jnp.where(new_max == -jnp.inf, 0, new_max)
        weights = jnp.exp(scores - finite_max[..., None])
        decay = jnp.exp(max_logit - finite_max)
        # Slots that no query sees may hold anything: zero weight times NaN would still be NaN.
        value = jnp.where(live, gather(ids, 1), 0)
        update = jnp.einsum(
            "bkmn,bknh->bkmh",
            weights.astype(value.dtype),
            value,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return acc * decay[..., None] + update, new_max, total * decay + weights.sum(axis=-1)

    num_blocks = (jnp.max(table.num_pages) + block - 1) // block
    return lax.fori_loop(0, num_blocks, step, carry)
