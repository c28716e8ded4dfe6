"""Relayout: the transition of a group of devices between two tensor-parallel degrees.

The layers switch to the new degree in segments (runs of consecutive layers), from the last segment to the first.
Between two switches, the first layers of the model have the old degree, and the last layers have the new degree.

One instance of the higher degree serves during a relayout. The group of this instance consists of members. A member is
a smaller group of devices that compute together at the lower degree. The sequences of the instance are divided into
lanes, one lane for each member. `instances/runner.py` runs the steps of the instance.

Every page has two sets of ids: ids at the lower degree, and ids at the higher degree (see `Lane`). Pages that are
allocated during a relayout also get both sets. The attention of a layer uses the ids of the degree that the attention
has at that time.

With `order="memory_first"`, the FFNs of all layers switch together: in a merge before any page moves, in a split after
all pages have moved. While pages move, the memory of the FFN weights that the higher degree does not need is KV cache.
"""

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import ExchangePart, Site
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.transform.lanes import Requeue, adopt_prefixes, move_sequences
from amoeba_jax.transform.movers import MovePlan, PlacedExchange
from amoeba_jax.transform.pausing import KeptPages
from amoeba_jax.transform.relayout_plan import Prepared, RelayoutPlan
from amoeba_jax.transform.report import GroupTransform, LayerSwitch, TransformVariant
from amoeba_jax.transform.transition import Transition
from kvcache.allocator import BuddyAllocator
from kvcache.pages import SequencePages
from sharding.mesh import combine, disassemble, divide
from sharding.placement import Placement

logger = logging.getLogger(__name__)

RECOMPUTED = "its requests are computed again"


