"""Definition of paged attention, with a plain reference implementation.

Letters: B sequences, T query tokens of each, H query heads, K KV heads, h head size, P pages of an extent (KV buffer),
S page size, W width of a block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.paged_attention.layouts import PageLayout


class PageTable(NamedTuple):
    """Block tables of a batch of sequences, reduced to the pages in one KV buffer (extent). Used entries come first.

    Attributes:
        page_ids: `[B, W]` index of the page in its extent.
        page_positions: `[B, W]` logical position of the page in its sequence. A page at position p holds the tokens
            `range(p * S, (p + 1) * S)`.
        num_pages: `[B]` number of used entries of each row.
    """

    page_ids: Int32[Array, "B W"]
    page_positions: Int32[Array, "B W"]
    num_pages: Int32[Array, " B"]


@dataclass(frozen=True)
class Options:
    """Options of attention, equal for all implementations.

    Attributes:
        scale: factor on the scores, usually `h ** -0.5`.
        sliding_window: number of positions that a query sees, including its own. None: no limit.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before masks and sinks (Gemma 2). None: unchanged.
        sinks: `[H]` one extra score for each query head, which takes part in the softmax but has no value (gpt-oss).
        kv_scales: f32 `[2, K]` factors on stored keys and values of each KV head (fp8 caches).
        stride_order: memory order of the KV pages, the value of a `PageLayout`.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Float[Array, " H"] | None = None
    kv_scales: Float[Array, "2 K"] | None = None
    stride_order: tuple[int, ...] = PageLayout.HEADER_CENTRIC.value


def visible(
    key_positions: Int32[Array, "B keys"], query_positions: Int32[Array, "B T"], sliding_window: int | None
) -> jax.Array:
    """Return a mask `[B, T, keys]` that is True for the keys that each query attends to.

    A query attends to the keys of its sequence at its own and earlier positions. If `sliding_window` is given, the
    query attends only to the last `sliding_window` of these keys. Position -1 marks a padding key or query.
    """
    keys, queries = key_positions[:, None, :], query_positions[:, :, None]
    mask = (keys >= 0) & (keys <= queries)
    if sliding_window is not None:
        mask &= keys > queries - sliding_window
    return mask


def reference_paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[Shaped[Array, "_ _ _ _ h"]],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    options: Options,
) -> Float[Array, "B T H h"]:
    """Compute causal attention over paged keys and values, by one softmax over all gathered pages.

    Query head i uses KV head `i // (H // K)`. The output of a query at position -1 (padding) is zero. Sums are in f32,
    and the result has the dtype of the queries.
    """
    batch, length, heads, head_dim = queries.shape
    layout = PageLayout.of(options.stride_order)
    keys, values, positions = [], [], []
    for extent, table in zip(extents, tables, strict=True):
        logical = extent.transpose(layout.value)
        kv_heads, page_size = logical.shape[1], logical.shape[3]
        pages = logical[table.page_ids].astype(jnp.float32)  # [B, W, K, 2, S, h]
        keys.append(pages[:, :, :, 0].swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim))
        values.append(pages[:, :, :, 1].swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim))
        used = jnp.arange(table.page_ids.shape[1]) < table.num_pages[:, None]
        token = table.page_positions[:, :, None] * page_size + jnp.arange(page_size)
        positions.append(jnp.where(used[:, :, None], token, -1).reshape(batch, -1))
    key, value = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
    mask = visible(jnp.concatenate(positions, axis=1), query_positions, options.sliding_window)[:, None, None]
    grouped = queries.reshape(batch, length, key.shape[1], -1, head_dim).astype(jnp.float32) * options.scale
    key = jnp.where(
        jnp.any(mask, axis=3)[:, 0, 0, None, :, None], key, 0
    )  # unseen keys may be NaN, and zero times NaN is NaN
    value = jnp.where(jnp.any(mask, axis=3)[:, 0, 0, None, :, None], value, 0)
    if options.kv_scales is not None:
        key = key * options.kv_scales[0, :, None, None]
        value = value * options.kv_scales[1, :, None, None]
    scores = jnp.einsum("btkgh,bknh->bkgtn", grouped, key, precision="highest")
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    max_logit = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    sink = jnp.zeros(())
    if options.sinks is not None:
        sink = options.sinks.astype(jnp.float32).reshape(1, key.shape[1], -1, 1, 1)
        max_logit = jnp.maximum(max_logit, sink)
        sink = jnp.exp(sink - max_logit)
    weights = jnp.exp(scores - max_logit)
    total = weights.sum(-1, keepdims=True) + sink
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
    out = jnp.einsum("bkgtn,bknh->btkgh", weights, value, precision="highest")
    return out.reshape(batch, length, heads, head_dim).astype(queries.dtype)
