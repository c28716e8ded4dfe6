"""Baselines of transformations: copies of pages and weights on the devices, or through host memory.

In a `with baseline(...)` block, call `transform` with `variant="in_place"`. The baseline then replaces `InPlaceMover`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform import relayout_plan
from amoeba_jax.transform.movers import InPlaceMover, MovePlan, Restored, Tables, _put_ids, _sources
from amoeba_jax.transform.relayout import Relayout
from amoeba_jax.weights.loading import _ALIGNMENT, _misaligned, put
from amoeba_jax.weights.store import WeightStore
from kvcache.migration import Phase, _phases
from kvcache.relayout import _pieces
from sharding.mesh import SubMesh, assemble, disassemble
from sharding.release import holder

from .copying import compile_defragment, compile_migrate

compiled_migrate, compiled_defragment = lru_cache(compile_migrate), lru_cache(compile_defragment)


@contextmanager
def baseline(variant: str) -> Iterator[None]:
    """Use the baseline `variant` (`basic` or `host_memory`) until the block ends.

    Enter and leave the block while no transformation runs.
    """
    hand_over = Relayout.hand_over

    def with_weights(transition: Relayout, layer: int, kv: list[jax.Array]) -> list[jax.Array]:
        mover = transition._mover
        assert isinstance(mover, CopyMover | HostMover)
        return hand_over(transition, layer, kv) + mover.renew(layer)

    relayout_plan.InPlaceMover, Relayout.hand_over = MOVERS[variant], with_weights
    try:
        yield
    finally:
        relayout_plan.InPlaceMover, Relayout.hand_over = InPlaceMover, hand_over


class CopyMover(InPlaceMover):
    """Mover that copies all pages into new extents, and every shard of FFN weights into a new buffer."""

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        super().__init__(programs, weights)
        self._max_pieces = 0
        self._phase: tuple[jax.Array, jax.Array] | None = None

    @property
    def _migrate(self) -> jax.stages.Compiled:
        programs, dims = self._programs, self._programs.dims
        return compiled_migrate(dims.pages, dims.dtype, programs.group, programs.old_extents, self._max_pieces)

    @property
    def _defragment(self) -> jax.stages.Compiled:
        programs, dims = self._programs, self._programs.dims
        extents = programs.old_extents, programs.new_extents
        return compiled_defragment(dims.pages, dims.dtype, programs.group, *extents, self._max_pieces)

    def prepare(self, max_pieces: int) -> int:
        programs, itemsize = self._programs, jnp.dtype(self._programs.dims.dtype).itemsize
        specs = [shard.spec for shard in self._weights.released(0, programs.dims.max_tp)]
        extra = max((spec.num_elements // spec.num_shards * itemsize for spec in specs), default=0)
        fresh = sum(one.num_pages * one.spec.stored_shape[1] for one in programs.restored(0)) * itemsize
        extra = max(extra, fresh + programs.move_temporaries(pages=False))
        if max_pieces:
            self._max_pieces = 1 << max(1, (max_pieces - 1).bit_length())
            migrate, defragment = self._migrate, self._defragment
            received = _outputs(migrate)
            both = (_temporaries(migrate) + received, _temporaries(defragment) + received + _outputs(defragment))
            extra = max(extra, *both)
        return extra

    def plan(self, old: Tables, new: Tables) -> MovePlan:
        programs = self._programs
        source, target = all_pieces(old, new)
        if not len(source):
            self._phase = None
            return MovePlan(0, 0)
        between = np.bincount(source[:, 0] * programs.group.tp + target[:, 0])
        if (needed := int(between.max())) > self._max_pieces:
            self.prepare(needed)
        self._phase = _put_ids(programs, single_phase(source, target, programs.group.tp, self._max_pieces))
        return MovePlan(num_changed(source, target), 1)

    def move(self, extents: list[jax.Array]) -> list[jax.Array]:
        programs = self._programs
        if self._phase is None:
            return extents
        send, receive = self._phase
        old = extents[: len(programs.old_extents)]
        received = self._migrate(old, send)
        fresh = self._defragment(old, received, send, receive)
        return fresh + extents[len(fresh) :]

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        fresh = [jnp.zeros(extent.shape, extent.dtype, device=extent.sharding) for extent in extents]
        return self._programs.restore(_sources(self._programs, self._weights, released), fresh)

    def renew(self, layer: int) -> list[jax.Array]:
        return replace_weights(self._weights, self._programs.group, layer, jnp.copy)


class HostMover(InPlaceMover):
    """Mover that copies all pages and every shard of FFN weights through host memory."""

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        super().__init__(programs, weights)
        self._source = self._target = np.zeros((0, 2), np.int64)

    def prepare(self, max_pieces: int) -> int:
        # A shard of weights exists twice for a moment; pages are copied in host memory only.
        itemsize = jnp.dtype(self._programs.dims.dtype).itemsize
        specs = [shard.spec for shard in self._weights.released(0, self._programs.dims.max_tp)]
        return max((spec.num_elements // spec.num_shards * itemsize for spec in specs), default=0)

    def plan(self, old: Tables, new: Tables) -> MovePlan:
        self._source, self._target = all_pieces(old, new)
        return MovePlan(num_changed(self._source, self._target), 1)

    def move(self, extents: list[jax.Array]) -> list[jax.Array]:
        group = self._programs.group
        if not len(self._source):
            return extents
        ranks = [disassemble(group, extent) for extent in extents[: len(self._programs.old_extents)]]
        old = [np.asarray(rank) for extent in ranks for rank in extent]
        num_new = len(self._programs.new_extents)
        shapes = [(extent.shape[0] // group.tp, extent.shape[1]) for extent in extents[:num_new]]
        fresh = [empty_misaligned(shape, extents[0].dtype) for shape in shapes for _ in range(group.tp)]
        for array in fresh:
            array.fill(0)
        from_place, to_place = self._places(self._source, len(ranks)), self._places(self._target, num_new)
        pairs, which = np.unique(np.stack([from_place[0], to_place[0]]), axis=1, return_inverse=True)
        for index, (source, target) in enumerate(pairs.T.tolist()):
            moved = which.reshape(-1) == index
            pieces = old[source].reshape(old[source].shape[0] * group.tp, -1)
            fresh[target].reshape(len(fresh[target]) * group.tp, -1)[to_place[1][moved]] = pieces[from_place[1][moved]]
        del old, ranks
        for extent in extents[:num_new]:
            extent.delete()
        put = [
            assemble(group, [jax.device_put(fresh[i * group.tp + r], d) for r, d in enumerate(group.devices)])
            for i in range(num_new)
        ]
        jax.block_until_ready(put)  # This call frees the copies in host memory.
        return put + extents[num_new:]

    def _places(self, slots: np.ndarray, num_extents: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each piece the index of its host array, and its row in this array.

        Args:
            slots: rank and piece id of each piece, `[pieces, 2]`.
            num_extents: number of extents in the layout. Each extent has one host array for each rank.
        """
        group, programs = self._programs.group, self._programs
        pages = max(programs.old_extents, programs.new_extents, key=len)[:num_extents]
        starts = np.cumsum([0, *pages])[:-1] * group.tp
        extent = np.searchsorted(starts, slots[:, 1], side="right") - 1
        return extent * group.tp + slots[:, 0], slots[:, 1] - starts[extent]

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        group, max_tp = self._programs.group, self._programs.dims.max_tp
        restored = []
        for one, extent in zip(released, extents, strict=True):
            extent.delete()
            buffers = []
            for device, place in zip(group.devices, group.device_indices, strict=True):
                shard = one.shards[place % max_tp]
                rank, _ = holder(one.spec, group.tp, shard)
                source = self._weights.shard(group.device_indices[rank], one.spec.name, shard)
                buffers += put_copies(np.asarray(source), (device,))
            restored.append(assemble(group, buffers))
        return restored

    def renew(self, layer: int) -> list[jax.Array]:
        def through_host(shard: jax.Array) -> jax.Array:
            (device,) = shard.devices()
            return put_copies(np.asarray(shard), (device,))[0]

        return replace_weights(self._weights, self._programs.group, layer, through_host)


