"""A group of devices between two degrees: some layers in the lower layout, the others in the higher one already.

Layers change places one after the other, from the last to the first, between two steps. A step of the group runs its
embedding and its head in the higher layout, and the layers each where they are:

    up:    embedding, [split, first layers at TPa, join], last layers at TPb, head
    down:  embedding, first layers at TPb, [split, last layers at TPa, join], head

The rows of a step are those of the lower instances, one block after the other; `split` gives each instance the hidden
states of its block, `join` puts them together again.

Every sequence has its pages in two views, one of each layout: a table at TPb (`Sequence.pages`) and one at TPa. Each
layer holds them where its layout says. New tokens get pages in both.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepPlan
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import StepBatch
from amoeba_jax.programs.step_program import HeadOutput
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.movers import Mover, Plan
from amoeba_jax.transform.report import LayerSwitch
from amoeba_jax.weights.store import WeightStore
from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool, SequencePages
from sharding.mesh import SubMesh, assemble, disassemble, replaced_if_lost


@dataclass(eq=False)
class Member:
    """One of the instances of lower degree that a group comes from or splits into.

    Attributes:
        pool: its pages in the view of the lower layout.
        kv: extents of each layer that is in the lower layout; empty lists for the others.
        sequences: with their pages in the lower layout.
    """

    group: SubMesh
    pool: PagePool
    kv: list[list[jax.Array]]
    sequences: dict[Sequence, SequencePages] = field(default_factory=dict)


class Transition:
    """Switches the layers of a group one by one, and runs its steps meanwhile.

    Args:
        instance: at the higher degree. Its `kv` has the extents of the layers that are in the higher layout.
        members: the instances of the lower degree, in the order of their devices.
        programs: that were prepared for them.
        mover: that was prepared for them.
        overlapped: whether steps are launched behind a layer's switch without waiting for it.

    Attributes:
        num_switched: layers that are in the new layout.
        started: the first switch has begun: there is no way back.
        restored: weights of the layer that switched last. When they are there, so are all others.
    """

    def __init__(
        self,
        instance: Instance,
        members: list[Member],
        programs: TransitionPrograms,
        mover: Mover,
        weights: WeightStore,
        *,
        layers_per_step: int,
        overlapped: bool,
    ):
        self.instance, self.members, self.programs = instance, members, programs
        self.up = programs.up
        self.num_switched = 0
        self.started = False
        self.restored: list[jax.Array] = []
        self.switches: list[LayerSwitch] = []
        self._mover, self._weights = mover, weights
        self._layers_per_step, self._overlapped = layers_per_step, overlapped
        self._spent: list[Any] = []
        self._plan = Plan(0, 0)
        self._plan_of: list[np.ndarray] | None = None

    @property
    def boundary(self) -> int:
        """The first layer that has switched: those before it are in the old layout."""
        return self.programs.num_layers - self.num_switched

    @property
    def done(self) -> bool:
        return self.boundary == 0

    # Sequences

    def member_of(self, sequence: Sequence) -> Member:
        """Where a sequence is in the lower layout."""
        return next(member for member in self.members if sequence in member.sequences)

    def reserve(self, sequence: Sequence, num_tokens: int) -> Collection[Sequence]:
        """Give a sequence pages in the lower layout. Returns none, or, where they do not fit, all of its instance."""
        sequences = self.member_of(sequence).sequences
        try:
            sequences[sequence].reserve(num_tokens)
        except OutOfPagesError:
            return sequences.keys()
        return ()

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's pages in the lower layout."""
        self.member_of(sequence).sequences.pop(sequence).release()

    def plan_step(self) -> StepPlan | None:
        """The next step: a token of every sequence that decodes. Prompts wait until all layers have switched."""
        rows = []
        for index, member in enumerate(self.members):
            decodes = [s for s in member.sequences if s.num_left == 1 and not s.needs_prompt_logits]
            first = index * self.programs.rows
            rows += [Row(first + n, s, s.num_computed, 1) for n, s in enumerate(decodes)]
        return StepPlan(self.programs.shape, tuple(rows)) if rows else None

    # Layers

    def switch_layers(self) -> None:
        """Launch the switch of the next layers."""
        start = time.perf_counter()
        plan = self._plan_moves()
        plan_s = time.perf_counter() - start
        for _ in range(min(self._layers_per_step, self.boundary)):
            self._switch(self.boundary - 1, plan, plan_s)
            plan_s = 0.0

    def drop_spent(self) -> None:
        """Drop the arrays whose buffers others have by now, hundreds in a switch of all layers.

        To be called when the step behind the switch has been launched: it need not wait for that.
        """
        self._spent.clear()

    def _switch(self, layer: int, plan: Plan, plan_s: float) -> None:
        # The steps before this, so that they are not timed with it.
        self._wait([member.kv[layer] for member in self.members] if self.up else self.instance.kv[layer])
        start = time.perf_counter()
        self.started = True
        kv = self._all_extents(layer)
        gathered = time.perf_counter()
        kv = self._mover.move(kv)
        self._wait(kv)
        moved = time.perf_counter()
        self._wait([*self._hand_over(layer, kv), *self._mover.renew(layer)])
        if not self._overlapped:
            self.drop_spent()  # where extents were not written in place, these are all that holds the old ones
        weights_s = gathered - start + time.perf_counter() - moved
        self.num_switched += 1
        moved_bytes = plan.num_pieces * self.piece_bytes
        self.switches.append(LayerSwitch(layer, plan_s, moved - gathered, weights_s, plan.num_phases, moved_bytes))

    def _wait(self, arrays: list[Any]) -> None:
        if not self._overlapped:
            jax.block_until_ready(arrays)

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of a piece: what a rank holds of a page of one layer in the higher layout."""
        dims = self.programs.dims
        return dims.pages.page_elems * jnp.dtype(dims.dtype).itemsize // self.instance.tp

    def _all_extents(self, layer: int) -> list[jax.Array]:
        """All extents of a layer over the group's ranks, those released now included."""
        if not self.up:
            return self.instance.kv[layer]
        buffers = self._low_buffers(layer)
        group = self.instance.group
        self.instance.kv[layer] = [assemble(group, extents) for extents in zip(*buffers, strict=True)]
        if self.programs.changes_weights:
            self.instance.kv[layer] += self._weights.release(group, layer, *self.programs.released, self._spent)
        return self.instance.kv[layer]

    def _low_buffers(self, layer: int) -> list[tuple[jax.Array, ...]]:
        """Takes a layer's extents from the lower layout: the single-device buffers of each rank of the group."""
        buffers: list[tuple[jax.Array, ...]] = []
        for member in self.members:
            buffers += zip(*(disassemble(member.group, extent) for extent in member.kv[layer]), strict=True)
            self._spent.append(member.kv[layer])
            member.kv[layer] = []
        return buffers

    def _hand_over(self, layer: int, kv: list[jax.Array]) -> list[jax.Array]:
        """Give a layer's extents, with its pages where they are to be, to the new layout. Returns them."""
        self.instance.kv[layer] = kv
        if self.up:
            return kv
        group, programs = self.instance.group, self.programs
        num_kept = len(programs.new_extents)
        kept, given_back = kv[:num_kept], kv[num_kept:]
        if given_back:
            pairs = zip(programs.restored(layer), given_back, strict=True)
            given_back = [self._mover.restore(chunk, extent) for chunk, extent in pairs]
            self._weights.put_back(group, layer, *programs.released, given_back)
            self.restored = given_back
        self.instance.kv[layer] = []
        self._spent.append(kept)
        buffers = [disassemble(group, extent) for extent in kept]
        for index, member in enumerate(self.members):
            ranks = slice(index * programs.lower, (index + 1) * programs.lower)
            member.kv[layer] = [assemble(member.group, extent[ranks]) for extent in buffers]
        return kept + given_back

    def undo(self) -> list[list[jax.Array]]:
        """All extents in the higher layout, their pages lost. Buffers that a failed program has lost are recreated."""
        group, programs = self.instance.group, self.programs
        before, after = programs.released
        for member in self.members:
            for extents in member.kv:
                extents[:] = replaced_if_lost(extents, member.group)
        for layer in range(programs.num_layers):
            if self.instance.kv[layer]:
                continue
            if self.up:
                self._all_extents(layer)
                continue
            buffers = self._low_buffers(layer)
            kv = [assemble(group, extents) for extents in zip(*buffers, strict=True)]
            self.instance.kv[layer] = kv + self._weights.release(group, layer, after, before)
        for extents in self.instance.kv:
            extents[:] = replaced_if_lost(extents, group)
        return self.instance.kv

    def _plan_moves(self) -> Plan:
        """Have the mover plan how all live pages get to their places in the new layout.

        The plan is the same for every layer until a sequence gets a page or goes.
        """
        group, lower = self.instance.group, self.programs.lower
        high, low = [], []
        for member in self.members:
            views = [(s.pages.table, pages.table) for s, pages in member.sequences.items() if s.pages is not None]
            if not views:
                high.append(np.zeros((group.tp, 0), np.int32))
                low.append(np.zeros((lower, 0), np.int32))
                continue
            high_table, low_table = (np.concatenate(tables, axis=1) for tables in zip(*views, strict=True))
            # Shared pages once: a page has the same columns wherever it occurs.
            _, first = np.unique(low_table[0], return_index=True)
            high.append(high_table[:, first])
            low.append(low_table[:, first])
        tables = [*high, *low]
        if self._plan_of is None or not all(map(np.array_equal, tables, self._plan_of)):
            self._plan = self._mover.plan(*((low, high) if self.up else (high, low)))
            self._plan_of = tables
        return self._plan

    # Steps

    def run(self, plan: StepPlan, batch: StepBatch) -> HeadOutput:
        """Dispatch a step of `plan_step()` without waiting."""
        group, programs = self.instance.group, self.programs
        packed = jax.device_put(batch.packed, group.sharded)
        hidden, _ = self._run_end(programs.embedding, packed, None)
        for low in (True, False) if self.up else (False, True):
            start, stop = programs.part(self.boundary, low)
            if start == stop:
                continue
            assert hidden is not None, "the embedding and layers return hidden states"
            if low:
                hidden = self._run_low(plan, start, stop, hidden)
            else:
                hidden = self._run_layers(start, stop, group, self.instance.kv, hidden, packed)
        _, head = self._run_end(programs.head, packed, hidden)
        assert head is not None, "the head returns logits"
        return HeadOutput(*head)

    def _run_end(self, plan: SegmentPlan, packed: jax.Array, hidden: jax.Array | None):
        """The embedding or the head."""
        group = self.instance.group
        program = self.programs.end(plan)
        _, hidden, head = program(self._weights.view(group, plan), [], hidden, packed, self.instance.last_tokens)
        return hidden, head

    def _run_low(self, plan: StepPlan, start: int, stop: int, hidden: jax.Array) -> jax.Array:
        group, lower = self.instance.group, self.programs.lower
        buffers = disassemble(group, self.programs.split(hidden))
        outputs: list[jax.Array] = []
        for index, member in enumerate(self.members):
            part = assemble(member.group, buffers[index * lower : (index + 1) * lower], replicated=True)
            packed = jax.device_put(self._low_batch(plan, index, member).packed, member.group.sharded)
            part = self._run_layers(start, stop, member.group, member.kv, part, packed)
            outputs += disassemble(member.group, part)
        return self.programs.join(assemble(group, outputs))

    def _run_layers(
        self, start: int, stop: int, group: SubMesh, kv: list[list[jax.Array]], hidden: jax.Array, packed: jax.Array
    ) -> jax.Array:
        for first, end in self.programs.runs(start, stop):
            program, plan = self.programs.layers(first, end, group)
            kv[first:end], hidden, _ = program(self._weights.view(group, plan), kv[first:end], hidden, packed, None)
        return hidden

    def _low_batch(self, plan: StepPlan, index: int, member: Member) -> StepBatch:
        """A member's block of the step, with its tables in the lower layout."""
        num_rows = self.programs.rows
        batch = StepBatch(self.programs.low_shape, self.programs.lower)
        positions, num_pages = np.full(num_rows, -1), np.zeros(num_rows, np.int32)
        for row in plan.rows:
            place = row.place - index * num_rows
            if 0 <= place < num_rows:
                positions[place] = row.start
                num_pages[place] = used = self.programs.dims.pages.pages_for(row.start + 1)
                batch.set_table(place, member.sequences[row.sequence].table[:, :used])
        batch.set("positions", positions)
        batch.set("num_pages", num_pages)
        return batch
