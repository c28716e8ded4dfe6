"""Runs the phases of a migration plan on the devices of a group: gather, exchange, scatter, in place."""

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
"""Phases of one distance that one program runs, where it does not loop: launching a program of four devices takes
0.3 ms of a CPU, and most plans that are full enough for such phases have three or more of each distance."""

PHASES_OF_LOOP = 16
"""Phases that one program may loop over. Most plans have fewer."""


class ExchangeKind(NamedTuple):
    """What one program runs: that many phases of this distance, one after the other.

    A loop runs at most that many, each of a distance of its own (`distance` says nothing). It is one program in place
    of many, and one launch for a layer. Where a device runs ahead of the host, as a GPU does, the host would have to
    wait for it in each phase, to know which way to go.
    """

    distance: int | None
    num_phases: int
    loop: bool = False


class Exchange(NamedTuple):
    """Phases that one program runs.

    Their ids, `[p, num_phases, *pieces]`. Those of a loop are `[p, num_phases, p * K]` in all phases, and behind those
    to be sent stands the phase's way: 0 if it is general, one more than its distance if it has one, `PADDING` where
    there are no more phases.
    """

    kind: ExchangeKind
    send: Int32[np.ndarray, "p phases *pieces"]
    receive: Int32[np.ndarray, "p phases *pieces"]


def exchange_kinds(p: int, *, loop: bool) -> list[ExchangeKind]:
    """All that `join_phases` makes for `p` ranks. General phases, and those of a rank's own pieces, are few."""
    if loop:
        return [ExchangeKind(None, PHASES_OF_LOOP, loop=True)]
    single = [ExchangeKind(distance, 1) for distance in (None, *range(p))]
    return single + [ExchangeKind(distance, PHASES_AT_ONCE) for distance in range(1, p)]


def join_phases(phases: Sequence[Phase], *, loop: bool) -> list[Exchange]:
    """A plan's phases in their order, those together that one program can run."""
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
    """One rank's part of a `Phase`, for one layer, inside `shard_map` over `p` ranks.

    In place where the extents are donated. Temporaries are the pieces to be sent, and as many received.

    Args:
        extents: each `[pages, page_elems]`; a piece is `page_elems / p` elements, and ids count over all extents.
        num_read: the first that many extents have pieces that are sent.
        num_written: the first that many extents have slots that are received into.
        send: this rank's ids of the phase, `[p, K]` or `[p * K]`; a negative id sends anything (padding).
        receive: ids of where the pieces are put that come, likewise; a negative id puts nothing.
        distance: of the phase; in a loop its way, as of an `Exchange`.
    """
    p = jax.lax.axis_size(TP_AXIS)
    rows = as_pieces(extents, p)
    # All are gathered before any is put anywhere.
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
    """Extents of one rank as rows of one piece each: one flat leading axis, which XLA neither transposes nor copies."""
    return [extent.reshape(extent.shape[0] * p, -1) for extent in extents]


def gather_pieces(rows: Sequence[jax.Array], ids: Int32[Array, " N"]) -> Float[Array, "N elems"]:
    """Pieces by their ids, which count over all of `rows`. A negative id gives anything."""
    pieces = rows[0][jnp.clip(ids, 0, len(rows[0]) - 1)]
    for r, start in list(zip(rows, extent_starts(map(len, rows)), strict=False))[1:]:
        inside = (ids >= start) & (ids < start + len(r))
        # One loop over all extents, once XLA has fused it. What is not wanted of an extent is always its first row.
        pieces = jnp.where(inside[:, None], r[jnp.where(inside, ids - start, 0)], pieces)
    return pieces


def swap_pieces(pieces: Num[Array, "N elems"], distance: int) -> Num[Array, "N elems"]:
    """Gives all to rank `r ^ distance`, `r` being one's own; returns what that rank gave. Takes bits: see `as_bits`."""
    if distance == 0:
        return pieces
    pairs = [(rank, rank ^ distance) for rank in range(jax.lax.axis_size(TP_AXIS))]
    return jax.lax.ppermute(pieces, TP_AXIS, pairs)


def swap_blocks(blocks: Sequence[Num[Array, "K elems"]]) -> Num[Array, "N elems"]:
    """`swap_pieces` of a general phase: block `i` goes to the rank that is `i` apart."""
    return jnp.concatenate([swap_pieces(block, apart) for apart, block in enumerate(blocks)])


def as_bits(array: jax.Array) -> jax.Array:
    """As integers of the same size: XLA's CPU backend sends bf16 as f32, which is twice the bytes and changes NaNs.

    Elements of 32 bits as they are: turned back, what has come would be copied once more, a fifth of an exchange.
    """
    bits = 8 * array.dtype.itemsize
    return array if bits == 32 else jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))


def of_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `as_bits` has made of an array of that dtype, turned back."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def scatter_pieces(
    rows: Sequence[jax.Array], ids: Int32[Array, " N"], pieces: Float[Array, "N elems"]
) -> list[jax.Array]:
    """Puts pieces where their ids say, all different, which count over all of `rows`. A negative id puts nothing."""
    written = []
    for r, start in zip(rows, extent_starts(map(len, rows)), strict=False):
        inside = (ids >= start) & (ids < start + len(r))
        # Past the end, so dropped; all different, or XLA writes with atomic operations on GPUs (measured: 0.42 TB/s in
        # place of 2.0 on an H100).
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
    """A program `(extents, send, receive) -> extents` that runs an `Exchange` in one layer.

    `extents` are the layer's, `[tp * pages, page_elems]` each over the group's ranks (donated, all of both views),
    `send` and `receive` are the exchange's, over the ranks. The group is that of the higher degree in both directions.
    Temporaries are at most twice `tp * phase_pieces` pieces on each rank, in a loop three times.

    Args:
        geometry: of the pages.
        dtype: of the extents.
        group: the devices.
        old_extent_pages: pages of each extent of a layer that may hold pages in the old view.
        new_extent_pages: likewise in the new view. One of the two begins with the other.
        phase_pieces: `K` of the phases.
        kind: of the exchange.
    """
    few, many = sorted((old_extent_pages, new_extent_pages), key=len)
    if many[: len(few)] != few or not few:
        raise LayoutError(
            f"extents of {old_extent_pages} pages in the old view and {new_extent_pages} in the new one: "
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