class Relayout(Transition):
    """Transition of a group of devices between two tensor-parallel degrees.

    Args:
        instance: instance of the higher degree, which serves during the transition. The instance has one lane for each
            site in `members`. `instance.site` has the KV extents (page buffers) of each layer whose attention has the
            higher degree.
        members: device buffers, one `Site` for each member, ordered by first device. A member is a smaller group of
            devices that compute together at the lower degree. The sites have the KV extents of each layer whose
            attention has the lower degree.
        prepared: result of `prepare`: compiled programs, and the size of the reserved memory.
        allocators: page allocators for the degree after the transition, one for each device.
        cached: `(number of cached pages before the relayout, number of these pages that stay cached)`.
        kept: pages of paused requests, already allocated in `allocators`. In a merge or join, this argument is None.

    Attributes:
        restored: weight arrays of the layer whose weights were restored last. When these arrays are ready, the restored
            weights of all layers are ready.
    """

    changes_degree = True

    def __init__(
        self,
        cluster: Cluster,
        plan: RelayoutPlan,
        instance: Instance,
        members: list[Site],
        prepared: Prepared,
        allocators: list[BuddyAllocator],
        *,
        cached: tuple[int, int],
        kept: KeptPages | None = None,
    ):
        self.programs = programs = prepared.programs
        super().__init__(cluster, instance, plan.group.device_indices, programs.num_layers)
        self.plan, self.high, self.members = plan, instance.site, members
        self.prepared, self.allocators, self.kept = prepared, allocators, kept
        self.prepare_s = prepared.seconds
        self.up = plan.up
        self._low_homes = tuple(site.group.home for site in members)
        self._high_homes = (self.high.group.home,) * len(members)
        self.restored: list[jax.Array] = []
        self._switches: list[LayerSwitch] = []
        options = plan.options
        self._layers_per_step = 1 if options.layers_per_step == "auto" else options.layers_per_step
        self._overlapped = options.variant is TransformVariant.IN_PLACE_OVERLAPPED
        self._mover, self._weights = prepared.mover, cluster.weights
        self._step_s = max((s for old in plan.old if (s := old.pace.step_s) is not None), default=None)
        self._cached = cached
        self._left: list[SegmentPlan] = list(programs.plan.segments)
        self._moves = MovePlan(0, 0)
        self._moves_of: list[np.ndarray] | None = None
        self._in_step: SwitchInStep | None = None
        self._ffn_first, self._ffn_last = plan.memory_first and self.up, plan.memory_first and not self.up
        self._num_released = 0
        if self._ffn_last:  # until the FFNs switch, layers keep all extents
            for site in members:
                site.extent_pages = programs.high_extents

    @property
    def done(self) -> bool:
        return not self._left and not self._ffn_last

    @property
    def overlaps(self) -> bool:
        return self._overlapped and self.programs.plan.overlaps_exchanges and not self.programs.memory_first

    @property
    def must_drain(self) -> bool:
        return not self.up

    def report(self) -> GroupTransform:
        before, kept = self._cached
        lower, higher = self.plan.lower, self.plan.group.tp
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
        self.switch_alone()
        if self._ffn_first:
            self._release_ffns()
        start = time.perf_counter()
        self._plan_moves()
        plan_s = time.perf_counter() - start
        wanted = self._layers_per_step if self.instance.running else self.num_layers
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
        """Leave the switch of a segment to the programs of `step`, the next step. Return whether this is possible.

        The step must compute all lanes, no prompt, and at least one segment at the higher degree. The step programs
        that also exchange pages must be compiled.
        """
        segments, index = self.programs.plan.segments, len(self._left) - 1
        beside = segments[index + 1 :] if self.up else segments[:index]  # segments of the step at the higher degree
        if not self.overlaps or step.lane is not None or not step.decodes or not beside:
            return False
        first, last = self._mover.divided(len(beside))
        parts: dict[SegmentPlan, ExchangePart] = {}
        for other, (kind, send, receive) in zip(beside, last, strict=False):
            program = self.programs.step_with_exchange(other, step.shape, len(segment.layers), kind.distance)
            if program is None:
                return False
            parts[other] = ExchangePart(program, segment.layers, send, receive)
        if not parts:
            return False
        self._in_step = self.instance.runner.switch = SwitchInStep(self, segment, step.shape, first, parts)
        self.started = True
        return True

    def switch_alone(self) -> None:
        if self._in_step is not None:
            self.instance.runner.switch = None
            self._in_step.run_alone()

    def _switch(self, segment: SegmentPlan, plan_s: float) -> None:
        self.started = True
        for layer in reversed(segment.layers):
            self._switch_layer(layer, plan_s)
            plan_s = 0.0
        self._left.pop()

    def _switch_layer(self, layer: int, plan_s: float) -> None:
        # Wait for earlier steps, so that their time does not count as time of the switch.
        self._wait([site.kv[layer] for site in self.members] if self.up else self.high.kv[layer])
        start = time.perf_counter()
        kv = self.take_extents(layer)
        taken = time.perf_counter()
        kv = self._mover.move(kv)
        self._wait(kv)
        moved = time.perf_counter()
        self._wait(self.hand_over(layer, kv))
        if not self._overlapped:
            self.drop_spent()  # frees the old extents if the programs did not write in place
        self._record(layer, plan_s, moved - taken, taken - start + time.perf_counter() - moved)

    def _record(self, layer: int, plan_s: float, move_s: float, weights_s: float) -> None:
        moved_bytes = self._moves.num_pieces * self.programs.piece_bytes
        self.num_switched += 1
        self._switches.append(LayerSwitch(layer, plan_s, move_s, weights_s, self._moves.num_phases, moved_bytes))

    def _place(self, switched: SequenceOf[SegmentPlan]) -> None:
        """Change the placement of the instance: later steps compute the segments `switched` at their new homes."""
        if switched:
            layers = range(switched[0].layers.start, switched[-1].layers.stop)
            runner, homes = self.instance.runner, self._high_homes if self.up else self._low_homes
            module = "attention" if self.programs.memory_first else "layer"
            runner.place(runner.placement.with_modules(layers, module, homes))

    def _wait(self, arrays: list[Any]) -> None:
        if not self._overlapped:
            jax.block_until_ready(arrays)

    def _plan_moves(self) -> None:
        """Plan the moves of the live pages: the pages that running sequences or the prefix cache hold.

        All layers use this plan. If the ids of the live pages have not changed since the last plan, keep the last plan.
        """
        high, low = [], []
        for lane, home in zip(self.instance.lanes, self._low_homes, strict=True):
            pages = lane.live_pages()
            high.append(pages[lane.ranks[self.high.group.home]])
            low.append(pages[lane.ranks[home]])
        tables = [*high, *low]
        if self._moves_of is None or not all(map(np.array_equal, tables, self._moves_of)):
            self._moves = self._mover.plan(*((low, high) if self.up else (high, low)))
            self._moves_of = tables

    # FFNs of all layers

    def _release_ffns(self) -> None:
        """Switch the FFNs of all layers to the higher degree.

        The memory of all FFN weights that a device does not need at the higher degree becomes KV cache.
        """
        self.started = True
        group, programs, runner = self.high.group, self.programs, self.instance.runner
        layers = range(self.num_layers)
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
        """Switch the FFNs of all layers to the lower degree.

        The KV extents (page buffers) whose memory held FFN weights become weights again. All pages in these extents
        must be free.
        """
        programs, runner = self.programs, self.instance.runner
        num_kept, layers = len(programs.low_extents), range(self.num_layers)
        for layer in layers:
            kv = self.high.kv[layer] = self._take_low(layer)
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
        """Begin the switch of a layer. Return the layer's KV extents (page buffers), as arrays over the group.

        In a merge or join, the sites of the lower degree (`members`) lose these extents. If the switch of the layer
        releases weights, the result also has the memory of these weights, as further extents.
        """
        if not self.up:
            return self.high.kv[layer]
        group, released = self.high.group, list[jax.Array]()
        if self.programs.changes_weights and layer >= self._num_released:
            # Release first: if the release fails, the layer still has the lower degree.
            released = self._weights.release(group, layer, *self.programs.released, self._spent)
        self.high.kv[layer] = self._take_low(layer) + released
        return self.high.kv[layer]

    def _take_low(self, layer: int) -> list[jax.Array]:
        """Move a layer's KV extents from the lower-degree sites into arrays over the group. Return the arrays."""
        parts = [site.group for site in self.members]
        both = zip(*(site.kv[layer] for site in self.members), strict=True)
        extents = [combine(self.high.group, extents, parts) for extents in both]
        for site in self.members:
            self._spent.append(site.kv[layer])
            site.kv[layer] = []
        return extents

    def hand_over(self, layer: int, kv: list[jax.Array]) -> list[jax.Array]:
        """End the switch of a layer whose pages have moved. Return the layer's KV extents and restored weights.

        In a merge or join, `instance.site` gets `kv`. In a split or divide, the sites of the lower degree (`members`)
        get the extents in `kv` that remain KV cache. In a split, the last extents in `kv` may become weights again.

        Args:
            kv: KV extents (page buffers) of the layer, as arrays over the group.
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
        """Turn KV extents of a layer back into the layer's released weights. Return the weights. Donates `extents`.

        Args:
            extents: extents (page buffers) in the memory that held these weights before their release.
        """
        restored = self._mover.restore(self.programs.restored(layer), extents)
        self._weights.put_back(self.high.group, layer, *self.programs.released, restored)
        self.restored = restored
        return restored

    def _append_low(self, layer: int, extents: list[jax.Array]) -> None:
        """Append KV extents, given as arrays over the group, to a layer's extents at the sites of the lower degree."""
        parts = [site.group for site in self.members]
        divided = (divide(self.high.group, extent, parts) for extent in extents)
        for site, *own in zip(self.members, *divided, strict=True):
            site.kv[layer] = site.kv[layer] + own

    def drop_buffers(self) -> None:
        """Drop the KV extents (page buffers) of both degrees, to free memory after a failure.

        Also drop the references of this object to restored weights and to replaced arrays (`drop_spent`), because these
        references keep memory in use. The weight store keeps its weights. A switch that was left to the next step is
        forgotten.
        """
        for site in (self.high, *self.members):
            site.kv.clear()
        self.restored, self._in_step = [], None
        self.drop_spent()

    # The end

    def settle(self, requeue: Requeue) -> "Future[Any] | None":
        instance = self.instance
        if self.steps and not instance.pending:  # nothing else tells when the last switch has run
            jax.block_until_ready([self.high.kv, *(site.kv for site in self.members)])
        if self.up:
            self.cluster.factory.settle_allocators(instance.group, self.allocators)
            self._serve_high()
            return instance.pending[-1].result if instance.pending else None
        if self.plan.kind == "divide":
            self.cluster.factory.settle_allocators(instance.group, self.allocators)
            self._serve_parallel()
            return None
        first = self._settle_low(requeue)
        return first.reader.when_ready(self.restored) if self.restored else None

    def _serve_high(self) -> None:
        """End the transition at the higher degree. All lanes of the instance become one lane."""
        instance, home = self.instance, self.instance.group.home
        instance.allocators = {home: self.cluster.factory.allocators_of(instance.group)}
        self.serve(instance.lanes, *instance.runner.placement.joined(), {})
        instance.runner.sites = {home: instance.site}
        if instance.paused:
            instance.take_the_place_of(instance.paused)

    def _serve_parallel(self) -> None:
        """End the transition with data-parallel attention. Each lane keeps only its page ids at the lower degree."""
        instance, factory, home = self.instance, self.cluster.factory, self.instance.group.home
        placement = Placement.parallel_attention(home, self.plan.lower, self.num_layers)
        instance.allocators = {site.group.home: factory.allocators_of(site.group) for site in self.members}
        self.serve(instance.lanes, placement, range(len(instance.lanes)), {})
        instance.runner.sites = {home: instance.site, **{site.group.home: site for site in self.members}}

    def _settle_low(self, requeue: Requeue) -> Instance:
        """Move all sequences and pages to instances of the lower degree. Return the first of these instances.

        If the present instance has paused instances, the paused instances resume and get the sequences. Otherwise, new
        instances are created.
        """
        instance, factory = self.instance, self.cluster.factory
        new = list(instance.paused) or self._low_instances([self.programs.released[1]] * len(self.members))
        move_sequences([instance], self._views(new), requeue)  # may fail, so this call comes first
        if self.kept is not None:
            self.kept.settle()
        factory.settle_allocators(instance.group, self.allocators)
        for own, lane in zip(new, instance.lanes, strict=True):
            adopt_prefixes(own.lane, lane, own.group.home)
        for member, site in zip(instance.drop_paused(), self.members, strict=False):
            member.site.kv[:] = site.kv
        self.cluster.replace([instance], new)
        return new[0]

    def _low_instances(self, released: list[int]) -> list[Instance]:
        """Create one instance of the lower degree for each site (device buffers) in `self.members`.

        The new instances have no sequences.

        Args:
            released: released degrees, one for each new instance. With released degree n, a device keeps only the
                weights that TPn needs. The memory of all other weights is KV cache.
        """
        factory, tp = self.cluster.factory, self.plan.lower
        tokens = disassemble(self.instance.group, self.instance.runner.last_tokens)
        return [
            factory.new_instance(
                site.group, factory.allocators_of(site.group), site.kv, degree, tokens[index * tp : (index + 1) * tp]
            )
            for index, (site, degree) in enumerate(zip(self.members, released, strict=True))
        ]

    def _views(self, new: list[Instance]) -> list[tuple[Instance, Lane, Sequence, SequencePages]]:
        """Return, for each sequence, `(new instance, lane of the new instance, sequence, pages in the new lane)`."""
        return [
            (own, own.lane, sequence, SequencePages(own.lane.pages, sequence.pages.table[lane.ranks[own.group.home]]))
            for own, lane in zip(new, self.instance.lanes, strict=True)
            for sequence in lane.running
            if sequence.pages is not None
        ]

    # Failures

    def fail(self, requeue: Requeue) -> str:
        if not self.started:
            self._abort()
            return "its instances are as they were"
        self.instance.transition = None
        self.instance.requeue_all(requeue)
        self.drop_buffers()
        self.cluster.take_back([self.instance])
        return RECOMPUTED

    def _abort(self) -> None:
        """Undo the transition after an error before the first switch. The old instances then serve again."""
        instance = self.instance
        if not self.up:
            self._serve_high()
            return
        if self.plan.kind == "join":
            self._serve_parallel()
            return
        instance.transition = None
        instance.sampler.state.replace_lost()  # `new.add` writes the rows of all sequences again
        old = self._low_instances([before.released for before in self.plan.old])
        views = self._views(old)
        for own, lane in zip(old, instance.lanes, strict=True):
            adopt_prefixes(own.lane, lane, own.group.home)
            lane.running = []
        for new, lane, sequence, pages in views:
            sequence.pages = pages
            new.add(sequence, lane)
        self.cluster.replace([instance], old)

    def fail_settled(self, requeue: Requeue) -> str:
        """Recover a group after an error of `last_result`. Return a text that tells what happened to the group.

        After a merge or join, `last_result` is the result of a step. `Steps.recover` has already handled an error of a
        step, so this method does nothing. After a split, `last_result` is a future of the restored weights, and the
        error means that these weights are lost. This method loads the lost weights again, and requeues all requests of
        the group.
        """
        if self.up:
            return RECOMPUTED
        instances = [i for i in self.cluster.instances if i.id in self.devices]
        for instance in instances:
            instance.requeue_all(requeue)
            instance.site.kv.clear()
        self.drop_buffers()
        before, after = self.programs.released
        for layer in range(self.num_layers):
            self._weights.release(self.high.group, layer, after, before)
        self.cluster.take_back(instances)
        return f"its weights are loaded again, and {RECOMPUTED}"


