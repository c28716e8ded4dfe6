"""Programs that move pieces of KV pages between the devices of a group, as planned by `kvcache.migration`.

A plan has phases. In a phase, each rank gathers the pieces that it sends, exchanges them with the other ranks, and
scatters the received pieces in place.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32, Num

from kvcache.extents import Extent, LayerKV, extent_starts
from kvcache.geometry import PageGeometry
from kvcache.migration import PADDING, Phase, phase_shape
from sharding.errors import LayoutError
from sharding.mesh import TP_AXIS, SubMesh

PHASES_AT_ONCE = 3
"""Number of phases of one distance that a program without a loop can run in a row (`migration.Phase`).

The number is above 1 to save launches. A launch on four devices takes 0.3 ms of CPU time. Most plans have at least
three phases of each distance that occurs.
"""

PHASES_OF_LOOP = 16
"""Maximum number of phases that a program with a loop runs. Most plans have fewer phases."""


class ExchangeKind(NamedTuple):
    """Kind of an exchange program: the phases (`migration.Phase`) that one launch of the program runs.

    Without `loop`, the program runs `num_phases` phases with this `distance`, or general phases if `distance` is None.

    With `loop`, the program runs up to `num_phases` phases, each with its own distance, and `distance` is None. Most
    layers then need only one launch. `loop` is for CPU only: on a GPU, the host would have to read the distance of each
    phase from the device.
    """

    distance: int | None
    num_phases: int
    loop: bool = False


class Exchange(NamedTuple):
    """Inputs of one launch of an exchange program. `migration.Phase` defines ids, `p` and `phase_pieces`.

    Attributes:
        kind: kind of the program.
        send: `Phase.send` of all phases, stacked along axis 1: `[p, num_phases, *pieces]`. If `kind.loop` is set, the
            shape is `[p, num_phases, p * phase_pieces + 1]`. The last entry of each phase is then its type: 0 for a
            general phase, `1 + distance` for a phase with a distance, and `PADDING` for an unused phase.
        receive: `Phase.receive` of all phases, stacked along axis 1: `[p, num_phases, *pieces]`. If `kind.loop` is set,
            the shape is `[p, num_phases, p * phase_pieces]`.
    """

    kind: ExchangeKind
    send: Int32[np.ndarray, "p phases *pieces"]
    receive: Int32[np.ndarray, "p phases *pieces"]


def exchange_kinds(p: int, *, loop: bool) -> list[ExchangeKind]:
    """Return the kinds of all programs that the exchanges of `join_phases` can need on `p` ranks.

    With `loop`, there is only one kind. Without `loop`, there is a kind for a general phase. For each distance, there
    is a kind for one phase. For each distance above 0, there is also a kind for `PHASES_AT_ONCE` phases.
    """
    if loop:
        return [ExchangeKind(None, PHASES_OF_LOOP, loop=True)]
    single = [ExchangeKind(distance, 1) for distance in (None, *range(p))]
    return single + [ExchangeKind(distance, PHASES_AT_ONCE) for distance in range(1, p)]


def join_phases(phases: Sequence[Phase], *, loop: bool) -> list[Exchange]:
    """Divide the phases of a plan into exchanges, in the same order. An exchange is one launch of a program.

    With `loop`, it has up to `PHASES_OF_LOOP` phases of any distances. Without `loop`, it has one phase, or
    `PHASES_AT_ONCE` phases of one distance.
    """
    if loop:
        return [_loop(phases[first : first + PHASES_OF_LOOP]) for first in range(0, len(phases), PHASES_OF_LOOP)]
    exchanges = []
    for distance, group in itertools.groupby(phases, key=lambda phase: phase.distance):
        alike = list(group)
        while alike:
            count = PHASES_AT_ONCE if distance and len(alike) >= PHASES_AT_ONCE else 1
            joined, alike = alike[:count], alike[count:]
            send = np.stack([phase.send for phase in joined], axis=1)
            receive = np.stack([phase.receive for phase in joined], axis=1)
            exchanges.append(Exchange(ExchangeKind(distance, count), send, receive))
    return exchanges


def _loop(phases: Sequence[Phase]) -> Exchange:
    num_ranks = len(phases[0].send)
    receive = np.full((num_ranks, PHASES_OF_LOOP, phases[0].receive[0].size), PADDING, np.int32)
    send = np.full((num_ranks, PHASES_OF_LOOP, receive.shape[2] + 1), PADDING, np.int32)
    for index, phase in enumerate(phases):
        send[:, index, :-1] = phase.send.reshape(num_ranks, -1)
        send[:, index, -1] = 0 if phase.distance is None else 1 + phase.distance
        receive[:, index] = phase.receive.reshape(num_ranks, -1)
    return Exchange(ExchangeKind(None, PHASES_OF_LOOP, loop=True), send, receive)


def exchange_pieces(
    extents: Sequence[Extent],
    num_read: int,
    num_written: int,
    send: Int32[Array, "*pieces"],
    receive: Int32[Array, "*pieces"],
    distance: int | Int32[Array, ""] | None = None,
) -> list[jax.Array]:
    """Exchange the pieces of one `Phase` in one layer. Return the extents, updated in place if they are donated.

    Runs on one rank, inside `shard_map` over `p` ranks. Temporary memory: all sent and all received pieces.

    Args:
        extents: KV buffers of the layer, each `[pages, page_elems]`. A piece has `page_elems / p` elements. Piece ids
            continue from one extent to the next.
        num_read: pieces are read only from the first `num_read` extents.
        num_written: pieces are written only to the first `num_written` extents.
        send: ids of the pieces that this rank sends (its row of `Phase.send`). The shape is `[p, phase_pieces]` if
            `distance` is None, else `[p * phase_pieces]`. A negative id (padding) sends arbitrary data.
        receive: ids to which this rank writes the pieces that it receives, with the shape of `send`. A negative id
            writes nothing.
        distance: distance of the phase. None: a general phase. In a program with a loop: an int32 scalar array with the
            type of the phase (`Exchange.send`).
    """
    p = jax.lax.axis_size(TP_AXIS)
    rows = as_pieces(extents, p)
    # All pieces are gathered before the first one is written.
    if distance is None:
        received = swap_blocks([as_bits(gather_pieces(rows[:num_read], ids)) for ids in send])
    else:
        sent = as_bits(gather_pieces(rows[:num_read], send))
        if isinstance(distance, int):
            received = swap_pieces(sent, distance)
        else:
            ways = [functools.partial(swap_pieces, distance=d) for d in range(p)]
            received = jax.lax.switch(distance, [lambda bits: swap_blocks(jnp.split(bits, p)), *ways], sent)
    rows[:num_written] = scatter_pieces(rows[:num_written], receive.reshape(-1), of_bits(received, rows[0].dtype))
    return [r.reshape(extent.shape) for r, extent in zip(rows, extents, strict=True)]


def as_pieces(extents: Sequence[Extent], p: int) -> list[jax.Array]:
    """Reshape the KV buffers of one rank so that each row is one piece of a page. Copies nothing."""
    return [extent.reshape(extent.shape[0] * p, -1) for extent in extents]


def gather_pieces(rows: Sequence[jax.Array], ids: Int32[Array, " pieces"]) -> Float[Array, "pieces elems"]:
    """Return the pieces of KV pages with the given ids. The result for a negative id is arbitrary.

    `rows` is the result of `as_pieces`. Ids continue from one array of `rows` to the next.
    """
    pieces = rows[0][jnp.clip(ids, 0, len(rows[0]) - 1)]
    for r, start in list(zip(rows, extent_starts(map(len, rows)), strict=False))[1:]:
        inside = (ids >= start) & (ids < start + len(r))
        # XLA fuses this into one loop over all extents. Ids outside an extent read its first row, which is cached.
        pieces = jnp.where(inside[:, None], r[jnp.where(inside, ids - start, 0)], pieces)
    return pieces


def swap_pieces(pieces: Num[Array, "pieces elems"], distance: int) -> Num[Array, "pieces elems"]:
    """Send `pieces` from each rank `r` to rank `r ^ distance`. Return the pieces that arrive from that rank.

    `pieces` must be a result of `as_bits`.
    """
    if distance == 0:
        return pieces
    pairs = [(rank, rank ^ distance) for rank in range(jax.lax.axis_size(TP_AXIS))]
    return jax.lax.ppermute(pieces, TP_AXIS, pairs)


def swap_blocks(blocks: Sequence[Num[Array, "phase_pieces elems"]]) -> Num[Array, "pieces elems"]:
    """Exchange blocks of pieces between all ranks. Rank `r` sends block `i` to rank `r ^ i`, for every `i`.

    Block `i` has the pieces with the ids `Phase.send[r, i]`. Return the received blocks, concatenated in the order of
    `i`.
    """
    return jnp.concatenate([swap_pieces(block, distance) for distance, block in enumerate(blocks)])


def as_bits(array: jax.Array) -> jax.Array:
    """Reinterpret elements as unsigned integers of the same size, so that they are sent unchanged.

    XLA's CPU backend would send bf16 as f32, which doubles the bytes and changes NaNs. Elements of 32 bits are returned
    as they are, because XLA sends f32 unchanged. This exception saves a fifth of the time of an exchange.
    """
    bits = 8 * array.dtype.itemsize
    return array if bits == 32 else jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))


def of_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert a result of `as_bits` back to `dtype`."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def scatter_pieces(
    rows: Sequence[jax.Array], ids: Int32[Array, " pieces"], pieces: Float[Array, "pieces elems"]
) -> list[jax.Array]:
    """Write piece `pieces[n]` to the row with id `ids[n]`, for every `n`. Return the updated arrays.

    `rows` is the result of `as_pieces`. Ids continue from one array of `rows` to the next. A negative id writes
    nothing. All other ids must differ.
    """
    written = []
    for r, start in zip(rows, extent_starts(map(len, rows)), strict=False):
        inside = (ids >= start) & (ids < start + len(r))
        # Indices behind the end are dropped. All indices differ: otherwise XLA needs atomic writes on GPUs (measured on
        # an H100: 0.42 TB/s instead of 2.0).
        place = jnp.where(inside, ids - start, len(r) + jnp.arange(len(ids)))
        written.append(r.at[place].set(pieces, mode="drop", unique_indices=True))
    return written


def compile_exchange(
    geometry: PageGeometry,
    dtype: jnp.dtype,
    group: SubMesh,
    old_extent_pages: tuple[int, ...],
    new_extent_pages: tuple[int, ...],
    phase_pieces: int,
    kind: ExchangeKind,
) -> jax.stages.Compiled:
    """Compile a program `(extents, send, receive) -> extents` that runs an `Exchange` on the KV buffers of one layer.

    `extents` are all buffers of the layer, each `[tp * pages, page_elems]` over the ranks of the group. The extents are
    donated. `send` and `receive` are the arrays of the exchange, sharded over the ranks. Temporary memory on each rank:
    at most `2 * tp * phase_pieces` pieces, or `3 * tp * phase_pieces` pieces for a program with a loop.

    Args:
        geometry: sizes of the pages.
        dtype: dtype of the extents.
        group: devices of the instance with the higher degree.
        old_extent_pages: number of pages of each extent before the change of degree.
        new_extent_pages: number of pages of each extent after the change. The longer of `old_extent_pages` and
            `new_extent_pages` must begin with all numbers of the shorter one.
        phase_pieces: argument `phase_pieces` of `migration.plan_phases`.
        kind: kind of the exchange.

    Raises `LayoutError` if one of these two tuples is empty, or if the longer one does not begin with the shorter one.
    """
    few, many = sorted((old_extent_pages, new_extent_pages), key=len)
    if many[: len(few)] != few or not few:
        raise LayoutError(
            f"extents of {old_extent_pages} pages in the old layout and {new_extent_pages} in the new layout: "
            "one list must begin with the other"
        )
    num_old, num_new = len(old_extent_pages), len(new_extent_pages)

    def run(extents: LayerKV, send: jax.Array, receive: jax.Array) -> LayerKV:
        for phase in zip(send[0], receive[0], strict=True):
            extents = exchange_pieces(extents, num_old, num_new, *phase, kind.distance)
        return extents

    def run_loop(extents: LayerKV, send: jax.Array, receive: jax.Array) -> LayerKV:
        send, ways, receive = send[0, :, :-1], send[0, :, -1], receive[0]

        def run_phase(index: jax.Array, extents: LayerKV) -> LayerKV:
            return exchange_pieces(extents, num_old, num_new, send[index], receive[index], ways[index])

        return jax.lax.fori_loop(0, jnp.sum(ways != PADDING), run_phase, extents)

    extents = [jax.ShapeDtypeStruct((group.tp * pages, geometry.page_elems), dtype) for pages in many]
    if kind.loop:
        num_pieces = group.tp * phase_pieces
        ids = [
            jax.ShapeDtypeStruct((group.tp, kind.num_phases, count), jnp.int32)
            for count in (num_pieces + 1, num_pieces)
        ]
    else:
        shape = phase_shape(group.tp, phase_pieces, kind.distance)
        ids = 2 * [jax.ShapeDtypeStruct((group.tp, kind.num_phases, *shape), jnp.int32)]
    spec = P(TP_AXIS)
    mapped = jax.shard_map(
        run_loop if kind.loop else run, mesh=group.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=0, in_shardings=group.sharded, out_shardings=group.sharded)
    return jitted.lower(extents, *ids).compile()
