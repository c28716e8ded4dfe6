"""Launch of the Mosaic GPU kernel: preparation of its arguments, and merge of its partial results."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.base import Options, PageTable
from pallas_kernels.paged_attention.layouts import PageLayout
from pallas_kernels.paged_attention.mosaic_gpu.compute import LOG2E
from pallas_kernels.paged_attention.mosaic_gpu.kernel import attend
from pallas_kernels.paged_attention.mosaic_gpu.variant import ROWS, Refs, Variant
from pallas_kernels.paged_attention.tuning import (
    SHARED_BYTES,
    KernelConfig,
    KernelShape,
    gpu_device,
    kernel_config,
    shared_bytes,
)


def mosaic_gpu_paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[jax.Array],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    options: Options,
    *,
    config: KernelConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "B T H h"]:
    """Compute the result of `reference_paged_attention` with the GPU kernel. Sums are in f32.

    Args:
        queries: queries, as in `reference_paged_attention`.
        extents: KV buffers (extents) of pages, as in `reference_paged_attention`.
        tables: pages of the sequences in each extent, as in `reference_paged_attention`.
        query_positions: position of each query; -1 for padding.
        options: options of attention.
        config: sizes of the launch. None: sizes from the tuning table.
        interpret: parameters of Pallas' GPU interpreter, which runs the kernel on CPU. None: compile for the GPU.

    Raises:
        ValueError: the sizes need more shared memory than a thread block has.
    """
    layout = PageLayout.of(options.stride_order)
    batch, length, heads, head_dim = queries.shape
    _, kv_heads, _, page_size, _ = layout.logical_shape(extents[0].shape)
    group = heads // kv_heads
    shape = KernelShape(
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        rows=length * group,
        kv_itemsize=extents[0].dtype.itemsize,
        max_tokens=sum(table.page_ids.shape[1] for table in tables) * page_size,
    )
    config = config or kernel_config(shape, gpu_device())
    if (needed := shared_bytes(shape, config)) > SHARED_BYTES:
        raise ValueError(
            f"{config} needs {needed} bytes of shared memory for {shape}; a thread block has {SHARED_BYTES}"
        )
    num_rows = length * group
    tile_rows = ROWS if config.split_keys else ROWS * config.warpgroups
    tiles = -(-num_rows // tile_rows)
    parts = tile_rows // ROWS
    single = tiles == 1 and parts == 1
    rows = min(-(-num_rows // 8) * 8, ROWS) if single else ROWS
    # The hardware converts fp8 only to f16. Queries above 65,504 become infinite.
    operand_dtype = jnp.dtype(jnp.float16) if extents[0].dtype.itemsize == 1 else queries.dtype
    variant = Variant(
        batch=batch,
        kv_heads=kv_heads,
        tiles=tiles,
        head_dim=head_dim,
        rows=rows,
        page_size=page_size,
        num_extents=len(extents),
        splits=config.splits,
        block_tokens=config.block_tokens,
        stages=config.stages,
        warpgroups=config.warpgroups,
        split_keys=config.split_keys,
        thread_blocks=min(config.thread_blocks, tiles * batch * kv_heads * config.splits),
        scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        has_sinks=options.sinks is not None,
        has_scales=options.kv_scales is not None,
        dtype=operand_dtype,
        kv_dtype=extents[0].dtype,
        result_dtype=queries.dtype,
        layout=layout,
        interpret=interpret is not None,
    )
    # [B, K, T*G, h]: the queries of a KV head are rows of one matrix, ordered by token, then by head.
    packed = queries.astype(operand_dtype).reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(batch, kv_heads, num_rows, head_dim)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, tiles * parts * rows - num_rows), (0, 0)))
    positions = jnp.repeat(query_positions, group, axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, tiles * tile_rows - num_rows)), constant_values=-1)
    by_tile = positions.reshape(batch, tiles, tile_rows)
    least = jnp.min(jnp.where(by_tile < 0, jnp.iinfo(jnp.int32).max, by_tile), axis=-1)
    tile_positions = jnp.stack([least, jnp.max(by_tile, axis=-1)], axis=-1)
    width = max(table.page_ids.shape[1] for table in tables)
    page_ids, page_positions = (
        jnp.stack([jnp.pad(t[field], ((0, 0), (0, width - t[field].shape[1]))) for t in tables], axis=1)
        for field in range(2)
    )
    num_pages = jnp.stack([table.num_pages for table in tables], axis=1)
    sinks = scales = None
    if options.sinks is not None:
        sinks = jnp.tile(options.sinks.astype(jnp.float32).reshape(kv_heads, group) * LOG2E, (1, length))
        sinks = jnp.pad(sinks, ((0, 0), (0, tiles * tile_rows - num_rows))).reshape(-1, ROWS)
    if options.kv_scales is not None:
        scales = options.kv_scales.astype(jnp.float32)
    # The barrier copies arguments that are slices of a caller's array. Otherwise XLA passes them at any multiple of 4
    # bytes, but copies to shared memory need multiples of 16, and a launch multiples of 256.
    packed, positions, page_ids, page_positions, num_pages, scales = jax.lax.optimization_barrier(
        (packed, positions, page_ids, page_positions, num_pages, scales)
    )
    arguments = Refs(
        queries=packed.reshape(-1, rows, head_dim),
        row_positions=positions.reshape(-1, ROWS),
        tile_positions=tile_positions,
        blocks=_visible_blocks(variant, page_positions, num_pages, tile_positions),
        page_ids=page_ids,
        page_positions=page_positions,
        num_pages=num_pages,
        sinks=sinks,
        scales=scales,
        extents=tuple(layout.rows(extent, variant.unit_tokens) for extent in extents),
        out=None,
        statistics=None,
    )
    out, statistics = _launch(variant, arguments, interpret)
    if statistics is not None:
        shape = (variant.partials, batch, kv_heads, tiles * parts)
        live = positions.reshape(batch, 1, tiles * parts, ROWS) >= 0
        out = _merge(
            out.reshape(*shape, rows, head_dim), statistics.reshape(*shape, 2, ROWS)[..., :rows], live[..., :rows]
        )
    out = out.reshape(batch, kv_heads, -1, head_dim)[:, :, :num_rows]
    out = out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, length, heads, head_dim).astype(queries.dtype)


def _visible_blocks(
    v: Variant, page_positions: jax.Array, num_pages: jax.Array, tile_positions: jax.Array
) -> Int32[Array, "B tiles extents 2"]:
    """Return the range of key blocks that a tile of queries needs, for each tile and each KV buffer (extent).

    A range is a pair (first block, number of blocks), or (0, 0) if the tile needs no block. The first and the last
    block of a range have keys that a query of the tile attends to. `kernel` defines blocks and tiles. `Refs` has the
    shapes of the arguments.
    """
    starts = page_positions[..., None] * v.page_size + jnp.arange(v.units_per_page) * v.unit_tokens
    used = jnp.arange(page_positions.shape[2]) < num_pages[..., None]
    starts = jnp.where(used[..., None], starts, jnp.iinfo(jnp.int32).max)
    starts = starts.reshape(starts.shape[0], 1, starts.shape[1], -1)  # [B, 1, E, units]
    least, greatest = (tile_positions[:, :, None, None, end] for end in range(2))
    seen = starts <= greatest
    if v.sliding_window is not None:
        seen &= starts > least - v.sliding_window - v.unit_tokens + 1
    block = jnp.arange(starts.shape[-1], dtype=jnp.int32) // v.units_per_block
    first = jnp.min(jnp.where(seen, block, jnp.iinfo(jnp.int32).max), axis=-1)
    last = jnp.max(jnp.where(seen, block, -1), axis=-1)
    count = jnp.where(last < 0, 0, last - first + 1)
    return jnp.stack([jnp.where(last < 0, 0, first), count], axis=-1)


def _launch(v: Variant, arguments: Refs, interpret: Any) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernel. Return its results `(out, statistics)`, which `Refs` describes."""
    # Arguments other than None, in the order of the fields.
    given = [name for name in Refs._fields if getattr(arguments, name) is not None and name != "extents"]
    leaves = [getattr(arguments, name) for name in given]
    num_tiles = arguments.queries.shape[0] * v.partials
    out_type = [jax.ShapeDtypeStruct((num_tiles, *arguments.queries.shape[1:]), v.out_dtype)]
    if v.partials > 1:
        out_type.append(jax.ShapeDtypeStruct((num_tiles, 2, ROWS), jnp.float32))

    def paged_attention_kernel(*refs: Any, **scratch: Any) -> None:
        by_name = dict(zip(given, refs, strict=False))
        rest = refs[len(given) :]
        extents, outs = rest[: v.num_extents], rest[v.num_extents :]
        by_name |= {"extents": extents, "out": outs[0], "statistics": outs[1] if v.partials > 1 else None}
        attend(v, arguments._replace(**by_name), scratch)

    kernel = plgpu.kernel(
        paged_attention_kernel,
        out_type=out_type,
        scratch_types=v.scratch(),
        grid=(v.thread_blocks,),
        grid_names=("block",),
        num_threads=v.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, *statistics = kernel(*leaves, *arguments.extents)
    return out, statistics[0] if statistics else None


def _merge(
    out: Float[Array, "partials B K tiles rows h"],
    statistics: Float[Array, "partials B K tiles 2 rows"],
    live: jax.Array,
) -> Float[Array, "B K tiles rows h"]:
    """Merge partial softmaxes by log-sum-exp. The result for a padding row is zero.

    Args:
        out: partial sums of weighted values.
        statistics: maximum score times log2(e), and sum of weights, of each partial result.
        live: bool `[B, 1, tiles, rows]`; False for padding rows.
    """
    max_logit, total = statistics[..., 0, :], statistics[..., 1, :]
    greatest = jnp.max(max_logit, axis=0)
    weight = jnp.exp2(max_logit - jnp.where(greatest == -jnp.inf, 0, greatest))
    weight = jnp.where(total > 0, weight, 0)
    total = jnp.sum(weight * total, axis=0)
    merged = jnp.sum(out * weight[..., None], axis=0) / jnp.where(total > 0, total, 1)[..., None]
    return jnp.where((live & (total > 0))[..., None], merged, 0)