@dataclass(eq=False)
class SwitchInStep:
    """Switch of one segment of layers inside the next step, so that pages can move during the computation.

    The pages of the segment move in n phases (exchanges between ranks). The first phases run as separate programs. Each
    of the last phases runs inside a step program that computes another segment at the higher degree. The computation
    and the exchange of such a program overlap if the backend has asynchronous collectives. On CPU, they do not overlap.

    In these examples, the degrees are 1 and 4. Layers 12-19 have already switched (the last layers switch first), and
    layers 8-11 switch now. `|` separates work that runs one after the other. `layers A + phase k` is one step
    program that computes layers A at TP4, and moves pages of layers 8-11 (phase k of n):

        merge   layers 0-11 at 4 x TP1 | phases 1 to n-2 | layers 12-15 + phase n-1 | layers 16-19 + phase n
        split   phases 1 to n-2 | layers 0-3 + phase n-1 | layers 4-7 + phase n | layers 8-19 at 4 x TP1

    In both examples, the step computes layers 8-11 at TP1: in the merge before their pages move, in the split after
    their pages have moved.

    Attributes:
        segment: segment that switches.
        shape: batch shape of the step for which the switch was planned.
        first: exchanges that run as separate programs, before the step programs in `parts`.
        parts: exchanges that run inside step programs, as `{segment that the step program computes: exchange}`.
    """

    relayout: Relayout
    segment: SegmentPlan
    shape: BatchShape
    first: list[PlacedExchange]
    parts: dict[SegmentPlan, ExchangePart]
    _begin_s: float = field(default=0.0, init=False)

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """Launch the page exchanges that are separate programs. Return the exchanges that step programs must run.

        The result is a mapping `{segment: exchange}`. The step program that computes the segment must also run the
        exchange. If the step does not have the planned shape, launch all exchanges as separate programs, and return an
        empty mapping.

        Args:
            shape: shape of the step. None if there is no step, or if the step computes only one of the lanes.
        """
        start, fits, relayout = time.perf_counter(), shape == self.shape, self.relayout
        relayout._in_step = None
        exchanges = self.first if fits else relayout._mover.exchanges
        for layer in reversed(self.segment.layers):
            relayout.high.kv[layer] = relayout._mover.run(exchanges, relayout.take_extents(layer))
        self._begin_s = time.perf_counter() - start
        return self.parts if fits else {}

    def end(self) -> None:
        """End the switch of the segment. Call this method after all exchanges of the switch have been launched.

        In a merge or join, also change the placement, so that later steps compute the segment at its new home. In a
        split or divide, `Relayout.switch_layers` has already changed the placement.
        """
        relayout, layers = self.relayout, self.segment.layers
        for layer in reversed(layers):
            start = time.perf_counter()
            relayout.hand_over(layer, relayout.high.kv[layer])
            relayout._record(layer, 0.0, self._begin_s / len(layers), time.perf_counter() - start)
        relayout._left.pop()
        if relayout.up:
            relayout._place([self.segment])

    def run_alone(self) -> None:
        """Switch the segment without a step: launch all exchanges as separate programs."""
        self.begin(None)
        self.end()
