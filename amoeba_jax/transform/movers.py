"""How a layer's pages and weights get to where the new layout has them: one mover for each variant."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.programs.restore import source_place
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.report import TransformVariant
from amoeba_jax.weights.loading import empty_misaligned, put_copies
from amoeba_jax.weights.store import WeightStore
from kvcache.exchange import Exchange, ExchangeKind, join_phases
from kvcache.migration import Phase, plan_phases, single_phase
from kvcache.relayout import moves
from sharding.mesh import assemble, disassemble
from sharding.release import ReleasedShard, holder

Tables = list[np.ndarray]
Restored = tuple[ReleasedShard, ...]


class PlacedExchange(NamedTuple):
    """An `Exchange` whose ids are on the devices, over the ranks."""

    kind: ExchangeKind
    send: jax.Array
    receive: jax.Array


@dataclass(frozen=True)
class Plan:
    """What there is to move, the same for every layer.

    Attributes:
        num_pieces: pieces that change their place.
        num_phases: phases that move them.
    """

    num_pieces: int
    num_phases: int


@runtime_checkable
class Mover(Protocol):
    """Changes the layout of one layer after the other. Everything is launched, and nothing waited for."""

    def prepare(self, max_pieces: int) -> int:
        """Compile what is missing for up to that many pieces from one rank to another; none: no pages are moved.

        Returns the most bytes that any device will need besides what it has.
        """
        ...

    def plan(self, old: Tables, new: Tables) -> Plan:
        """Take the pages' places in both views, as `kvcache.relayout.moves` does."""
        ...

    def move(self, extents: list[jax.Array]) -> list[jax.Array]:
        """Bring a layer's pages to their new places.

        Args:
            extents: of the layer, all those of either view, over the group's ranks. They are no longer valid.

        Returns as many extents, those of the new view valid.
        """
        ...

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        """The weights of all shards of a layer that come back, in the place of the extents that stood for them, which
        are no longer valid."""
        ...

    def renew(self, layer: int) -> list[jax.Array]:
        """Do what the variant does to the weights that a layer keeps. Returns what is to be waited for."""
        ...


def make_mover(
    variant: TransformVariant, programs: TransitionPrograms, weights: WeightStore, reserve: Callable[[int], None]
) -> Mover:
    """The mover of a variant. `reserve` sets aside bytes on every device, or raises `MemoryBudgetError`."""
    if variant is TransformVariant.BASIC:
        return CopyMover(programs, weights, reserve)
    if variant is TransformVariant.HOST_MEMORY:
        return HostMover(programs, weights)
    return InPlaceMover(programs, weights)


class InPlaceMover:
    """Pages move in the extents that there are, in phases of bounded size; weights in place as well.

    Attributes:
        exchanges: all of the plan, in order.
    """

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        self._programs, self._weights = programs, weights
        self.exchanges: list[PlacedExchange] = []
        self._phases: list[Phase] = []
        self._divided: dict[int, tuple[list[PlacedExchange], list[PlacedExchange]]] = {}

    def prepare(self, max_pieces: int) -> int:
        exchanges = self._programs.exchanges if max_pieces else {}  # before anything changes: one may fail
        return self._programs.move_temporaries(pages=bool(exchanges))

    def plan(self, old: Tables, new: Tables) -> Plan:
        programs = self._programs
        source, target = moves(old, new)
        self._phases = plan_phases(source, target, programs.group.tp, programs.phase_pieces)
        self.exchanges = self._placed(self._joined(self._phases))
        self._divided.clear()
        return Plan(len(source), len(self._phases))

    def divided(self, most: int) -> tuple[list[PlacedExchange], list[PlacedExchange]]:
        """The plan in two parts: last, up to `most` exchanges of one phase each, in all of which ranks trade with
        others; and what comes before them."""
        if most not in self._divided:
            count = 0
            while count < min(most, len(self._phases)) and self._phases[-1 - count].distance != 0:
                count += 1
            first, last = self._phases[: len(self._phases) - count], self._phases[len(self._phases) - count :]
            single = [exchange for phase in last for exchange in join_phases([phase], loop=False)]
            self._divided[most] = self._placed(self._joined(first)), self._placed(single)
        return self._divided[most]

    def _joined(self, phases: list[Phase]) -> list[Exchange]:
        return join_phases(phases, loop=self._programs.plan.loops_exchanges)

    def _placed(self, exchanges: list[Exchange]) -> list[PlacedExchange]:
        return [PlacedExchange(exchange.kind, *_put_ids(self._programs, exchange)) for exchange in exchanges]

    def move(self, extents: list[jax.Array]) -> list[jax.Array]:
        return self.run(self.exchanges, extents)

    def run(self, exchanges: list[PlacedExchange], extents: list[jax.Array]) -> list[jax.Array]:
        """`move` by some exchanges of the plan."""
        for kind, send, receive in exchanges:
            extents = self._programs.exchanges[kind](extents, send, receive)
        return extents

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        return self._programs.restore(_sources(self._programs, self._weights, released), extents)

    def renew(self, layer: int) -> list[jax.Array]:
        return []


