"""Compile-time parameters and arguments of the Mosaic GPU kernel."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.layouts import PageLayout

ROWS = 64
"""Query rows of a warpgroup: the rows of one `wgmma`."""


@dataclass(frozen=True)
class Variant:
    """Compile-time parameters of the kernel, in addition to the shapes of its arguments. `kernel` defines the terms.

    Attributes:
        batch: number of sequences.
        kv_heads: number of KV heads.
        tiles: number of tiles of query rows for each sequence and KV head.
        head_dim: elements of a head.
        rows: number of used query rows of a warpgroup, at most 64. Other rows are neither read nor written.
        page_size: tokens in a page.
        num_extents: number of KV buffers (extents). Each extent is a separate argument.
        splits: number of parts into which the keys of a tile are divided.
        block_tokens: number of keys in a stage, a multiple of 64.
        stages: number of stages in shared memory; with `split_keys` a multiple of `warpgroups`.
        warpgroups: number of computing warpgroups, 1 or 2.
        split_keys: whether warpgroups share query rows and take stages in turn. False: each warpgroup has its own rows.
        thread_blocks: number of thread blocks, at most one for each processor of the device.
        scale: factor on scores.
        sliding_window: number of positions that a query sees, or None.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, or None.
        has_sinks: whether sinks are given.
        has_scales: whether scales of keys and values are given.
        dtype: dtype of the operands of matrix products. fp8 keys and values are converted to this dtype.
        kv_dtype: dtype of stored keys and values.
        result_dtype: dtype of the result.
        layout: memory order of the extents.
        interpret: whether the kernel is interpreted on CPU, without register layouts and with plain products.
    """

    batch: int
    kv_heads: int
    tiles: int
    head_dim: int
    rows: int
    page_size: int
    num_extents: int
    splits: int
    block_tokens: int
    stages: int
    warpgroups: int
    split_keys: bool
    thread_blocks: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_sinks: bool
    has_scales: bool
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    result_dtype: jnp.dtype
    layout: PageLayout
    interpret: bool

    @property
    def parts(self) -> int:
        """Number of groups of 64 query rows in a tile."""
        return 1 if self.split_keys else self.warpgroups

    @property
    def partials(self) -> int:
        """Number of partial results of a tile, which must be merged. 1: the kernel writes the final result."""
        return self.splits * (self.warpgroups if self.split_keys else 1)

    @property
    def items(self) -> int:
        return self.tiles * self.batch * self.kv_heads * self.splits

    @property
    def unit_tokens(self) -> int:
        return min(self.page_size, self.block_tokens)

    @property
    def units_per_block(self) -> int:
        return self.block_tokens // self.unit_tokens

    @property
    def units_per_page(self) -> int:
        return self.page_size // self.unit_tokens

    @property
    def converts(self) -> bool:
        """Whether keys and values are converted to another dtype before they are multiplied. True for fp8."""
        return self.kv_dtype != self.dtype

    @property
    def copies_values(self) -> bool:
        """Whether each warpgroup copies values to a buffer of its own before it changes them.

        Values are copied if they are converted to another dtype. They are also copied if two warpgroups read the same
        stage, because each warpgroup may set rows of values to zero.
        """
        return self.converts or (self.warpgroups > 1 and not self.split_keys)

    @property
    def chunk(self) -> int:
        """Number of columns of a head that are computed at once.

        At most 128: registers cannot hold both a result and an update of 256 columns.
        """
        return min(self.head_dim, 128)

    @property
    def store_chunk(self) -> int:
        """Number of columns of the output that are written at once."""
        return 64 if self.head_dim % 64 == 0 else self.head_dim

    @property
    def out_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32) if self.partials > 1 else self.result_dtype

    def scratch(self) -> dict[str, Any]:
        """Return the shared memory and the barriers of a thread block, by name."""
        h, groups, stage_shape = self.head_dim, self.warpgroups, (self.stages, self.block_tokens, self.head_dim)
        operand = _tiled((groups, self.block_tokens, h), self.dtype)
        stage = _tiled(stage_shape, self.kv_dtype)
        ready = plgpu.Barrier(num_arrivals=self.units_per_block, num_barriers=self.stages)
        free = plgpu.Barrier(num_arrivals=1 if self.split_keys else groups, num_barriers=self.stages)
        scratch = {
            "queries": _tiled((self.parts, ROWS, h), self.dtype),
            "positions": plgpu.SMEM((self.parts, ROWS), jnp.int32),
            "sinks": plgpu.SMEM((self.parts, ROWS), jnp.float32) if self.has_sinks else None,
            "keys": stage,
            "values": stage,
            "key_operand": operand if self.converts else None,
            "value_operand": operand if self.copies_values else None,
            "out": _tiled((groups, ROWS, self.store_chunk), self.out_dtype),
            "statistics": plgpu.SMEM((groups, 2, ROWS), jnp.float32) if self.partials > 1 else None,
            "queries_ready": plgpu.Barrier(num_arrivals=self.parts * (2 + self.has_sinks)),
            "queries_free": plgpu.Barrier(num_arrivals=groups),
            "keys_ready": ready,
            "values_ready": ready,
            "keys_free": free,
            "values_free": free,
        }
        return {name: ref for name, ref in scratch.items() if ref is not None}


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a declaration of shared memory in the tiles that `wgmma` reads.

    The tiles have the widest swizzle that divides a row. If no swizzle divides a row, there are no tiles.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next((s for s in (128, 64, 32) if shape[-1] * itemsize % s == 0), None)
    if swizzle is None:  # 80 elements of fp8: converted first, never read by `wgmma`
        return plgpu.SMEM(shape, dtype)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Refs(NamedTuple):
    """Arguments and results of the kernel in global memory.

    Attributes:
        queries: `[M, rows, h]` packed queries, where `M` is B x K x tiles x parts (`Variant.parts`), in this order.
        row_positions: int32 `[B x tiles x parts, 64]` positions of the rows, -1 for padding.
        tile_positions: int32 `[B, tiles, 2]` lowest and highest position of the rows of a tile, without padding.
        blocks: int32 `[B, tiles, extents, 2]` range of blocks that a tile needs in each KV buffer (extent): the first
            block, and the number of blocks.
        page_ids: int32 `[B, extents, W]` page ids.
        page_positions: int32 `[B, extents, W]` logical positions of the pages.
        num_pages: int32 `[B, extents]` number of pages.
        sinks: f32 `[K x tiles x parts, 64]` sinks times log2(e), or None.
        scales: f32 `[2, K]` scales of keys and values, or None.
        extents: KV buffers as returned by `PageLayout.rows`.
        out: `[partials x M, rows, h]` results. With several partials, the results are f32 and not yet divided by the
            sum of weights.
        statistics: f32 `[partials x M, 2, 64]` maximum score times log2(e) and sum of weights, or None.
    """

    queries: Any
    row_positions: Any
    tile_positions: Any
    blocks: Any
    page_ids: Any
    page_positions: Any
    num_pages: Any
    sinks: Any
    scales: Any
    extents: tuple[Any, ...]
    out: Any
    statistics: Any


@dataclass(frozen=True)
class Item:
    """Work of a thread block: one tile of query rows, with one part (split) of its keys.

    The blocks of keys that the tile needs are numbered through all KV buffers (extents). The split has the blocks
    `range(first, last)`.
    """

    batch: jax.Array
    head: jax.Array
    tile: jax.Array
    split: jax.Array
    first: jax.Array
    last: jax.Array


def extent_range(refs: Refs, item: Item, extent: Any, before: jax.Array) -> tuple[jax.Array, ...]:
    """Return `(begin, start, stop, count)`: the blocks that an item needs and computes in one KV buffer (extent).

    The tile of the item needs the blocks `range(begin, begin + count)` of the extent. Of these blocks, the item
    computes `range(begin + start, begin + stop)`. `before` is the sum of `count` over all earlier extents.
    """
    begin, count = (refs.blocks[item.batch, item.tile, extent, field] for field in range(2))
    start = jnp.minimum(jnp.maximum(item.first - before, 0), count)
    stop = jnp.minimum(jnp.maximum(item.last - before, 0), count)
    return begin, start, stop, count
