"""What paged attention computes, and a plain reference for it.

Letters: B sequences, T query tokens of each, H query heads, K KV heads, h head size, P pages of an extent,
S page size, W width of a block table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class PageTable(NamedTuple):
    """Pages of one extent that a batch of sequences uses, packed to the left.

    Attributes:
        page_ids: `[B, W]` index of the page within its extent.
        page_positions: `[B, W]` logical place of that page in its sequence: it holds tokens
            `position*S .. (position+1)*S`.
        num_pages: `[B]` how many entries of a row are used.
    """

    page_ids: Int32[Array, "B W"]
    page_positions: Int32[Array, "B W"]
    num_pages: Int32[Array, " B"]


def check_arguments(
    queries: jax.Array, extents: Sequence[jax.Array], tables: Sequence[PageTable], query_positions: jax.Array
) -> None:
    """Raise `ValueError` for shapes or dtypes that do not fit together."""
    if not extents or len(extents) != len(tables):
        raise ValueError(f"{len(extents)} extents and {len(tables)} page tables: one table per extent, at least one")
    batch, length, heads, head_dim = queries.shape
    if query_positions.shape != (batch, length):
        raise ValueError(f"query_positions {query_positions.shape} must be [B, T] = {(batch, length)}")
    if len(counts := {extent.shape[1] for extent in extents}) > 1:
        raise ValueError(f"extents have {' and '.join(map(str, sorted(counts)))} KV heads: all must have the same")
    for extent, table in zip(extents, tables, strict=True):
        _, kv_heads, two, page_size, extent_dim = extent.shape
        if two != 2 or extent_dim != head_dim or extent.dtype != queries.dtype:
            raise ValueError(
                f"extent {extent.dtype}{extent.shape} does not fit queries {queries.dtype}{queries.shape}: it must "
                "be [pages, KV heads, 2, page size, head size] of the same dtype and head size"
            )
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot be grouped over {kv_heads} KV heads")
        if page_size & (page_size - 1):
            raise ValueError(f"page size {page_size} must be a power of two")
        shapes = (table.page_ids.shape, table.page_positions.shape, table.num_pages.shape)
        width = table.page_ids.shape[-1]
        if shapes != ((batch, width), (batch, width), (batch,)) or width < 1:
            raise ValueError(
                f"page table {shapes} must be ids [B={batch}, W], positions [B, W] and page counts [B], "
                "with W at least 1"
            )


def visible(
    key_positions: Int32[Array, "B N"], query_positions: Int32[Array, "B T"], sliding_window: int | None
) -> jax.Array:
    """`[B, T, N]`: which keys a query attends to. Position -1 marks padding, on either side."""
    keys, queries = key_positions[:, None, :], query_positions[:, :, None]
    mask = (keys >= 0) & (keys <= queries)
    if sliding_window is not None:
        mask &= keys > queries - sliding_window
    return mask


def reference_paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[Float[Array, "_ K 2 S h"]],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "B T H h"]:
    """Causal attention of queries over paged keys and values: gathers everything, then one softmax.

    Query head i attends with KV head `i // (H // K)`. A query at position -1 (padding) gives zeros. Accumulates
    in f32 and returns the queries' dtype.
    """
    batch, length, heads, head_dim = queries.shape
    keys, values, positions = [], [], []
    for extent, table in zip(extents, tables, strict=True):
        kv_heads, page_size = extent.shape[1], extent.shape[3]
        pages = extent[table.page_ids].astype(jnp.float32)  # [B, W, K, 2, S, h]
        keys.append(pages[:, :, :, 0].swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim))
        values.append(pages[:, :, :, 1].swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim))
        used = jnp.arange(table.page_ids.shape[1]) < table.num_pages[:, None]
        token = table.page_positions[:, :, None] * page_size + jnp.arange(page_size)
        positions.append(jnp.where(used[:, :, None], token, -1).reshape(batch, -1))
    key, value = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
    mask = visible(jnp.concatenate(positions, axis=1), query_positions, sliding_window)[:, None, None]
    grouped = queries.reshape(batch, length, key.shape[1], -1, head_dim).astype(jnp.float32) * scale
    key = jnp.where(jnp.any(mask, axis=3)[:, 0, 0, None, :, None], key, 0)  # garbage times zero may be NaN
    value = jnp.where(jnp.any(mask, axis=3)[:, 0, 0, None, :, None], value, 0)
    scores = jnp.einsum("btkgh,bknh->bkgtn", grouped, key, precision="highest")
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
    out = jnp.einsum("bkgtn,bknh->btkgh", weights, value, precision="highest")
    return out.reshape(batch, length, heads, head_dim).astype(queries.dtype)