class CopyMover:
    """Everything is copied: all pages into fresh extents, and every shard of FFN weights into a fresh buffer.

    Where more pages come than it was prepared for, it takes larger programs.
    """

    def __init__(self, programs: TransitionPrograms, weights: WeightStore, reserve: Callable[[int], None]):
        self._programs, self._weights, self._reserve = programs, weights, reserve
        self._max_pieces = 0
        self._phase: tuple[jax.Array, jax.Array] | None = None

    def prepare(self, max_pieces: int) -> int:
        programs, itemsize = self._programs, jnp.dtype(self._programs.dims.dtype).itemsize
        specs = [shard.spec for shard in self._weights.released(0, programs.dims.max_tp)]
        extra = max((spec.num_elements // spec.num_shards * itemsize for spec in specs), default=0)
        fresh = sum(one.num_pages * one.spec.stored_shape[1] for one in programs.restored(0)) * itemsize
        extra = max(extra, fresh + programs.move_temporaries(pages=False))
        if max_pieces:
            self._max_pieces = 1 << max(1, (max_pieces - 1).bit_length())
            migrate, defragment = self._programs.migrate(self._max_pieces), self._programs.defragment(self._max_pieces)
            received = _outputs(migrate)
            both = (_temporaries(migrate) + received, _temporaries(defragment) + received + _outputs(defragment))
            extra = max(extra, *both)
        return extra

    def plan(self, old: Tables, new: Tables) -> Plan:
        programs = self._programs
        changed, _ = moves(old, new)
        source, target = moves(old, new, staying=True)
        if not len(source):
            self._phase = None
            return Plan(0, 0)
        between = np.bincount(source[:, 0] * programs.group.tp + target[:, 0])
        if (needed := int(between.max())) > self._max_pieces:
            self._reserve(self.prepare(needed))
        self._phase = _put_ids(programs, single_phase(source, target, programs.group.tp, self._max_pieces))
        return Plan(len(changed), 1)

    def move(self, extents: list[jax.Array]) -> list[jax.Array]:
        programs = self._programs
        if self._phase is None:
            return extents
        send, receive = self._phase
        old = extents[: len(programs.old_extents)]
        received = programs.migrate(self._max_pieces)(old, send)
        fresh = programs.defragment(self._max_pieces)(old, received, send, receive)
        return fresh + extents[len(fresh) :]

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        fresh = [jnp.zeros(extent.shape, extent.dtype, device=extent.sharding) for extent in extents]
        return self._programs.restore(_sources(self._programs, self._weights, released), fresh)

    def renew(self, layer: int) -> list[jax.Array]:
        return self._weights.replace(self._programs.group, layer, jnp.copy)


class HostMover:
    """Everything goes through host memory: pages into fresh extents, and every shard of FFN weights."""

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        self._programs, self._weights = programs, weights
        self._source = self._target = np.zeros((0, 2), np.int64)

    def prepare(self, max_pieces: int) -> int:
        # A shard of weights is there twice for a moment. Of pages, only the host has two copies.
        itemsize = jnp.dtype(self._programs.dims.dtype).itemsize
        specs = [shard.spec for shard in self._weights.released(0, self._programs.dims.max_tp)]
        return max((spec.num_elements // spec.num_shards * itemsize for spec in specs), default=0)

    def plan(self, old: Tables, new: Tables) -> Plan:
        self._source, self._target = moves(old, new, staying=True)
        return Plan(int((self._source != self._target).any(axis=1).sum()), 1)

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
        jax.block_until_ready(put)  # the host's copies go with this call
        return put + extents[num_new:]

    def _places(self, slots: np.ndarray, num_extents: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the extents that hold pieces (rank, id): the extent's rank, by extent and rank, and the place there."""
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

        return self._weights.replace(self._programs.group, layer, through_host)


def _put_ids(programs: TransitionPrograms, moved: Exchange | Phase) -> tuple[jax.Array, jax.Array]:
    sharding = programs.group.sharded
    return jax.device_put(moved.send, sharding), jax.device_put(moved.receive, sharding)


def _sources(programs: TransitionPrograms, weights: WeightStore, released: Restored) -> list[jax.Array]:
    """The shards that the ranks send each other when `released` are restored."""
    places = [source_place(one, programs.dims.max_tp, programs.group) for one in released]
    return [weights.assembled(programs.group, one.spec, place) for one, place in zip(released, places, strict=True)]


def _temporaries(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def _outputs(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else memory.output_size_in_bytes
