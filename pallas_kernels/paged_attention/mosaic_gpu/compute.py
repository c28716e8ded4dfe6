"""Computing warpgroups of the Mosaic GPU kernel: an online softmax over blocks of keys and values in shared memory.

`mosaic_gpu.kernel` defines items, stages, blocks and units.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu.variant import ROWS, Item, Refs, Variant, extent_range

LOG2E = math.log2(math.e)
_FAR = 1 << 30  # position of missing keys, behind every query
_WGMMA = plgpu.Layout.WGMMA


class _State(NamedTuple):
    """State of the online softmax for 64 query rows.

    Attributes:
        max_logit: `[64]` maximum score so far, times log2(e).
        total: `[64]` sum of the softmax weights.
        values: `[64, chunk]` weighted sum of values, for each chunk of columns.
    """

    max_logit: jax.Array
    total: jax.Array
    values: tuple[jax.Array, ...]


class _Rows(NamedTuple):
    """Positions of the 64 query rows of a warpgroup, and the lowest and highest position in its tile of rows.

    Position -1 marks a padding row.
    """

    positions: jax.Array
    least: jax.Array
    greatest: jax.Array


def compute_item(
    v: Variant, refs: Refs, scratch: dict[str, Any], worker: jax.Array, item: Item, step: jax.Array
) -> None:
    """Compute one warpgroup's part of an item (a tile of query rows with a part of its keys), and write its result.

    `worker` is the index of the warpgroup among the computing warpgroups. `step` is the number of blocks of keys in the
    earlier items of this thread block. Block i of this item is therefore in stage `(step + i) % v.stages`.
    """
    part = jnp.int32(0) if v.split_keys else worker
    plgpu.barrier_wait(scratch["queries_ready"])
    rows = _Rows(
        _cast(v, scratch["positions"][part], _WGMMA.reduce(1)),
        *(refs.tile_positions[item.batch, item.tile, end] for end in range(2)),
    )

    def extent_body(extent: Any, carry: tuple[jax.Array, _State]) -> tuple[jax.Array, _State]:
        before, state = carry
        begin, start, stop, count = extent_range(refs, item, extent, before)
        first_step = step + before - item.first  # stage of block 0 of the extent; the item begins at block `start`
        stride = v.warpgroups if v.split_keys else 1
        if v.split_keys:  # every `stride`-th step, counted over all items like the stages
            start += lax.rem(worker - lax.rem(first_step + start, jnp.int32(stride)) + stride, jnp.int32(stride))
        steps = lax.div(jnp.maximum(stop - start, 0) + stride - 1, jnp.int32(stride))

        def block(number: jax.Array, state: _State) -> _State:
            index = start + number * stride
            slot = lax.rem(first_step + index, jnp.int32(v.stages))
            starts = _unit_starts(v, refs, item, extent, begin + index)
            return _compute_block(v, refs, scratch, worker, part, item, rows, slot, starts, state)

        return before + count, lax.fori_loop(0, steps, block, state)

    carry = (jnp.int32(0), _first_state(v, scratch, part, item))
    if v.num_extents == 1:
        _, state = extent_body(0, carry)
    else:
        _, state = lax.fori_loop(0, v.num_extents, extent_body, carry)
    _release(v, scratch["queries_free"])
    _write(v, refs, scratch, worker, part, item, rows, state)


def _cast(v: Variant, x: jax.Array, layout: Any) -> jax.Array:
    return x if v.interpret else plgpu.layout_cast(x, layout)


def _columns(v: Variant, vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a matrix of the given shape whose columns all equal `vector`."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def _first_state(v: Variant, scratch: dict[str, Any], part: jax.Array, item: Item) -> _State:
    row, matrix = _WGMMA.reduce(1), _WGMMA
    max_logit = _cast(v, jnp.full((ROWS,), -jnp.inf, jnp.float32), row)
    total = _cast(v, jnp.full((ROWS,), 0, jnp.float32), row)
    if v.has_sinks:
        # A sink is an extra score without a value: it changes only the sum of weights.
        given = _cast(v, scratch["sinks"][part], row)
        once = (item.split == 0) & ((lax.axis_index("wg") == 0) | (not v.split_keys))
        max_logit = given + jnp.where(once, 0.0, -jnp.inf)
        total += jnp.where(once, 1.0, 0.0)
    zeros = [jnp.full((ROWS, v.chunk), 0, jnp.float32) for _ in range(v.head_dim // v.chunk)]
    return _State(max_logit, total, tuple(_cast(v, z, matrix) for z in zeros))


def _unit_starts(v: Variant, refs: Refs, item: Item, extent: Any, block: jax.Array) -> list[jax.Array]:
    """Return the position of the first token of each unit in a block of keys. The position of a missing unit is `_FAR`.

    A unit is a page, or a part of a large page (see `kernel`).
    """
    units = refs.num_pages[item.batch, extent] * v.units_per_page
    starts = []
    for place in range(v.units_per_block):
        unit = block * v.units_per_block + place
        there = jnp.minimum(unit, units - 1)
        page, piece = lax.div(there, jnp.int32(v.units_per_page)), lax.rem(there, jnp.int32(v.units_per_page))
        position = refs.page_positions[item.batch, extent, page] * v.page_size + piece * v.unit_tokens
        starts.append(jnp.where(unit < units, position, _FAR))
    return starts


def _compute_block(
    v: Variant,
    refs: Refs,
    scratch: dict[str, Any],
    worker: jax.Array,
    part: jax.Array,
    item: Item,
    rows: _Rows,
    slot: jax.Array,
    starts: list[jax.Array],
    state: _State,
) -> _State:
    """Add one block of keys and values to the softmax state. `slot` is the index of the stage that holds the block."""
    shape = (ROWS, v.block_tokens)
    first, last = starts[0], starts[0]
    for start in starts[1:]:
        first, last = jnp.minimum(first, start), jnp.maximum(last, start)
    partly = last + v.unit_tokens - 1 > rows.least  # True if some row of the tile does not see some key
    if v.sliding_window is not None:
        partly |= first <= rows.greatest - v.sliding_window

    plgpu.barrier_wait(scratch["keys_ready"].at[slot])
    keys = scratch["keys"].at[slot]
    if v.converts:
        operand = scratch["key_operand"].at[worker]
        _convert(v, keys, operand)
        keys = operand
    scores = _product(v, scratch["queries"].at[part], keys, transpose=True)
    _release(v, scratch["keys_free"].at[slot])
    scores = _scaled(v, refs, item, scores)

    def masked(scores: jax.Array) -> jax.Array:
        return jnp.where(_visible(v, starts, _columns(v, rows.positions, shape), key_axis=1), scores, -jnp.inf)

    scores = lax.cond(partly, masked, lambda s: s, scores)
    max_logit = jnp.maximum(state.max_logit, scores.max(axis=1))
    finite = jnp.where(max_logit == -jnp.inf, 0.0, max_logit)  # a row that has seen nothing yet
    decay = jnp.exp2(state.max_logit - finite)
    weights = jnp.exp2(scores - _columns(v, finite, shape))
    total = state.total * decay + weights.sum(axis=1)
    weights = weights.astype(v.dtype)

    plgpu.barrier_wait(scratch["values_ready"].at[slot])
    stage = scratch["values"].at[slot]
    operand = scratch["value_operand"].at[worker] if v.copies_values else stage

    def clean() -> None:
        # Keys are rows here, so that the maximum needs no reduction over warps: Mosaic uses the same scratch memory for
        # such reductions in all warpgroups.
        columns = lax.broadcast_in_dim(_cast(v, scratch["positions"][part], _WGMMA.reduce(0)), shape[::-1], (1,))
        seen = jnp.where(_visible(v, starts, columns, key_axis=0), 1.0, 0.0).max(axis=1)
        for c in _chunks(v):
            values = _cast(v, stage.at[:, c][...].astype(v.dtype), _WGMMA)
            kept = jnp.where(_columns(v, seen, values.shape) > 0, values, jnp.zeros_like(values))
            operand.at[:, c][...] = kept
        plgpu.commit_smem()

    pl.when(partly)(clean)
    if v.converts:
        pl.when(jnp.logical_not(partly))(lambda: _convert(v, stage, operand))

    def weighted(source: Any) -> tuple[jax.Array, ...]:
        return tuple(_product(v, weights, source.at[:, c]) for c in _chunks(v))

    if v.copies_values and not v.converts:
        update = lax.cond(partly, lambda: weighted(operand), lambda: weighted(stage))
    else:
        update = weighted(operand)
    _release(v, scratch["values_free"].at[slot])
    values = [old * _columns(v, decay, old.shape) + new for old, new in zip(state.values, update, strict=True)]
    return _State(max_logit, total, tuple(values))


def _visible(v: Variant, starts: list[jax.Array], row_positions: jax.Array, key_axis: int) -> jax.Array:
    """Return a mask that is True for the keys of a block that each query row attends to.

    `row_positions` has the shape of the mask: each entry is the position of its row. `key_axis` is the axis of keys.
    """
    shape = row_positions.shape
    if v.interpret:
        key = lax.broadcasted_iota(jnp.int32, shape, key_axis)
    else:
        key = plgpu.broadcasted_iota(jnp.int32, shape, key_axis, layout=_WGMMA)
    position = key + starts[0]
    for place, start in enumerate(starts[1:], 1):
        offset = place * v.unit_tokens
        position = jnp.where(key >= offset, key + (start - offset), position)
    mask = position <= row_positions
    if v.sliding_window is not None:
        mask &= position > row_positions - v.sliding_window
    return mask


def _chunks(v: Variant) -> list[Any]:
    """Return the slices of a head's columns that are computed one after another."""
    return [pl.ds(c, v.chunk) for c in range(0, v.head_dim, v.chunk)]


