"""A group between two degrees: some layers have the lower layout, and some have the higher layout.

Layers switch one segment after another, from the last to the first, between two steps. During the transition, the
instance of the higher degree serves. It has a lane for each instance of the lower degree, and its placement tells the
home of every layer. `instances/runner.py` runs the steps.

With `order="memory_first"`, the FFNs change separately. In a merge, the FFNs of all layers get the higher degree
before any page moves. In a split, they get the lower degree after all pages have moved. In between, the extents of
released FFN weights are KV cache of the lower degree.

Every page has ids in both layouts (see `Lane`). A layer holds the page at the id of the layer's own layout. New pages
get ids in both layouts.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.site import ExchangePart, Site
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.movers import InPlaceMover, PlacedExchange, Plan
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.pausing import KeptPages
from amoeba_jax.transform.report import GroupTransform, LayerSwitch, TransformVariant
from amoeba_jax.weights.store import WeightStore
from kvcache.allocator import BuddyAllocator
from sharding.mesh import assemble, disassemble, replaced_if_lost


class Prepared(NamedTuple):
    """Compiled programs and reserved memory of a transition.

    Attributes:
        staging_bytes: maximum temporary bytes on a device.
        seconds: time to compile the programs.
    """

    programs: TransitionPrograms
    mover: InPlaceMover
    staging_bytes: int
    seconds: float


class Transition:
    """Change of a group between two degrees: switches its layers. Used by the dispatcher thread only.

    Args:
        instance: instance at the higher degree, with a lane for each of `members`.
        high: site of the higher degree, with the layers in the higher layout.
        members: sites of the lower degree, by their first device, with the other layers.
        allocators: page allocators of the new layout, one for each device.
        old: instances before the transition.
        step_s: seconds of a decode step before the transition. None if no step had run.
        cached: two numbers of cached pages: before the transition, and still cached after it.
        kept: pages of paused requests in the new layout. None in a merge.

    Attributes:
        num_switched: number of layers in the new layout.
        started: whether the first switch has begun. After that, the transition cannot be aborted.
        restored: restored weights of the layer that switched last. They are ready last.
        last_result: result after which the transition has ended. None while layers switch.
        steps: number of steps launched during the transition.
        tokens: number of tokens that these steps sample.
        recomputed: number of times that a sequence lost its pages during the transition.
    """

    def __init__(
        self,
        instance: Instance,
        high: Site,
        members: list[Site],
        prepared: Prepared,
        weights: WeightStore,
        options: TransformOptions,
        allocators: list[BuddyAllocator],
        old: list[Instance],
        *,
        step_s: float | None,
        cached: tuple[int, int],
        kept: KeptPages | None = None,
    ):
        self.instance, self.high, self.members = instance, high, members
        self.changes_degree = True
        self.prepared, self.allocators, self.old, self.kept = prepared, allocators, old, kept
        self.programs = programs = prepared.programs
        self.up = programs.up
        self._low_homes = tuple(site.group.home for site in members)
        self._high_homes = (high.group.home,) * len(members)
        self.num_switched = self.steps = self.tokens = self.recomputed = 0
        self.started = False
        self.restored: list[jax.Array] = []
        self.last_result: Future[Any] | None = None
        self._switches: list[LayerSwitch] = []
        self._layers_per_step = 1 if options.layers_per_step == "auto" else options.layers_per_step
        self._overlapped = options.variant is TransformVariant.IN_PLACE_OVERLAPPED
        self._mover, self._weights = prepared.mover, weights
        self._step_s, self._cached = step_s, cached
        self._left: list[SegmentPlan] = list(programs.plan.segments)
        self._spent: list[Any] = []
        self._plan = Plan(0, 0)
        self._plan_of: list[np.ndarray] | None = None
        self._in_step: SwitchInStep | None = None
        moves_ffns = programs.memory_first and not programs.attention_only
        self._ffn_first, self._ffn_last = moves_ffns and self.up, moves_ffns and not self.up
        self._num_released = 0
        if self._ffn_last:  # until then, layers keep all extents
            for site in members:
                site.extent_pages = programs.high_extents
        self._start = time.perf_counter()

    @property
    def devices(self) -> tuple[int, ...]:
        return self.programs.group.device_indices

    @property
    def boundary(self) -> int:
        """Index of the first layer in the new layout. All earlier layers have the old layout."""
        return self.programs.num_layers - self.num_switched

    @property
    def done(self) -> bool:
        """Whether all layers have switched."""
        return not self._left and not self._ffn_last

    @property
    def overlaps(self) -> bool:
        """Whether a switch may run inside the programs of a step."""
        return self._overlapped and self.programs.plan.overlaps_exchanges and not self.programs.memory_first

    def report(self) -> GroupTransform:
        """Return the report of the ended transition."""
        lower, higher = self.programs.lower, self.programs.group.tp
        before, kept = self._cached
        return GroupTransform(
            self.devices,
            lower if self.up else higher,
            higher if self.up else lower,
            time.perf_counter() - self._start,
            tuple(self._switches),
            self.steps,
            self.tokens,
            self.prepared.staging_bytes,
            len(self._switches) * self.programs.restored_bytes,
            self.recomputed,
            self._step_s,
            prefix_pages_kept=kept,
            prefix_pages_dropped=before - kept,
        )

    # Switches

    def switch_layers(self, step: StepPlan | None = None) -> None:
        """Launch the switch of the next layers, or of all layers if no sequence runs.

        Args:
            step: next step, if it is known. Its programs may run the last of these switches (see `SwitchInStep`).
        """
        with TraceAnnotation("amoeba.switch", instance=self.instance.id, layer=self.boundary - 1):
            self._switch_layers(step)

    def _switch_layers(self, step: StepPlan | None) -> None:
        self.switch_alone()
        if self._ffn_first:
            self._release_ffns()
        start = time.perf_counter()
        self._plan_moves()
        plan_s = time.perf_counter() - start
        wanted = self._layers_per_step if self.instance.running else self.boundary
        before, first, in_step = self.num_switched, len(self._left), False
        try:
            while self._left and self.num_switched - before < wanted:
                segment = self._left[-1]
                is_last = self.num_switched - before + len(segment.layers) >= wanted
                if is_last and step is not None and self._leave_to(step, segment):
                    in_step = True
                    break
                self._switch(segment, plan_s)
                plan_s = 0.0
        finally:
            # In a split, the next step computes the segment at its new home.
            last = len(self._left) - (1 if in_step and not self.up else 0)
            self._place(self.programs.plan.segments[last:first])
        if self._ffn_last and not self._left:
            self._restore_ffns()

    def _leave_to(self, step: StepPlan, segment: SegmentPlan) -> bool:
        """Leave the switch of a segment to the programs of the next step.

        Return False if there are no programs for it.
        """
        if not self.overlaps:
            return False
        segments, index = self.programs.plan.segments, len(self._left) - 1
        beside = segments[index + 1 :] if self.up else segments[:index]
        self._in_step = switch_in_step(self, self._mover, segment, beside, step)
        self.instance.runner.switch = self._in_step
        self.started |= self._in_step is not None
        return self._in_step is not None

    def switch_alone(self) -> None:
        """Launch the switch that was left to a step, if the step has not launched it."""
        if self._in_step is not None:
            self.instance.runner.switch = None
            self._in_step.run_alone()

    def _switch(self, segment: SegmentPlan, plan_s: float) -> None:
        self.started = True
        for layer in reversed(segment.layers):
            self._switch_layer(layer, plan_s)
            plan_s = 0.0
        self._left.pop()

    def begin_in_step(self, segment: SegmentPlan, exchanges: list[PlacedExchange]) -> None:
        """Start the switch of a segment inside a step: take its extents and launch these exchanges of pages."""
        self._in_step = None
        for layer in reversed(segment.layers):
            self.high.kv[layer] = self._mover.run(exchanges, self.take_extents(layer))

    def end_in_step(self, segment: SegmentPlan, move_s: float) -> None:
        """End the switch of a segment inside a step, after all exchanges are launched.

        `move_s`: seconds of the launches.
        """
        for layer in reversed(segment.layers):
            start = time.perf_counter()
            self.hand_over(layer, self.high.kv[layer])
            self._record(layer, 0.0, move_s / len(segment.layers), time.perf_counter() - start)
        self._left.pop()
        if self.up:
            self._place([segment])

    def _switch_layer(self, layer: int, plan_s: float) -> None:
        # Wait for the steps before, so that they do not count as time of the switch.
        self._wait([site.kv[layer] for site in self.members] if self.up else self.high.kv[layer])
        start = time.perf_counter()
        kv = self.take_extents(layer)
        taken = time.perf_counter()
        kv = self._mover.move(kv)
        self._wait(kv)
        moved = time.perf_counter()
        self._wait(self.hand_over(layer, kv))
        if not self._overlapped:
            self.drop_spent()  # if extents were not written in place, only these arrays hold the old extents
        self._record(layer, plan_s, moved - taken, taken - start + time.perf_counter() - moved)

    def _record(self, layer: int, plan_s: float, move_s: float, weights_s: float) -> None:
        moved_bytes = self._plan.num_pieces * self.programs.piece_bytes
        self.num_switched += 1
        self._switches.append(LayerSwitch(layer, plan_s, move_s, weights_s, self._plan.num_phases, moved_bytes))

    def _place(self, switched: Sequence[SegmentPlan]) -> None:
        """Change the placement: later steps compute the switched segments at their new homes."""
        if switched:
            layers = range(switched[0].layers.start, switched[-1].layers.stop)
            runner, homes = self.instance.runner, self._high_homes if self.up else self._low_homes
            module = "attention" if self.programs.memory_first else "layer"
            runner.place(runner.placement.with_modules(layers, module, homes))

    def _wait(self, arrays: list[Any]) -> None:
        if not self._overlapped:
            jax.block_until_ready(arrays)

    def _plan_moves(self) -> None:
        """Plan the moves of all live pages. The plan serves every layer until a page is allocated or freed."""
        high, low = [], []
        for lane, home in zip(self.instance.lanes, self._low_homes, strict=True):
            pages = lane.live_pages()
            high.append(pages[lane.ranks[self.high.group.home]])
            low.append(pages[lane.ranks[home]])
        tables = [*high, *low]
        if self._plan_of is None or not all(map(np.array_equal, tables, self._plan_of)):
            self._plan = self._mover.plan(*((low, high) if self.up else (high, low)))
            self._plan_of = tables

    # FFNs of all layers

    def _release_ffns(self) -> None:
        """Switch the FFNs of all layers to the higher degree.

        Their released weights become KV cache of the lower degree.
        """
        self.started = True
        group, programs, runner = self.high.group, self.programs, self.instance.runner
        layers = range(programs.num_layers)
        for layer in layers:
            self.high.kv[layer] = self._weights.release(group, layer, *programs.released, self._spent)
            self._num_released += 1
            self._append_low(layer, self.high.kv[layer])
            self.high.kv[layer] = []
        new = programs.high_extents[len(programs.low_extents) :]
        lanes = zip(self.instance.lanes, self._low_homes, strict=True)
        allocators = {allocator for lane, home in lanes for allocator in lane.pages.allocators[lane.ranks[home]]}
        for allocator in allocators:
            for num_pages in new:
                allocator.add_extent(num_pages)
        for site in self.members:
            site.extent_pages = programs.high_extents
        runner.place(runner.placement.with_modules(layers, "ffn", self._high_homes))
        self._ffn_first = False

    def _restore_ffns(self) -> None:
        """Switch the FFNs of all layers to the lower degree. All pages must have left the extents of their weights."""
        group, programs, runner = self.high.group, self.programs, self.instance.runner
        num_kept, layers = len(programs.low_extents), range(programs.num_layers)
        for layer in layers:
            buffers = zip(*self._take_low_buffers(layer), strict=True)
            kv = self.high.kv[layer] = [assemble(group, extents) for extents in buffers]
            self._restore(layer, kv[num_kept:])
            self.high.kv[layer] = kv[:num_kept]
            self._append_low(layer, kv[:num_kept])
            self.high.kv[layer] = []
        for site in self.members:
            site.extent_pages = programs.low_extents
        runner.place(runner.placement.with_modules(layers, "ffn", self._low_homes))
        self._ffn_last = False

    # Extents

    def take_extents(self, layer: int) -> list[jax.Array]:
        """Return all extents of a layer as arrays over the ranks of the group.

        In a merge, the extents move from the lower to the higher layout, and released weights are added to them.
        """
        if not self.up:
            return self.high.kv[layer]
        group, released = self.high.group, list[jax.Array]()
        if self.programs.changes_weights and layer >= self._num_released:
            # First: if it fails, the layer still has the lower layout.
            released = self._weights.release(group, layer, *self.programs.released, self._spent)
        base = [assemble(group, extents) for extents in zip(*self._take_low_buffers(layer), strict=True)]
        self.high.kv[layer] = base + released
        return self.high.kv[layer]

    def _take_low_buffers(self, layer: int) -> list[tuple[jax.Array, ...]]:
        """Remove the extents of a layer from the lower layout. Return the buffers of each rank of the group."""
        buffers: list[tuple[jax.Array, ...]] = []
        for site in self.members:
            buffers += zip(*(disassemble(site.group, extent) for extent in site.kv[layer]), strict=True)
            self._spent.append(site.kv[layer])
            site.kv[layer] = []
        return buffers

    def hand_over(self, layer: int, kv: list[jax.Array]) -> list[jax.Array]:
        """Give the extents of a layer to the new layout after its pages have moved. Return the extents.

        In a split, the last extents become weights again.
        """
        self.high.kv[layer] = kv
        if self.up:
            return kv
        num_kept = len(kv) if self._ffn_last else len(self.programs.new_extents)
        kept = kv[:num_kept]
        restored = self._restore(layer, kv[num_kept:]) if num_kept < len(kv) else []
        self.high.kv[layer] = kept
        self._append_low(layer, kept)
        self.high.kv[layer] = []
        self._spent.append(kept)
        return kept + restored

    def _restore(self, layer: int, extents: list[jax.Array]) -> list[jax.Array]:
        """Turn the extents of a layer's released shards into weights again. Return the weights. Donates `extents`."""
        restored = self._mover.restore(self.programs.restored(layer), extents)
        self._weights.put_back(self.high.group, layer, *self.programs.released, restored)
        self.restored = restored
        return restored

    def _append_low(self, layer: int, extents: list[jax.Array]) -> None:
        """Append extents, given as arrays over the group, to the extents of a layer in the lower layout."""
        buffers = [disassemble(self.high.group, extent) for extent in extents]
        new: list[list[jax.Array]] = []
        for index, site in enumerate(self.members):
            ranks = slice(index * self.programs.lower, (index + 1) * self.programs.lower)
            new.append([assemble(site.group, extent[ranks]) for extent in buffers])
        for site, own in zip(self.members, new, strict=True):
            site.kv[layer] = site.kv[layer] + own

    def drop_spent(self) -> None:
        """Drop arrays whose buffers now belong to other arrays.

        A switch of all layers leaves hundreds of such arrays. Call this after the launch of the next step, so that the
        step does not wait for it.
        """
        self._spent.clear()

    def drop_buffers(self) -> None:
        """Drop all device buffers, before new ones are allocated."""
        for site in (self.high, *self.members):
            site.kv.clear()
        self.restored, self._in_step = [], None
        self.drop_spent()

    def undo(self) -> list[list[jax.Array]]:
        """Collect all extents in the higher layout after a failure. Return the extents of each layer.

        The contents of their pages are invalid. Lost buffers are replaced by zeros.
        """
        group, programs = self.high.group, self.programs
        before, after = programs.released
        self.instance.runner.switch = self._in_step = None
        for site in self.members:
            site.replace_lost()
        for layer in range(programs.num_layers):
            low = zip(*self._take_low_buffers(layer), strict=True)
            kv = [assemble(group, extents) for extents in low] + self.high.kv[layer]
            if len(kv) < len(programs.high_extents):
                kv += self._weights.release(group, layer, min(before, after), max(before, after))
            self.high.kv[layer] = kv
        for extents in self.high.kv:
            extents[:] = replaced_if_lost(extents, group)
        return self.high.kv


