"""The programs of a group between two degrees: its steps in pieces, exchanges of pages, and restored weights."""

from collections.abc import Iterator
from functools import cached_property

import jax

from amoeba_jax.models.decoder import SegmentPlan, SegmentShape
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_requests import ProgramRequest
from amoeba_jax.programs.step_program import StepKey, segment_keys
from amoeba_jax.weights.layout import WeightLayout
from kvcache.exchange import ExchangeKind, exchange_kinds
from sharding.mesh import SubMesh
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
        longest_run: layers in one program, at most: as many as in a segment outside of transitions, whose programs
            these are too.
        table_width: pages of a sequence, at most.
        num_slots: sequences whose last tokens an instance remembers.
        phase_pieces: pieces from one rank to another in one exchange.
    """

    def __init__(
        self,
        weights: WeightLayout,
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

    @property
    def changes_weights(self) -> bool:
        """Whether chunks of weights become extents, or extents weights."""
        return self.released[0] != self.released[1]

    def restored(self, layer: int) -> tuple[ReleasedChunk, ...]:
        """Extents of a layer that become weights again; none when merging."""
        before, after = self.released
        if before <= after:
            return ()
        return self._weights.released(layer, before)[len(self._weights.released(layer, after)) :]

    def step_requests(self) -> list[ProgramRequest]:
        """What steps need in every state between the layouts."""
        requests: dict[StepKey, ProgramRequest] = {}
        for boundary in range(self.num_layers + 1):
            for low in (True, False):
                for first, end in self.runs(*self.part(boundary, low)):
                    for group in self.members if low else [self.group]:
                        key, plan = self.layers_key(first, end, group)
                        if key not in requests:
                            requests[key] = self._executables.requests.step(key, plan, group)
        ends = [self._request(plan, self.group) for plan in (self.embedding, self.head)]
        return [*requests.values(), *ends, self._split_request, self._join_request]

    def restore_requests(self) -> list[ProgramRequest]:
        """What makes weights again of the extents that are none afterwards: the same in every layer."""
        return [self._restore_request(chunk) for chunk in self.restored(0)]

    def exchange_requests(self) -> list[ProgramRequest]:
        """What moves pages: a program for each kind of exchange."""
        return [self._exchange_request(kind) for kind in exchange_kinds(self.group.tp)]

    def _exchange_request(self, kind: ExchangeKind) -> ProgramRequest:
        requests = self._executables.requests
        return requests.exchange(self.group, self.old_extents, self.new_extents, self.phase_pieces, kind)

    # Steps

    def part(self, boundary: int, low: bool) -> tuple[int, int]:
        """Layers `start .. stop` in the lower (or higher) layout when those from `boundary` on have switched."""
        return (0, boundary) if low == self.up else (boundary, self.num_layers)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of layers that are compiled: few lengths, so that few programs make up any range."""
        lengths = [self._longest_run, *(4**power for power in range(5, -1, -1) if 4**power < self._longest_run)]
        while start < stop:
            length = next(length for length in lengths if length <= stop - start)
            yield start, start + length
            start += length

    @cached_property
    def embedding(self) -> SegmentPlan:
        return SegmentPlan(0, SegmentShape((), True, False))

    @cached_property
    def head(self) -> SegmentPlan:
        return SegmentPlan(self.num_layers, SegmentShape((), False, True))

    def layers_key(self, start: int, stop: int, group: SubMesh) -> tuple[StepKey, SegmentPlan]:
        """A run of layers, on the whole group or on one instance of the lower degree."""
        plan = SegmentPlan(start, SegmentShape(self.dims.config.sliding_windows[start:stop], False, False))
        low = group.tp == self.lower
        shape, extents = (self.low_shape, self._low_extents) if low else (self.shape, self._high_extents)
        (key,) = segment_keys(group, [plan], shape, extents, self._num_slots)
        return key, plan

    def layers(self, start: int, stop: int, group: SubMesh) -> tuple[jax.stages.Compiled, SegmentPlan]:
        """The program of `layers_key`."""
        key, plan = self.layers_key(start, stop, group)
        return self._executables.get(self._executables.requests.step(key, plan, group)), plan

    def end(self, plan: SegmentPlan) -> jax.stages.Compiled:
        """The program of `embedding` or `head`."""
        return self._executables.get(self._request(plan, self.group))

    def _request(self, plan: SegmentPlan, group: SubMesh) -> ProgramRequest:
        (key,) = segment_keys(group, [plan], self.shape, self._high_extents, self._num_slots)
        return self._executables.requests.step(key, plan, group)

    @property
    def _split_request(self) -> ProgramRequest:
        return self._executables.requests.split(self.group, self.lower, self.rows)

    @property
    def _join_request(self) -> ProgramRequest:
        return self._executables.requests.join(self.group, self.lower, self.rows)

    @cached_property
    def split(self) -> jax.stages.Compiled:
        """`[D, members * rows]` on every rank -> each member's columns on its ranks, `[tp * D, rows]`."""
        return self._executables.get(self._split_request)

    @cached_property
    def join(self) -> jax.stages.Compiled:
        """The inverse of `split`."""
        return self._executables.get(self._join_request)

    # Pages and weights

    @cached_property
    def exchanges(self) -> dict[ExchangeKind, jax.stages.Compiled]:
        """What runs phases of a plan in one layer, by their kind."""
        kinds = exchange_kinds(self.group.tp)
        return {kind: self._executables.get(self._exchange_request(kind)) for kind in kinds}

    def migrate(self, num_pieces: int) -> jax.stages.Compiled:
        """See `kvcache.copying`."""
        return self._executables.get(self._executables.requests.migrate(self.group, self.old_extents, num_pieces))

    def defragment(self, num_pieces: int) -> jax.stages.Compiled:
        """See `kvcache.copying`."""
        requests = self._executables.requests
        return self._executables.get(requests.defragment(self.group, self.old_extents, self.new_extents, num_pieces))

    def restore(self, chunk: ReleasedChunk) -> jax.stages.Compiled:
        """What makes one of `restored` weights again."""
        return self._executables.get(self._restore_request(chunk))

    def _restore_request(self, chunk: ReleasedChunk) -> ProgramRequest:
        return self._executables.requests.restore(self.group, chunk, self.phase_pieces)

    def prepare_steps(self) -> None:
        """Compile what steps need. Raises what the compiler raises."""
        for _ in self._executables.prepare(self.step_requests()):
            pass