def _convert(v: Variant, source: Any, target: Any) -> None:
    """Convert a block of fp8 keys or values in shared memory to the dtype of the matrix products."""
    for c in _chunks(v):
        target.at[:, c][...] = source.at[:, c][...].astype(v.dtype)
    plgpu.commit_smem()


def _product(v: Variant, a: Any, b: Any, transpose: bool = False) -> jax.Array:
    """Compute `a @ b` (or `a @ b.T`) in f32 with tensor cores.

    `b` is in shared memory. `a` is in shared memory or in registers.
    """
    if v.interpret:  # before JAX 0.12, the interpreter supports neither `wgmma` with registers nor transposed operands
        a, b = a[...], b[...]
        return jnp.dot(a, b.T if transpose else b, preferred_element_type=jnp.float32)
    b = b.T if transpose else b

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]  # waits

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _release(v: Variant, barrier: Any) -> None:
    """Tell the copying warpgroup that it may overwrite the shared memory that `barrier` guards."""
    if v.interpret:
        # The interpreter uses plain reads instead of `wgmma`, and these need a fence before the next copy.
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def _scaled(v: Variant, refs: Refs, item: Item, scores: jax.Array) -> jax.Array:
    """Apply scale and soft cap to scores, and multiply by log2(e), because the softmax uses powers of two."""
    factor = refs.scales[0, item.head] * v.scale if v.has_scales else v.scale
    if v.soft_cap is None:
        return scores * (factor * LOG2E)
    # tanh x = 1 - 2 / (exp 2x + 1), also where exp overflows.
    tanh = 1 - 2 / (jnp.exp2(scores * (factor * (2 * LOG2E / v.soft_cap))) + 1)
    return tanh * (v.soft_cap * LOG2E)


