"""A group of devices between two degrees: some layers are in the lower layout, the others in the higher one already.

Layers change their home one segment after the other, from the last to the first, between two steps: the group's
instance has a lane for each instance of the lower degree, and its placement says for every layer where it is. Steps run
by it (`instances/runner.py`).

Every page has a place in both layouts (`Lane`). Each layer holds it where the layer is. New pages get a place in both.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.deferred_switch import DeferredSwitch, deferred_switch
from amoeba_jax.transform.movers import InPlaceMover, PlacedExchange, Plan
from amoeba_jax.transform.options import LayersPerStep
from amoeba_jax.transform.report import LayerSwitch
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import assemble, disassemble, replaced_if_lost


class Transition:
    """Switches the layers of a group.

    Args:
        instance: at the higher degree, with a lane for each of `members`.
        high: its site. It has the layers that are in the higher layout.
        members: sites of the lower degree, in the order of their devices. They have the other layers.
        programs: that were prepared for them.
        mover: that was prepared for them.
        layers_per_step: layers that switch between two steps, rounded up to whole segments; `"auto"`: one segment.
        overlapped: whether steps are launched behind a layer's switch without waiting for it.

    Attributes:
        num_switched: layers that are in the new layout.
        started: the first switch has begun: there is no way back.
        restored: weights of the layer that switched last. When they are there, so are all others.
    """

    def __init__(
        self,
        instance: Instance,
        high: Site,
        members: list[Site],
        programs: TransitionPrograms,
        mover: InPlaceMover,
        weights: WeightStore,
        layers_per_step: LayersPerStep,
        *,
        overlapped: bool,
    ):
        self.instance, self.high, self.members, self.programs = instance, high, members, programs
        self.up = programs.up
        self.low_group = tuple(site.group.home for site in members)
        self.high_group = (high.group.home,) * len(members)
        self.num_switched = 0
        self.started = False
        self.restored: list[jax.Array] = []
        self.switches: list[LayerSwitch] = []
        self._layers_per_step = 1 if layers_per_step == "auto" else layers_per_step
        self._mover, self._weights, self._overlapped = mover, weights, overlapped
        self._left: list[SegmentPlan] = list(programs.plan.segments)
        self._spent: list[Any] = []
        self._plan = Plan(0, 0)
        self._plan_of: list[np.ndarray] | None = None
        self._deferred: DeferredSwitch | None = None

    @property
    def boundary(self) -> int:
        """The first layer that has switched: those before it are in the old layout."""
        return self.programs.num_layers - self.num_switched

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def overlaps(self) -> bool:
        """Whether layers may switch within a step."""
        return self._overlapped and self.programs.plan.overlaps_exchanges

    # Layers

    def switch_layers(self, step: StepPlan | None = None) -> None:
        """Launch the switch of the next layers, all that are left where nothing runs. The last of them may be left for
        the next step to launch, if that is known (`DeferredSwitch`)."""
        self.switch_deferred()
        start = time.perf_counter()
        self._plan_moves()
        plan_s = time.perf_counter() - start
        wanted = self._layers_per_step if self.instance.running else self.boundary
        before, first, deferred = self.num_switched, len(self._left), False
        try:
            while self._left and self.num_switched - before < wanted:
                segment = self._left[-1]
                if self.num_switched - before + len(segment.layers) >= wanted and self._defer(segment, step):
                    deferred = True
                    break
                self._switch(segment, plan_s)
                plan_s = 0.0
        finally:
            # Layers that split in the next step compute it where they are to be then.
            last = len(self._left) - (1 if deferred and not self.up else 0)
            self._place(self.programs.plan.segments[last:first])

    def _defer(self, segment: SegmentPlan, step: StepPlan | None) -> bool:
        """Leave the switch of a segment to the next step, where that has programs for it."""
        if step is None or not self.overlaps:
            return False
        segments, index = self.programs.plan.segments, len(self._left) - 1
        beside = segments[index + 1 :] if self.up else segments[:index]
        of_switch = segment, beside, step, self._begin_switch, self._end_switch
        self.instance.runner.switch = self._deferred = deferred_switch(self.programs, self._mover, *of_switch)
        self.started |= self._deferred is not None
        return self._deferred is not None

    def switch_deferred(self) -> None:
        """Launch now what was left to a step, if no step has."""
        if self._deferred is not None:
            self.instance.runner.switch = None
            self._deferred.run_alone()

    def drop_spent(self) -> None:
        """Drop the arrays whose buffers others have by now, hundreds in a switch of all layers.

        To be called when the step behind the switch has been launched: it need not wait for that.
        """
        self._spent.clear()

    def let_go(self) -> None:
        """Let go of all device buffers. To be called before they are made again from nothing."""
        for site in (self.high, *self.members):
            site.kv.clear()
        self.restored, self._deferred = [], None
        self.drop_spent()

    def _switch(self, segment: SegmentPlan, plan_s: float) -> None:
        self.started = True
        for layer in reversed(segment.layers):
            self._switch_layer(layer, plan_s)
            plan_s = 0.0
        self._left.pop()

    def _begin_switch(self, segment: SegmentPlan, exchanges: list[PlacedExchange]) -> None:
        """Take the extents of a segment that was deferred, and launch some exchanges of pages."""
        self._deferred = None
        for layer in reversed(segment.layers):
            self.high.kv[layer] = self._mover.run(exchanges, self.take_extents(layer))

    def _end_switch(self, segment: SegmentPlan, move_s: float) -> None:
        """Have a segment be in the new layout: all of its exchanges are launched. `move_s` is what some of it took."""
        for layer in reversed(segment.layers):
            start = time.perf_counter()
            self.hand_over(layer, self.high.kv[layer])
            self._switched(layer, 0.0, move_s / len(segment.layers), time.perf_counter() - start)
        self._left.pop()
        if self.up:
            self._place([segment])

    def _switched(self, layer: int, plan_s: float, move_s: float, weights_s: float) -> None:
        moved_bytes = self._plan.num_pieces * self.programs.piece_bytes
        self.num_switched += 1
        self.switches.append(LayerSwitch(layer, plan_s, move_s, weights_s, self._plan.num_phases, moved_bytes))

    def _place(self, switched: Sequence[SegmentPlan]) -> None:
        """Have steps run some segments, one after the other, where they are now."""
        if switched:
            layers = range(switched[0].layers.start, switched[-1].layers.stop)
            homes = self.high_group if self.up else self.low_group
            self.instance.runner.place(self.instance.runner.placement.with_modules(layers, "layer", homes))

    def _switch_layer(self, layer: int, plan_s: float) -> None:
        # The steps before this, so that they are not timed with it.
        self._wait([site.kv[layer] for site in self.members] if self.up else self.high.kv[layer])
        start = time.perf_counter()
        kv = self.take_extents(layer)
        gathered = time.perf_counter()
        kv = self._mover.move(kv)
        self._wait(kv)
        moved = time.perf_counter()
        self._wait(self.hand_over(layer, kv))
        if not self._overlapped:
            self.drop_spent()  # where extents were not written in place, these are all that holds the old ones
        weights_s = gathered - start + time.perf_counter() - moved
        self._switched(layer, plan_s, moved - gathered, weights_s)

    def _wait(self, arrays: list[Any]) -> None:
        if not self._overlapped:
            jax.block_until_ready(arrays)

    def take_extents(self, layer: int) -> list[jax.Array]:
        """All extents of a layer over the group's ranks, those released now included."""
        if not self.up:
            return self.high.kv[layer]
        group, released = self.high.group, list[jax.Array]()
        if self.programs.changes_weights:  # first: if it fails, the layer is still in the lower layout
            released = self._weights.release(group, layer, *self.programs.released, self._spent)
        base = [assemble(group, extents) for extents in zip(*self._low_buffers(layer), strict=True)]
        self.high.kv[layer] = base + released
        return self.high.kv[layer]

    def _low_buffers(self, layer: int) -> list[tuple[jax.Array, ...]]:
        """Takes a layer's extents from the lower layout: the single-device buffers of each rank of the group."""
        buffers: list[tuple[jax.Array, ...]] = []
        for site in self.members:
            buffers += zip(*(disassemble(site.group, extent) for extent in site.kv[layer]), strict=True)
            self._spent.append(site.kv[layer])
            site.kv[layer] = []
        return buffers

    def hand_over(self, layer: int, kv: list[jax.Array]) -> list[jax.Array]:
        """Give a layer's extents, with its pages where they are to be, to the new layout. Returns them."""
        self.high.kv[layer] = kv
        if self.up:
            return kv
        group, programs = self.high.group, self.programs
        num_kept = len(programs.new_extents)
        kept, given_back = kv[:num_kept], kv[num_kept:]
        if given_back:
            given_back = self._mover.restore(programs.restored(layer), given_back)
            self._weights.put_back(group, layer, *programs.released, given_back)
            self.restored = given_back
        self.high.kv[layer] = []
        self._spent.append(kept)
        buffers = [disassemble(group, extent) for extent in kept]
        for index, site in enumerate(self.members):
            ranks = slice(index * programs.lower, (index + 1) * programs.lower)
            site.kv[layer] = [assemble(site.group, extent[ranks]) for extent in buffers]
        return kept + given_back

    def undo(self) -> list[list[jax.Array]]:
        """All extents in the higher layout, their pages lost. Buffers that a failed program has lost are recreated."""
        group, programs = self.high.group, self.programs
        before, after = programs.released
        self.instance.runner.switch = self._deferred = None
        for site in self.members:
            site.replace_lost()
        for layer in range(programs.num_layers):
            if self.high.kv[layer]:
                continue
            if self.up:
                self.take_extents(layer)
                continue
            buffers = self._low_buffers(layer)
            kv = [assemble(group, extents) for extents in zip(*buffers, strict=True)]
            self.high.kv[layer] = kv + self._weights.release(group, layer, after, before)
        for extents in self.high.kv:
            extents[:] = replaced_if_lost(extents, group)
        return self.high.kv

    def _plan_moves(self) -> None:
        """Have the mover plan how all live pages get to their places in the new layout.

        The plan is the same for every layer until a page comes or goes.
        """
        high, low = [], []
        for lane in self.instance.lanes:
            pages = lane.live_pages()
            high.append(pages[lane.ranks[self.high_group]])
            low.append(pages[lane.ranks[self.low_group]])
        tables = [*high, *low]
        if self._plan_of is None or not all(map(np.array_equal, tables, self._plan_of)):
            self._plan = self._mover.plan(*((low, high) if self.up else (high, low)))
            self._plan_of = tables