@dataclass(eq=False)
class SwitchInStep:
    """Switch of a segment that runs inside the next step. The step's programs run the last phases of its page exchange.

        merge   layers 8-11 at 4 x TP1 | their first phases | layers 12-15 and phase n-1, layers 16-19 and phase n
        split   their first phases | layers 0-3 and phase n-1, layers 4-7 and phase n | layers 8-11 at 4 x TP1

    In a merge, the layers of `segment` have computed the step at the lower degree before `begin`. In a split, they
    compute it at the lower degree after `end`. A backend with asynchronous collectives exchanges pages while it
    computes. The CPU backend does not.

    Attributes:
        shape: shape of the step for which `parts` was made.
        first: exchanges that run as separate programs, before `parts`.
        parts: exchanges inside the programs of other segments, by segment.
        all: all exchanges as separate programs, for a step of another shape.
    """

    transition: Transition
    segment: SegmentPlan
    shape: BatchShape
    first: list[PlacedExchange]
    parts: dict[SegmentPlan, ExchangePart]
    all: list[PlacedExchange]
    _begin_s: float = field(default=0.0, init=False)

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """Launch the first exchanges. Return the exchanges that must run inside the programs of segments.

        Args:
            shape: shape of a step of all lanes; None for a step of one lane.
        """
        start, fits = time.perf_counter(), shape == self.shape
        self.transition.begin_in_step(self.segment, self.first if fits else self.all)
        self._begin_s = time.perf_counter() - start
        return self.parts if fits else {}

    def end(self) -> None:
        """Give the segment's extents to the new layout, and change the placement."""
        self.transition.end_in_step(self.segment, self._begin_s)

    def run_alone(self) -> None:
        """Run the whole switch without a step."""
        self.begin(None)
        self.end()


def switch_in_step(
    transition: Transition,
    mover: InPlaceMover,
    segment: SegmentPlan,
    beside: Sequence[SegmentPlan],
    step: StepPlan,
) -> SwitchInStep | None:
    """Return the switch of `segment` inside a step, or None if there are no programs for it.

    Args:
        beside: segments that the step computes at the higher degree.
    """
    if step.lane is not None or not step.decodes or not beside:
        return None
    first, last = mover.divided(len(beside))
    parts: dict[SegmentPlan, ExchangePart] = {}
    for other, (kind, send, receive) in zip(beside, last, strict=False):
        program = transition.programs.step_with_exchange(other, step.shape, len(segment.layers), kind.distance)
        if program is None:
            return None
        parts[other] = ExchangePart(program, segment.layers, send, receive)
    return SwitchInStep(transition, segment, step.shape, first, parts, mover.exchanges) if parts else None
