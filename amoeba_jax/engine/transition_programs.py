"""The programs of a group between two degrees: its steps in pieces, exchanges of pages, and restored weights."""

from collections.abc import Iterator
from functools import cached_property

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from amoeba_jax.engine.batch import BatchShape
from amoeba_jax.engine.executables import Executables, Request
from amoeba_jax.engine.program import StepKey
from amoeba_jax.engine.weights import WeightStore
from amoeba_jax.models.decoder import SegmentPlan, SegmentShape
from sharding.mesh import TP_AXIS, SubMesh
from sharding.release import ReleasedChunk


class TransitionPrograms:
    """What runs while a group goes from a lower degree to its own (`up`) or back.

    Args:
        weights: of the cluster.
        executables: where the programs are kept.
        group: the devices, at the higher degree.
        members: of the instances of the lower degree.
        up: the direction.
        released: the degrees for which weights are released before and after.
        rows: sequences that each instance of the lower degree decodes in a step, at most: the bucket.
        base_pages: pages of the extent that is never weights.
        longest_run: layers in one program, at most; a power of two.
        table_width: pages of a sequence, at most.
        num_slots: sequences whose last tokens an instance remembers.
        phase_pieces: pieces from one rank to another in one exchange.
    """

    def __init__(
        self,
        weights: WeightStore,
        executables: Executables,
        group: SubMesh,
        members: list[SubMesh],
        *,
        up: bool,
        released: tuple[int, int],
        rows: int,
        base_pages: int,
        longest_run: int,
        table_width: int,
        num_slots: int,
        phase_pieces: int,
    ):
        self.dims, self.group, self.members, self.up = weights.dims, group, members, up
        self.lower, self.num_members = members[0].tp, len(members)
        self.released, self.rows, self.phase_pieces = released, rows, phase_pieces
        self._weights, self._executables = weights, executables
        self._longest_run, self._num_slots = longest_run, num_slots
        before, after = ((base_pages, *weights.extent_pages(degree)) for degree in released)
        self.old_extents, self.new_extents = before, after
        self._low_extents, self._high_extents = (before, after) if up else (after, before)
        self.low_shape = BatchShape(((rows, 1),), table_width)
        self.shape = BatchShape(((rows * self.num_members, 1),), table_width)

    @property
    def num_layers(self) -> int:
        return self.dims.config.num_layers

    def restored(self, layer: int) -> tuple[ReleasedChunk, ...]:
        """Extents of a layer that become weights again; none on the way up."""
        before, after = self.released
        return self._weights.released(layer, before)[len(self._weights.released(layer, after)) :]

    def prepare_steps(self) -> None:
        """Compile what steps need in every state between the layouts. Raises what the compiler raises."""
        requests: dict[StepKey, Request] = {}
        for boundary in range(self.num_layers + 1):
            for low in (True, False):
                for first, end in self.runs(*self.part(boundary, low)):
                    for group in self.members if low else [self.group]:
                        request = self.layers_request(first, end, group)
                        requests.setdefault(request[0], request)
        for plan in (self.embedding, self.head):
            request = self.request(plan, self.group)
            requests[request[0]] = request
        self._executables.prepare(list(requests.values()), lambda: None)
        _ = self.split, self.join

    # Steps

    def part(self, boundary: int, low: bool) -> tuple[int, int]:
        """Layers `start .. stop` in the lower (or higher) layout when those from `boundary` on have switched."""
        return (0, boundary) if low == self.up else (boundary, self.num_layers)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of layers that are compiled: lengths are powers of two, so that few programs make up any range."""
        while start < stop:
            length = 1 << (min(stop - start, self._longest_run).bit_length() - 1)
            yield start, start + length
            start += length

    @cached_property
    def embedding(self) -> SegmentPlan:
        return SegmentPlan(0, SegmentShape((), True, False))

    @cached_property
    def head(self) -> SegmentPlan:
        return SegmentPlan(self.num_layers, SegmentShape((), False, True))

    def layers_request(self, start: int, stop: int, group: SubMesh) -> Request:
        """What runs a run of layers, on the whole group or on one instance of the lower degree."""
        windows = self.dims.config.sliding_windows[start:stop]
        return self.request(SegmentPlan(start, SegmentShape(windows, False, False)), group)

    def request(self, plan: SegmentPlan, group: SubMesh) -> Request:
        """What runs a segment."""
        low = group.tp == self.lower
        shape, extents = (self.low_shape, self._low_extents) if low else (self.shape, self._high_extents)
        return StepKey(group.device_indices, plan.shape, shape, extents, self._num_slots), plan, group

    @cached_property
    def split(self) -> jax.stages.Compiled:
        """`[D, members * rows]` on every rank -> each member's columns on its ranks, `[tp * D, rows]`."""
        rows, lower = self.rows, self.lower

        def split(hidden: jax.Array) -> jax.Array:
            member = lax.axis_index(TP_AXIS) // lower
            return lax.dynamic_slice_in_dim(hidden, member * rows, rows, axis=1)

        shape = (self.dims.config.hidden_size, rows * self.num_members)
        return self._mapped("split", split, shape, P(), P(TP_AXIS))

    @cached_property
    def join(self) -> jax.stages.Compiled:
        """The inverse of `split`."""
        lower, hidden_size = self.lower, self.dims.config.hidden_size

        def join(hidden: jax.Array) -> jax.Array:
            every = lax.all_gather(hidden, TP_AXIS)[::lower]
            return every.transpose(1, 0, 2).reshape(hidden_size, -1)

        return self._mapped("join", join, (hidden_size * self.group.tp, self.rows), P(TP_AXIS), P())

    def _mapped(self, name: str, function, shape: tuple[int, int], spec: P, result: P) -> jax.stages.Compiled:
        key = (name, self.lower, self.rows)
        return self._executables.mapped(key, self.group, function, shape, spec, result, self.dims.dtype)

    # Layers

    @cached_property
    def exchange(self) -> jax.stages.Compiled:
        return self._executables.exchange(self.dims, self.group, self.old_extents, self.new_extents, self.phase_pieces)

    def migrate(self, num_pieces: int) -> jax.stages.Compiled:
        """See `kvcache.copying`."""
        return self._executables.migrate(self.dims, self.group, self.old_extents, num_pieces)

    def defragment(self, num_pieces: int) -> jax.stages.Compiled:
        """See `kvcache.copying`."""
        return self._executables.defragment(self.dims, self.group, self.old_extents, self.new_extents, num_pieces)

    def restore(self, chunk: ReleasedChunk) -> jax.stages.Compiled:
        """What makes one of `restored` weights again."""
        return self._executables.restore(self.group, chunk, self.dims, self.phase_pieces)