MOVERS = {"basic": CopyMover, "host_memory": HostMover}


def all_pieces(old: Tables, new: Tables) -> tuple[np.ndarray, np.ndarray]:
    """Return `(source, target)`: the rank and id of every piece in the old layout and in the new layout.

    Both arrays are int64 `[pieces, 2]`. Pieces that do not move are included.
    """
    degree = max(len(table) for table in [*old, *new])
    source, target = (
        np.concatenate([np.zeros((0, 2), np.int64), *(_pieces(table, i, degree) for i, table in enumerate(tables))])
        for tables in (old, new)
    )
    return source, target


def num_changed(source: np.ndarray, target: np.ndarray) -> int:
    return int((source != target).any(axis=1).sum())


def replace_weights(
    store: WeightStore, group: SubMesh, layer: int, copy: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Replace the shards of a layer's FFN weights by copies, and return the copies.

    `copy`: function that returns a copy of a shard on its device.
    """
    copies = []
    for name in {released.spec.name: None for released in store.released(layer, store.dims.max_tp)}:
        store._forget_parameter(group, layer, name)
        for device in group.device_indices:
            for key in [key for key in store._shards[device] if key[0] == name]:
                store._shards[device][key] = copy(store._shards[device][key])
                copies.append(store._shards[device][key])
    return copies


def _temporaries(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def _outputs(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else memory.output_size_in_bytes


def single_phase(source: np.ndarray, target: np.ndarray, num_ranks: int, phase_pieces: int) -> Phase:
    """Return one phase that copies all pieces at once, from slots in old extents to slots in new extents.

    Args:
        source: rank and id of the slot that each piece leaves, int64 `[pieces, 2]`.
        target: rank and id of the slot that each piece is written to, with the shape of `source`.
        num_ranks: number of ranks.
        phase_pieces: maximum number of pieces that one rank sends to one rank.
    """
    num_ids = int(max(source[:, 1].max(), target[:, 1].max())) + 1
    slots = (source[:, 0] * num_ids + source[:, 1], target[:, 0] * num_ids + target[:, 1])
    moves = np.stack([*slots, np.zeros(len(source), np.int64)], axis=1)
    (phase,) = _phases(moves, num_ranks, num_ids, phase_pieces, [None])
    return phase


def put_copies(array: np.ndarray, devices: tuple[jax.Device, ...]) -> list[jax.Array]:
    """Copy `array` to each device, wait until all copies are written, and return the copies."""
    misaligned = empty_misaligned(array.shape, array.dtype)
    misaligned[...] = array
    return put([misaligned], [devices])[0]


def empty_misaligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array in misaligned memory, so that `device_put` makes a copy (see `staging_shards`)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 2 * _ALIGNMENT, np.uint8)
    start = _misaligned(memory, dtype)
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
