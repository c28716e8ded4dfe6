"""Paged attention in plain XLA operations, for CPU and for all calls that the GPU kernel does not support.

The softmax runs online over blocks of pages. Each block is gathered, used and discarded, so that the data in use stay
in the CPU cache. One loop reads the first KV buffer (extent), and a second loop reads all other extents.

A loop ends after the last page of the sequence with the most pages in the extents of the loop. One executable therefore
serves every context length, and unused table entries cost nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.paged_attention.base import Options, PageTable, visible
from pallas_kernels.paged_attention.layouts import PageLayout


def block_tokens(batch: int, kv_heads: int) -> int:
    """Return the number of tokens of each sequence that one iteration of `xla_paged_attention` gathers.

    Small blocks suffer from loop overhead, and large blocks do not fit the L2 cache. The best sizes were measured for
    decode on 2 cores (f32, head size 64, 2,048 tokens): 32 tokens for 16 sequences with 8 KV heads, and 128 tokens for
    8 sequences with 4 KV heads. 128 is the maximum, because short contexts would waste most of a larger block.
    """
    return min(128, max(32, 4096 // (batch * kv_heads)))


def xla_paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[Shaped[Array, "_ _ _ _ h"]],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    options: Options,
) -> Float[Array, "B T H h"]:
    """Compute the result of `reference_paged_attention`, one block of pages at a time. Sums are in f32."""
    batch, length, heads, head_dim = queries.shape
    kv_heads = PageLayout.of(options.stride_order).logical_shape(extents[0].shape)[1]
    group = heads // kv_heads
    # [B, K, T*G, h]: all queries of a KV head are rows of one matrix product.
    rows = queries.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, length * group, head_dim)
    if options.sinks is None:
        max_logit = jnp.full((batch, kv_heads, length * group), -jnp.inf, jnp.float32)
        total = jnp.zeros((batch, kv_heads, length * group), jnp.float32)
    else:  # the softmax starts with the sink, a score without a value
        sinks = jnp.tile(options.sinks.astype(jnp.float32).reshape(kv_heads, group), (1, length))
        max_logit = jnp.broadcast_to(sinks, (batch, kv_heads, length * group))
        total = jnp.ones((batch, kv_heads, length * group), jnp.float32)
    carry = (jnp.zeros((batch, kv_heads, length * group, head_dim), jnp.float32), max_logit, total)
    # Most pages are in the first extent; the others hold released weights. Gathering from several extents is slower,
    # and each loop runs as long as the sequence with the most pages in its extents needs.
    carry = _accumulate(carry, rows, extents[:1], tables[:1], query_positions, options)
    if len(extents) > 1:
        carry = _accumulate(carry, rows, extents[1:], tables[1:], query_positions, options)
    out, _, total = carry
    out = out / jnp.where(total > 0, total, 1)[..., None]
    if options.kv_scales is not None:
        out = out * options.kv_scales[1, :, None, None]
    out = out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, length, heads, head_dim).astype(queries.dtype)


class _Pages(NamedTuple):
    """Page tables of several KV buffers (extents), side by side in one table with a row for each sequence."""

    ids: Int32[Array, "B columns"]
    """Page ids of all tables. A page id is the index of the page in its extent."""
    positions: Int32[Array, "B columns"]
    """Logical positions of these pages."""
    ends: Int32[Array, "B extents"]
    """For each extent: number of pages of a sequence in this extent and all earlier extents together."""
    offsets: Int32[Array, "B extents"]
    """For each extent: the offset in `column of a page in ids = number of the page + offset`.

    Pages of a sequence are numbered through all extents, without padding.
    """

    @classmethod
    def of(cls, tables: Sequence[PageTable], block: int) -> "_Pages":
        """Concatenate the tables of several KV buffers. The result is padded to whole blocks of `block` pages."""
        widths = [table.page_ids.shape[1] for table in tables]
        counts = jnp.stack([table.num_pages for table in tables], axis=1)
        ends = jnp.cumsum(counts, axis=1)
        starts = jnp.asarray([sum(widths[:extent]) for extent in range(len(tables))], jnp.int32)
        padding = jnp.zeros((len(counts), -sum(widths) % block), jnp.int32)
        ids = jnp.concatenate([*(table.page_ids for table in tables), padding], axis=1)
        positions = jnp.concatenate([*(table.page_positions for table in tables), padding], axis=1)
        return cls(ids, positions, ends, starts - (ends - counts))

    def block(self, index: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return `(extents, ids, positions)` of the pages in block `index`, each an array `[B, size]`.

        `extents` has the index of the KV buffer of each page. Position -1 marks padding.
        """
        place = jnp.broadcast_to(index * size + jnp.arange(size, dtype=jnp.int32), (self.ids.shape[0], size))
        if self.ends.shape[1] == 1:  # same result as below, faster
            ids = lax.dynamic_slice_in_dim(self.ids, index * size, size, axis=1)
            positions = lax.dynamic_slice_in_dim(self.positions, index * size, size, axis=1)
            return jnp.zeros_like(ids), ids, jnp.where(place < self.ends, positions, -1)
        extent = jnp.sum(place[:, :, None] >= self.ends[:, None, :-1], axis=2, dtype=jnp.int32)
        column = place + jnp.take_along_axis(self.offsets, extent, axis=1)
        ids = jnp.take_along_axis(self.ids, column, axis=1, mode="clip")
        positions = jnp.take_along_axis(self.positions, column, axis=1, mode="clip")
        return extent, ids, jnp.where(place < self.ends[:, -1:], positions, -1)