def _write(
    v: Variant,
    refs: Refs,
    scratch: dict[str, Any],
    worker: jax.Array,
    part: jax.Array,
    item: Item,
    rows: _Rows,
    state: _State,
) -> None:
    tiles = v.tiles * v.parts
    place = (item.batch * v.kv_heads + item.head) * tiles + item.tile * v.parts + part
    if v.partials > 1:
        partial = item.split * v.warpgroups + worker if v.split_keys else item.split
        place += partial * (v.batch * v.kv_heads * tiles)
        scratch["statistics"].at[worker, 0][...] = state.max_logit
        scratch["statistics"].at[worker, 1][...] = state.total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["statistics"].at[worker], refs.statistics.at[place])
        factor = None
    else:
        # Padding rows have read garbage from shared memory.
        live = (rows.positions >= 0) & (state.total > 0)
        factor = jnp.where(live, 1 / jnp.where(live, state.total, 1.0), 0.0)
    height = min(v.rows, ROWS)
    for column in range(0, v.head_dim, v.store_chunk):
        offset = column % v.chunk
        values = state.values[column // v.chunk][:, offset : offset + v.store_chunk]
        if v.has_scales:
            values = values * refs.scales[1, item.head]
        if factor is not None:
            broadcast = _columns(v, factor, values.shape)
            values = jnp.where(broadcast > 0, values * broadcast, 0.0)
        if column:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = scratch["out"].at[worker]
        out[...] = values.astype(v.out_dtype)
        plgpu.commit_smem()
        target = refs.out.at[place, :, pl.ds(column, v.store_chunk)]
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, height)], target)
    plgpu.wait_smem_to_gmem(0)
