"""Programs of a group of devices that changes its degree.

They compute steps during the transition, exchange KV pages between ranks, and restore weights.
"""

from functools import cached_property
from itertools import permutations

import jax
import jax.numpy as jnp

from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import PageExchange
from amoeba_jax.programs.work import copied_columns
from kvcache.exchange import ExchangeKind, exchange_kinds
from sharding.mesh import SubMesh
from sharding.release import ReleasedShard


class TransitionPrograms:
    """Programs of one transition of a group of devices: a merge or a split.

    During the transition, the layers change their degree one after another. Steps then use programs of both degrees
    (`step_specs`).

    Args:
        plan: sizes of the engine.
        executables: registry of programs.
        group: devices of the group. The higher degree is `group.tp`.
        lower: lower degree.
        up: True for a merge, False for a split.
        released: released degree before and after the transition. A device keeps the weights that its released degree
            needs. The memory of all other weights is KV cache (`WeightLayout.released`).
        rows: number of rows of each lower-degree instance in a decode step.
        memory_first: whether the FFNs of all layers change together. In a merge, they change before any page moves. In
            a split, they change after all pages have moved. While pages move, all layers have the extents
            `high_extents`. If `memory_first` is set and both degrees in `released` are equal, only attention changes
            its degree.

    Attributes:
        members: device groups of the lower-degree instances.
        old_extents, new_extents: number of pages of each extent of a layer, before and after the transition.
        low_extents, high_extents: number of pages of each extent of a layer, at the lower and at the higher degree.
        low_shape: shape of a decode step of one lower-degree instance.
        shape: shape of a decode step of all members together.
    """

    def __init__(
        self,
        plan: EnginePlan,
        executables: Executables,
        group: SubMesh,
        lower: int,
        *,
        up: bool,
        released: tuple[int, int],
        rows: int,
        memory_first: bool = False,
    ):
        self.plan, self.dims, self.group, self.up, self.lower = plan, plan.dims, group, up, lower
        starts = range(group.start, group.start + group.tp, lower)
        self.members = [plan.sub_meshes.group(start, lower) for start in starts]
        self.released, self.rows, self.phase_pieces = released, rows, plan.memory.phase_pages
        self._weights, self._executables = plan.weights, executables
        self.old_extents, self.new_extents = (plan.extent_pages(degree) for degree in released)
        self.memory_first = memory_first
        before, after = self.old_extents, self.new_extents
        self.low_extents, self.high_extents = (before, after) if up else (after, before)
        """Extents at the lower and at the higher degree. A merge starts with `low_extents`, a split ends with them."""
        self._read, self._written = (self.high_extents,) * 2 if memory_first else (before, after)
        table_width = plan.buckets(lower).table_width
        self.low_shape = BatchShape(((rows, 1),), table_width)
        self.shape = BatchShape(((rows * len(self.members), 1),), table_width)

    @property
    def num_layers(self) -> int:
        return self.dims.config.num_layers

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of a piece. A piece is the part of one page of one layer that a rank has at the higher degree."""
        return self.dims.pages.page_elems * jnp.dtype(self.dims.dtype).itemsize // self.group.tp

    @cached_property
    def restored_bytes(self) -> int:
        """Bytes of the restored weights of one layer, on all ranks together."""
        elements = sum(shard.spec.num_elements // shard.spec.num_shards for shard in self.restored(0))
        return elements * jnp.dtype(self.dims.dtype).itemsize * self.group.tp

    @property
    def attention_only(self) -> bool:
        """Whether only attention changes its degree.

        The change is between data-parallel attention and attention that all devices of the group compute together.
        """
        return self.memory_first and not self.changes_weights

    @property
    def changes_weights(self) -> bool:
        """Whether the transition turns weights into KV cache, or KV cache back into weights."""
        return self.released[0] != self.released[1]

    def restored(self, layer: int) -> tuple[ReleasedShard, ...]:
        """Return the shards of a layer that become weights again. Return () if the transition restores no weights."""
        before, after = self.released
        if before <= after:
            return ()
        return self._weights.released(layer, before)[len(self._weights.released(layer, after)) :]

    def step_specs(self) -> list[ProgramSpec]:
        """Return all programs that decode steps can need during the transition.

        There are three kinds of programs:

        - programs of steps, at the lower degree and at the higher degree.
        - `split` and `join`, which divide and combine hidden states between layers of different degrees.
        - programs that copy columns of hidden states, for steps of a single lower-degree instance.
        """
        specs, plan = self._executables.specs, self.plan
        needed = list(plan.step_specs(specs, self.group, self.shape, self.high_extents))
        for member in self.members if not self.attention_only else ():
            needed += plan.step_specs(specs, member, self.low_shape, self.low_extents)
        if self.memory_first:
            needed += self._module_specs(self.shape, self.low_shape)
        elif plan.overlaps_exchanges:
            needed += self._steps_with_exchange()
        return [*needed, self._split_spec, self._join_spec, *self._column_copies(self.low_shape)]

    def _module_specs(self, shape: BatchShape, low_shape: BatchShape) -> list[ProgramSpec]:
        """Return the programs of steps that compute attention at the lower degree and FFNs at the higher degree.

        `shape` is the shape of a step of the whole group. `low_shape` is the shape of a step of one lower-degree
        instance.
        """
        specs, plan, layers = self._executables.specs, self.plan, range(self.num_layers)
        attention, ffn = plan.cutter.cut(layers, "attention", embeds=True), plan.cutter.cut(layers, "ffn", embeds=True)
        needed = [
            plan.layers_spec(specs, self.group, segment, at, self.high_extents)
            for at in (shape, low_shape)
            for segment in ffn
        ]
        for member in self.members:
            needed += [plan.layers_spec(specs, member, segment, low_shape, self.high_extents) for segment in attention]
        return list({spec.key: spec for spec in needed}.values())

    def _column_copies(self, shape: BatchShape) -> list[ProgramSpec]:
        """Return the programs that copy hidden states between devices of the group, for steps of the shape `shape`."""
        specs, pool = self._executables.specs, self.plan.sub_meshes
        devices = [pool.group(device, 1) for device in self.group.device_indices]
        width = self.plan.hidden_tokens
        size = copied_columns(shape.num_tokens, width), width
        return [make(device, *size) for device in devices for make in (specs.take_columns, specs.put_columns)]

    def _steps_with_exchange(self) -> list[ProgramSpec]:
        """Return all programs that `step_with_exchange` can return.

        The programs differ in the kinds of layers that they compute, in the number of layers whose pages move, and in
        the distance between the ranks that exchange pages (`kvcache.migration.Phase`).
        """
        pairs = {(one.kinds, len(other.layers)): one for one, other in permutations(self.plan.segments, 2)}
        distances = [None, *range(1, self.group.tp)]
        return [
            self._step_with_exchange(segment, self.shape, num_layers, distance)
            for (_, num_layers), segment in pairs.items()
            for distance in distances
        ]

    def _step_with_exchange(
        self, segment: SegmentPlan, shape: BatchShape, num_layers: int, distance: int | None
    ) -> ProgramSpec:
        longest = max(self.old_extents, self.new_extents, key=len)  # both directions have one program
        exchange = PageExchange(num_layers, longest, self.phase_pieces, distance)
        return self.plan.layers_spec(self._executables.specs, self.group, segment, shape, self.high_extents, exchange)

    def step_with_exchange(
        self, segment: SegmentPlan, shape: BatchShape, num_layers: int, distance: int | None
    ) -> jax.stages.Compiled | None:
        """Return the program that computes a segment and also runs one phase of a page exchange.

        The pages belong to layers outside the segment. Return None if the program is not compiled yet.

        Args:
            segment: layers to compute.
            shape: shape of the step.
            num_layers: number of layers whose pages move.
            distance: in the phase, each rank `r` exchanges pieces with rank `r ^ distance`. None: all ranks with each
                other.
        """
        spec = self._step_with_exchange(segment, shape, num_layers, distance)
        return self._executables.get(spec) if spec in self._executables else None

    def prompt_specs(self) -> list[ProgramSpec]:
        """Return the programs of steps with one prompt during the transition.

        All of these steps have the same chunk size. A longer prompt is computed in several steps.
        """
        specs, plan, buckets = self._executables.specs, self.plan, self.plan.buckets(self.lower)
        shape = buckets.step(0, 1, buckets.chunk_sizes[len(buckets.chunk_sizes) // 2])
        needed = list(plan.step_specs(specs, self.group, shape, self.high_extents))
        for member in self.members if not self.attention_only else ():
            needed += plan.step_specs(specs, member, shape, self.low_extents)
        if self.memory_first:
            needed += self._module_specs(shape, shape)
        return needed + self._column_copies(shape)

    def prompt_copies(self) -> list[ProgramSpec]:
        """Return the programs that copy hidden states between devices of the group, for prompt chunks of all sizes."""
        buckets = self.plan.buckets(self.lower)
        shapes = [buckets.step(0, 1, chunk) for chunk in buckets.chunk_sizes]
        return [spec for shape in shapes for spec in self._column_copies(shape)]

    def restore_specs(self) -> list[ProgramSpec]:
        """Return a list with the one program that restores weights. Return [] if the transition restores no weights."""
        if not (released := self.restored(0)):
            return []
        return [self._executables.specs.restore(self.group, released, self.phase_pieces)]

    def exchange_specs(self) -> list[ProgramSpec]:
        """Return the programs that exchange pages between ranks, one for each `kvcache.exchange.ExchangeKind`."""
        return [self._exchange_spec(kind) for kind in self._exchange_kinds]

    @property
    def _exchange_kinds(self) -> list[ExchangeKind]:
        return exchange_kinds(self.group.tp, loop=self.plan.loops_exchanges)

    def _exchange_spec(self, kind: ExchangeKind) -> ProgramSpec:
        specs, old, new = self._executables.specs, self._read, self._written
        if not kind.distance:
            # One program serves both directions and all lower degrees. It reads and writes the extents of both layouts.
            # Few phases are of this kind, and a loop is not slower for it.
            old = new = max(old, new, key=len)
        return specs.exchange(self.group, old, new, self.phase_pieces, kind)

    # Steps

    @property
    def _split_spec(self) -> ProgramSpec:
        return self._executables.specs.split(*self._regrouped)

    @property
    def _join_spec(self) -> ProgramSpec:
        return self._executables.specs.join(*self._regrouped)

    @property
    def _regrouped(self) -> tuple[SubMesh, int, int, int]:
        return self.group, self.lower, self.plan.most_rows(self.lower), self.plan.hidden_tokens

    # Pages and weights

    @cached_property
    def exchanges(self) -> dict[ExchangeKind, jax.stages.Compiled]:
        """Compiled programs that exchange pages of one layer, by kind. Missing programs are compiled."""
        return {kind: self._executables.get(self._exchange_spec(kind)) for kind in self._exchange_kinds}

    def move_temporaries(self, *, pages: bool) -> int:
        """Return the largest number of bytes of temporaries that one program of a move needs on a device.

        The programs of a move restore weights and, if `pages` is True, exchange pages. Missing programs are compiled.
        If there are no such programs, return 0.
        """
        specs = [*self.restore_specs(), *(self.exchange_specs() if pages else ())]
        return max((self._executables.executable(spec).info.temp_bytes for spec in specs), default=0)

    @cached_property
    def restore(self) -> jax.stages.Compiled:
        """Compiled program that restores the weights of a layer. A missing program is compiled.

        Read this only if the transition restores weights (`restored`).
        """
        (spec,) = self.restore_specs()
        return self._executables.get(spec)

    def prepare_steps(self, *, prompts: bool) -> None:
        """Compile the missing programs of decode steps, and with `prompts=True` also of steps with prompts.

        Raises errors of the compiler.
        """
        needed = self.step_specs() + (self.prompt_specs() if prompts else [])
        for _ in self._executables.prepare(needed):
            pass