def _accumulate(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    rows: jax.Array,
    extents: Sequence[jax.Array],
    tables: Sequence[PageTable],
    query_positions: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Continue the online softmax over the pages of some KV buffers (extents). Return the new state.

    Args:
        carry: f32 state of the softmax: weighted sum of values `[B, K, T * H / K, h]`, maximum score so far and sum of
            weights, each `[B, K, T * H / K]`.
        rows: queries `[B, K, T * H / K, h]`. All queries of a KV head are rows of one matrix.
        extents: KV buffers of pages.
        tables: pages of the sequences in each extent.
        query_positions: `[B, T]` position of each query; -1 for padding.
        options: options of attention.
    """
    batch, kv_heads, num_rows, head_dim = rows.shape
    length = query_positions.shape[1]
    group = num_rows // length
    layout = PageLayout.of(options.stride_order)
    page_size = layout.logical_shape(extents[0].shape)[3]
    widest = max(table.page_ids.shape[1] for table in tables)
    block = min(max(block_tokens(batch, kv_heads) // page_size, 1), widest)
    pages = _Pages.of(tables, block)

    # In header-centric order a tile (page, head, key or value) is contiguous, so a gather of whole rows of this view
    # returns a block in [B, K, block, S, h] order. (With the head as a slice dimension of the gather, XLA copied the
    # whole extent if a rank had one KV head.) In the other orders a row has all heads, and the block is transposed.
    views = [layout.rows(extent, page_size) for extent in extents]
    views = [view.reshape(view.shape[0], -1) for view in views]
    heads = jnp.arange(kv_heads)[:, None]

    def gather(extent: jax.Array, ids: jax.Array, key_or_value: int) -> jax.Array:
        if not layout.heads_inside_tokens:
            ids, extent = ids[:, None, :], extent[:, None, :]

        def tiles(view: jax.Array) -> jax.Array:
            index = layout.row(ids, heads, key_or_value, 0, num_rows=view.shape[0], kv_heads=kv_heads, pieces=1)
            return view.at[index].get(mode="clip")  # [B, K, block, S*h], or [B, block, S*K*h]

        # XLA fuses this into one kernel that reads all extents at the same ids and selects one of them.
        picked = tiles(views[0])
        for number, view in enumerate(views[1:], start=1):
            picked = jnp.where((extent == number)[..., None], tiles(view), picked)
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
        extent, ids, places = pages.block(index, block)
        key_positions = places[:, :, None] * page_size + jnp.arange(page_size)
        key_positions = jnp.where(places[:, :, None] >= 0, key_positions, -1).reshape(batch, -1)
        mask = visible(key_positions, query_positions, options.sliding_window)  # [B, T, keys]
        live = jnp.any(mask, axis=1)[:, None, :, None]
        mask = jnp.broadcast_to(mask[:, None, :, None], (batch, 1, length, group, mask.shape[-1]))
        mask = mask.reshape(batch, 1, num_rows, -1)
        precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        scores = jnp.einsum(
            "bkmh,bknh->bkmn", rows, gather(extent, ids, 0), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, scaled(scores), -jnp.inf)
        new_max = jnp.maximum(max_logit, scores.max(axis=-1))
        finite_max = jnp.where(new_max == -jnp.inf, 0, new_max)
        weights = jnp.exp(scores - finite_max[..., None])
        decay = jnp.exp(max_logit - finite_max)
        # Slots that no query sees may hold NaN, and zero weight times NaN is NaN.
        value = jnp.where(live, gather(extent, ids, 1), 0)
        update = jnp.einsum(
            "bkmn,bknh->bkmh",
            weights.astype(value.dtype),
            value,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return acc * decay[..., None] + update, new_max, total * decay + weights.sum(axis=-1)

    num_blocks = (jnp.max(pages.ends[:, -1]) + block - 1) // block
    return lax.fori_loop(0, num_blocks, step, carry)
