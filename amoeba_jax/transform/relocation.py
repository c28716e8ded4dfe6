"""Relocation: modules of an instance are replicated, migrated or removed while the requests of the instance run.

A module is the attention or the FFN of a layer. A home is a group of devices that compute modules together. A
relocation changes the homes of modules. The layers switch to their new homes in ranges, one range after another,
between steps. The weights of a range are copied to the new homes before the switch of the range. The KV pages of the
range are copied during this switch.

A microbatch is a share of the instance's sequences. Each sequence has page ids at all old and new homes of its
microbatch. The instance can therefore serve between any two switches, and an error can end the relocation between any
two switches.

Modules move only between homes that have one device each. If the new home already computes layers of another instance,
both instances use the same weights, page buffers and page allocator at this home.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.transform.extra_extents import grow, shrink
from amoeba_jax.transform.lanes import LanePages, Requeue, dealt, lane_at, move_sequences, regroup, settle_references
from amoeba_jax.transform.relocation_plan import (
    Module,
    RelocationPlan,
    allocators_at,
    difference,
    homes_of,
    in_use,
    is_used,
    site_at,
)
from amoeba_jax.transform.report import PlacementReport
from amoeba_jax.transform.transition import Transition
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.pages import PagePool
from sharding.placement import Home, Placement


class _Part(NamedTuple):
    """Sequences and cached pages of one new microbatch, which gets a new lane.

    Two new lanes must not share a page, because a prefix cache does not notice when sequences of another lane release
    pages. If several parts of an old lane use the same page, the first of these parts keeps the page, and each of the
    other parts gets a copy of the page.

    Attributes:
        pages: sequences and cached pages of the part, with page ids in the old lane.
        lane: old lane, which has the sequences before the relocation.
        shared: boolean mask over the columns of `pages.table`. True if an earlier part of `lane` also has the page in
            this column. The part then gets a copy of the page.
    """

    pages: LanePages
    lane: Lane
    shared: np.ndarray


class Relocation(Transition):
    """Transition in which modules are replicated to a device, migrated to a device, or removed from a device.

    Attributes:
        copied_bytes: number of bytes of weights whose copies have been started so far.
        shared_bytes: number of bytes of weights that the new homes already held. These weights were not copied.
        kv_moved_bytes: number of bytes of KV cache that were copied to another device so far.
        arrays: arrays of the copied weights. Some of the copies may still run.
    """

    def __init__(self, cluster: Cluster, plan: RelocationPlan):
        super().__init__(cluster, plan.instance, sorted(plan.device_indices), sum(map(len, plan.chunks)))
        self.plan, self._left, self._after = plan, list(plan.chunks), plan.after
        self.copied_bytes = self.shared_bytes = self.kv_moved_bytes = 0
        self.arrays: list[jax.Array] = []
        self._requested: range | None = None
        self._waiting: list[jax.Array] = []
        self._live_before = [ledger.live_bytes for ledger in cluster.ledgers]

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def _keeps_weights(self) -> bool:
        """Whether a device keeps the weights of modules that leave it. True only for `migrate` with `modules="kv"`."""
        return self.plan.options.kind == "migrate" and self.plan.options.modules == "kv"

    @property
    def must_drain(self) -> bool:
        """Whether all steps in flight must end before `settle` is called.

        True only for `scale_out`, because the sampling state of sequences then moves to another device.
        """
        return self.plan.options.kind == "scale_out"

    # Begin

    def begin(self, requeue: Requeue) -> None:
        """Divide the sequences among the microbatches, and allocate pages for every sequence at the new homes.

        Raises `OutOfPagesError` or `MemoryBudgetError` if there is too little memory. After an error, the instance
        keeps its placement and its sequences, but cached prefixes may have been dropped.
        """
        plan, cluster = self.plan, self.cluster
        with ExitStack() as undo:
            for home, extents in plan.extents.items():
                site, allocators = site_at(cluster, home), allocators_at(cluster, home)
                if site is not None and allocators is not None and (extra := site.extent_pages[len(extents) :]):
                    shrink(cluster, home, site, allocators[0])
                    undo.callback(grow, cluster, site, allocators[0], extra)
            parts = self._parts()
            try:
                self._make_room(parts)
            except OutOfPagesError:
                for lane in {part.lane for part in parts}:  # requests matter more than cached prefixes
                    lane.cache.clear()
                parts = self._parts()
                self._make_room(parts)
            sites, allocators = dict(self.instance.runner.sites), dict(self.instance.allocators)
            if plan.joining is not None:
                sites |= plan.joining.runner.sites
                allocators |= plan.joining.allocators
            for home in homes_of(plan.after):
                if home not in sites:
                    sites[home], allocators[home] = self._open(home, undo)
            places = [self._places(number, part, allocators, undo) for number, part in enumerate(parts)]
            self._install(parts, places, sites, allocators, requeue)
            undo.pop_all()

    def _parts(self) -> list[_Part]:
        count, old = self.plan.before.num_microbatches, self.instance.lanes
        joining: list[Lane] = self.plan.joining.lanes if self.plan.joining else []
        parts: list[_Part] = []
        for number, lane in enumerate([*old, *joining]):
            size = 1 if self.plan.joining else sum(new * len(old) // count == number for new in range(count))
            known = np.empty(0, np.int32)
            for pages in dealt(lane, size):
                parts.append(_Part(pages, lane, np.isin(pages.table[0], known)))
                known = np.union1d(known, pages.table[0])
        return parts

    def _homes(self, number: int) -> list[Home]:
        """Return all homes that compute attention for microbatch `number` before or after the relocation."""
        before, after = self.plan.before.layers_by_home(number), self._after.layers_by_home(number)
        return list(dict.fromkeys([*before, *after]))

    def _make_room(self, parts: list[_Part]) -> None:
        """Evict cached prefixes of other instances, so that each microbatch gets enough free pages at all of its homes.

        At a new home, a microbatch needs a free page for each of its pages. At an old home, a microbatch needs free
        pages only for copies of shared pages: if several microbatches use a page, the first of these microbatches keeps
        the page, and each other microbatch gets a copy (`_Part.shared`). Raises `OutOfPagesError` if too few pages are
        free after the eviction.
        """
        needed: dict[Home, int] = defaultdict(int)
        for number, part in enumerate(parts):
            for home in self._homes(number):
                needed[home] += int(part.shared.sum()) if home in part.lane.ranks else part.pages.num_pages
        for home, count in needed.items():
            allocators = allocators_at(self.cluster, home)
            if allocators is None:  # the device is still empty
                free = sum(self.plan.extents[home])
            else:
                pool = self.cluster.factory.pool_at(home, {home: allocators})
                for lane in [lane for i in self.cluster.instances for lane in i.lanes if home in lane.ranks]:
                    if lane not in self.instance.lanes:
                        lane.cache.evict(max(count - pool.num_free_pages, 0))
                free = pool.num_free_pages
            if count > free:
                raise OutOfPagesError(
                    f"device {home.start} has {free} free pages, and requests and cached prefixes need {count} there"
                )

    def _open(self, home: Home, undo: ExitStack) -> tuple[Site, SequenceOf[BuddyAllocator]]:
        """Return the buffers and page allocators of a new home. Create them if no instance has this home.

        Args:
            undo: functions that the caller runs after an error. If this method has to prepare an empty device, the
                method adds a function that makes the device empty again.
        """
        cluster = self.cluster
        site, allocators = site_at(cluster, home), allocators_at(cluster, home)
        if site is not None and allocators is not None:
            return site, allocators
        if not in_use(cluster, home):
            undo.callback(cluster.close_device, home.start)
            cluster.open_device(home.start)
        extents, group = self.plan.extents[home], cluster.sub_meshes.group(home.start, home.degree)
        site = cluster.factory.site(group, [[] for _ in range(cluster.dims.config.num_layers)], extents)
        return site, [cluster.factory.open_allocator(home.start, extents)]

    def _places(
        self, number: int, part: _Part, allocators: Mapping[Home, SequenceOf[BuddyAllocator]], undo: ExitStack
    ) -> dict[Home, tuple[PagePool, np.ndarray]]:
        """Allocate new pages for a microbatch. Return `{home: (page pool, page ids)}` for all homes of the microbatch.

        The page ids at a home cover all pages of the microbatch, new and old. At a new home, all pages are new. At an
        old home, only copies of shared pages (`_Part.shared`) are new, and this method also makes these copies.

        Args:
            number: index of the microbatch.
            part: sequences and cached pages of the microbatch.
            undo: functions that the caller runs after an error. This method adds functions that free the new pages.
        """

        def new_pages(pool: PagePool, references: np.ndarray) -> np.ndarray:
            table = pool.allocate(len(references))
            for extra in range(1, int(references.max(initial=1))):
                pool.share(table[:, references > extra])
            undo.callback(_free, pool, table, references)
            return table

        places: dict[Home, tuple[PagePool, np.ndarray]] = {}
        pages, shared = part.pages, part.shared
        for home in self._homes(number):
            pool = self.cluster.factory.pool_at(home, allocators)
            if home not in part.lane.ranks:
                places[home] = pool, new_pages(pool, pages.references)
                continue
            table = pages.table[part.lane.ranks[home]].copy()
            if shared.any():
                old, table[:, shared] = table[:, shared], new_pages(pool, pages.references[shared])
                for layer in self.plan.before.layers_by_home(number).get(home, ()):
                    self._move(layer, home, home, old, table[:, shared])
            places[home] = pool, table
        return places

    def _install(
        self,
        parts: list[_Part],
        places: list[dict[Home, tuple[PagePool, np.ndarray]]],
        sites: dict[Home, Site],
        allocators: Mapping[Home, SequenceOf[BuddyAllocator]],
        requeue: Requeue,
    ) -> None:
        """Give the instance a new lane for each microbatch. `places` has the result of `_places` for each microbatch.

        If this method raises an error, the lanes have not changed. In a `scale_in`, sequences of the instance that ends
        may have been requeued before the error.
        """
        cluster, instance, joining = self.cluster, self.instance, self.plan.joining
        most = max(1, instance.max_running // len(parts))
        found = [lane_at(cluster.factory, part.pages, of, most) for part, of in zip(parts, places, strict=True)]
        lanes, owned = [lane for lane, _ in found], [pages for _, pages in found]
        if joining is not None:
            views = [(instance, lanes[-1], sequence, pages) for sequence, pages in owned.pop()]
            move_sequences([joining], views, requeue)
        for source in {part.lane for part in parts}:
            own = [part.pages for part in parts if part.lane is source]
            settle_references(source.pages, source.cache.pages(), own)
        for part in parts:
            _free(part.lane.pages, part.pages.table[:, part.shared], part.pages.references[part.shared])
        for lane, pages in zip(lanes, owned, strict=False):
            for sequence, own in pages:
                sequence.pages = own
                lane.running.append(sequence)
        instance.lanes, instance.allocators = lanes, allocators
        instance.runner.sites = sites
        instance.runner.place(self.plan.before)
        if joining is not None:
            cluster.replace([joining], [])

    # Switches

    def switch_layers(self, step: StepPlan | None = None) -> None:
        """Switch the next range of layers, or all remaining ranges. `step` is not used.

        If any sequence runs, switch only the next range. If the weights of this range have not arrived yet, switch
        nothing. If no sequence runs, wait for the weights of all remaining ranges, and switch all remaining ranges.
        """
        while self._left:
            chunk = self._left[0]
            self._request(chunk)
            if self.instance.running and not all(map(_has_arrived, self._waiting)):
                return
            jax.block_until_ready(self._waiting)  # raises the error of a copy
            self._switch(chunk)
            self._left.pop(0)
            if self._left:
                self._request(self._left[0])
            if self.instance.running:
                return

    def switch_alone(self) -> None:
        """Do nothing, because a relocation never leaves a switch to the next step."""

    def _request(self, chunk: range) -> None:
        """Start to copy the missing weights of a range of layers to the new homes of these layers."""
        if self._requested == chunk:
            return
        self._waiting, self._requested = [], chunk
        for layer in chunk:
            for device, _, module in self._gained(layer):
                copies = self.cluster.weights.copy_modules(device, layer, module)
                size = sum(copy.nbytes for copy in copies)
                self.copied_bytes += size
                self.shared_bytes += self.cluster.weights.held_bytes(device, layer, module) - size
                self._waiting += copies
        self.arrays += self._waiting

    def _gained(self, layer: int) -> list[Module]:
        return difference(self._after, self.plan.before, layer)

    def _switch(self, chunk: range) -> None:
        self.started = True
        cluster, runner, before, after = self.cluster, self.instance.runner, self.plan.before, self._after
        moves: dict[tuple[Home, Home, tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}
        for layer in chunk:
            for device, _, module in self._gained(layer):
                if module == "attention":
                    cluster.add_layer(runner.sites[Home(device, 1)], layer)
            pairs: dict[tuple[Home, Home], list[int]] = {}
            for number, pair in enumerate(zip(before.attention[layer], after.attention[layer], strict=True)):
                if pair[0] != pair[1]:
                    pairs.setdefault(pair, []).append(number)
            for (source, target), numbers in pairs.items():
                key = source, target, tuple(numbers)
                if key not in moves:
                    moves[key] = self._ids(*key)
                self._move(layer, source, target, *moves[key])
        runner.place(runner.placement.with_layers(chunk, after))
        for layer in chunk:
            self._drop(difference(before, after, layer), weights=not self._keeps_weights)
        self.num_switched += len(chunk)

    def _ids(self, source: Home, target: Home, numbers: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return `(ids at source, ids at target)` of all pages that the microbatches `numbers` hold, `[tp, pages]`."""
        tables = [(lane, lane.live_pages()) for lane in (self.instance.lanes[number] for number in numbers)]
        old = np.concatenate([table[lane.ranks[source]] for lane, table in tables], axis=1)
        return old, np.concatenate([table[lane.ranks[target]] for lane, table in tables], axis=1)

    def _move(self, layer: int, source: Home, target: Home, old: np.ndarray, new: np.ndarray) -> None:
        """Copy KV pages of a layer from the home `source` to the home `target`. Both may be the same home.

        Args:
            old: page ids at `source`, `[tp, pages]`.
            new: page ids at `target`, `[tp, pages]`.
        """
        cluster, sites, count = self.cluster, self.instance.runner.sites, self.cluster.plan.transfer_pages
        specs, here, there = cluster.executables.specs, sites[source], sites[target]
        read = cluster.executables.get(specs.page_read(here.group, here.extent_pages, count))
        write = cluster.executables.get(specs.page_write(there.group, there.extent_pages, count))
        with TraceAnnotation("amoeba.transfer", kind="pages"):
            for first in range(0, old.shape[1], count):
                ids = np.full((2, len(old), count), -1, np.int32)
                size = min(count, old.shape[1] - first)
                ids[0, :, :size], ids[1, :, :size] = old[:, first : first + size], new[:, first : first + size]
                contents = read(here.kv[layer], ids[0])
                if there is not here:
                    contents = jax.device_put(contents, there.group.devices[0])
                there.kv[layer] = write(there.kv[layer], ids[1], contents)
        if there is not here:
            self.kv_moved_bytes += old.shape[1] * cluster.memory_plan.page_bytes

    def _drop(self, modules: Iterable[Module], *, weights: bool = True) -> None:
        """Free the KV cache and the weights of `modules`, except modules that another instance uses.

        Args:
            modules: tuples `(device, layer, kind)`.
            weights: whether weights are freed. If False, only KV cache is freed.
        """
        cluster = self.cluster
        for module in modules:
            if is_used(cluster, module, self.instance):
                continue
            device, layer, kind = module
            if kind == "attention":
                cluster.drop_layer(self.instance.runner.sites[Home(device, 1)], layer)
            if weights:
                cluster.weights.drop_modules(device, layer, kind)

    # End

    def _stop(self) -> None:
        """Make the present placement the final placement. Free the copied weights of layers that have not switched."""
        for layer in [layer for chunk in self._left for layer in chunk]:
            self._drop(self._gained(layer))
        self._left, self._after = [], self.instance.runner.placement
        self.arrays, self._waiting = [], []  # frees the buffers, even if the error is kept

    def fail(self, requeue: Requeue) -> str:
        self._stop()
        self.settle(requeue)
        return "what had not switched is as it was"

    def forget(self) -> str:
        """End the relocation after the KV cache of the instance was lost. Return a text that tells what happened.

        The instance keeps its present placement.
        """
        self._stop()
        self.instance.transition = None
        self.instance.enter(Phase.SERVING)
        self.instance.runner.place(self.instance.runner.placement.joined()[0])
        self._leave_homes()
        return "its requests are computed again"

    def fail_settled(self, requeue: Requeue) -> str:
        return "copies of weights have failed"

    def settle(self, requeue: Requeue) -> "Future[Any] | None":
        """Let the instance serve at the placement after the last switch.

        - If several microbatches have the same homes in all layers, these microbatches become one.
        - If a `scale_out` is complete, the last microbatch becomes a separate instance.
        - The instance loses the homes that it no longer needs.
        - If layers have left a device, the layers that stay on the device get extra extents (page buffers).

        Return a future that is done when all weight copies have arrived. Return None if no weights were copied.
        """
        is_complete = self._after is self.plan.after
        cluster, instance, runner = self.cluster, self.instance, self.instance.runner
        old = instance.lanes
        pools = {home: cluster.factory.pool_at(home, instance.allocators) for home in instance.allocators}
        if is_complete and self.plan.options.kind == "scale_out":
            old = self._hand_over_last(pools, requeue)
            placement, numbers = Placement.uniform(runner.placement.head, runner.placement.num_layers), (0,)
        else:
            placement, numbers = runner.placement.joined()
        self.serve(old, placement, numbers, pools)
        self._leave_homes()
        for home in runner.sites.keys() & self.plan.extents.keys() if is_complete else ():
            extra = self.plan.extents[home][len(runner.sites[home].extent_pages) :]
            if extra:
                grow(cluster, runner.sites[home], instance.allocators[home][0], extra)
        return instance.reader.when_ready(self.arrays) if self.arrays else None

    def _leave_homes(self) -> None:
        """Remove all homes from the instance, except the homes of the present placement.

        If no other instance has a removed home, the KV cache at this home is freed. If no instance uses the device of a
        removed home, the device becomes empty.
        """
        instance, placement = self.instance, self.instance.runner.placement
        gone = [home for home in instance.runner.sites if home not in homes_of(placement)]
        instance.allocators = {home: of for home, of in instance.allocators.items() if home not in gone}
        for home in gone:
            site = instance.runner.sites.pop(home)
            if site_at(self.cluster, home) is None:
                for layer, extents in enumerate(site.kv):
                    if extents:
                        self.cluster.drop_layer(site, layer)
                if not in_use(self.cluster, home):
                    self.cluster.close_device(home.start)

    def _hand_over_last(self, pools: dict[Home, PagePool], requeue: Requeue) -> list[Lane]:
        """Turn the last microbatch into a separate instance. Return the lanes of all other microbatches."""
        cluster, instance, device = self.cluster, self.instance, self.plan.options.device
        *others, last = instance.lanes
        home, weights = Home(device, 1), cluster.weights
        copies = weights.copy_modules(device, None)
        self.copied_bytes += sum(copy.nbytes for copy in copies)
        self.arrays += copies
        cluster.open_device(device, samples=True)
        placement = Placement.uniform(home, cluster.dims.config.num_layers)
        sites, allocators = {home: instance.runner.sites[home]}, {home: instance.allocators[home]}
        new = cluster.factory.instance(placement, sites, allocators, 1, home.degree)
        moved = list(last.running)
        slots = [sequence.slot for sequence in moved]
        regroup(new.lane, [last], pools)
        new.lane.running = []
        for sequence in moved:
            try:
                new.add(sequence, new.lane)
            except Exception:
                new.add(sequence, new.lane, remember=False)
                self.recomputed += 1
                requeue(new, sequence)
        instance.free_slots(slots)
        cluster.swap([], [new])
        return others

    def report(self) -> PlacementReport:
        options, chunks = self.plan.options, self.plan.chunks
        layers = options.layers or range(self.cluster.dims.config.num_layers)
        live = [ledger.live_bytes for ledger in self.cluster.ledgers]
        assert chunks, "a plan changes something"
        return PlacementReport(
            kind=options.kind,
            instance=options.instance,
            device=options.device,
            layers=(layers.start, layers.stop),
            seconds=time.perf_counter() - self._start,
            copied_bytes=self.copied_bytes,
            shared_bytes=self.shared_bytes,
            kv_moved_bytes=self.kv_moved_bytes,
            device_bytes_delta=tuple(new - old for new, old in zip(live, self._live_before, strict=True)),
            steps=self.steps,
            recomputed=self.recomputed,
        )


def _free(pool: PagePool, table: np.ndarray, references: np.ndarray) -> None:
    """Release `references[i]` references to the page in column `i` of `table`, for each `i`."""
    for extra in range(int(references.max(initial=0))):
        pool.free(table[:, references > extra])


def _has_arrived(array: Any) -> bool:
    return array.is_ready()
