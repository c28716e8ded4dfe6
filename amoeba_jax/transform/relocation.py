"""Relocation: modules of an instance replicate, migrate or leave a device while its requests run.

A relocation leads from one placement to another. Layers switch in chunks, between two steps. Before a chunk switches,
its weights must have arrived at the new home. At the switch, the pages of its layers are copied there.

A sequence has page ids at all homes of its microbatch. Every placement on the way is therefore valid, and a relocation
may end after any chunk.

Only homes of one device take part. If a device already computes layers of another instance with the same model, no
weights are copied, and the new pages come from that instance's allocator.
"""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.site import Site
from amoeba_jax.transform.extra_extents import grow, shrink
from amoeba_jax.transform.lanes import LanePages, dealt, lane_at, regroup, settle_references
from amoeba_jax.transform.merge_split import Requeue, hand_over
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
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.pages import PagePool
from sharding.placement import Home, Placement


@dataclass(eq=False)
class Relocation:
    """Relocation in progress. `instance.transition` refers to it. Used by the dispatcher thread only.

    Attributes:
        num_switched: number of layers that have switched to their new homes.
        started: whether a layer has switched.
        copied_bytes: bytes of weights copied so far.
        shared_bytes: bytes of weights that the new homes already held.
        kv_moved_bytes: bytes of KV cache copied so far.
        steps: number of steps launched during the relocation.
        recomputed: number of times that a sequence lost its pages during the relocation.
        arrays: weights whose copies may still run.
    """

    cluster: Cluster
    plan: RelocationPlan
    requeue: Requeue
    num_switched: int = 0
    started: bool = False
    copied_bytes: int = 0
    shared_bytes: int = 0
    kv_moved_bytes: int = 0
    steps: int = 0
    recomputed: int = 0
    arrays: list[jax.Array] = field(default_factory=list)
    changes_degree = False
    overlaps = False

    def __post_init__(self) -> None:
        self.instance, self._left = self.plan.instance, list(self.plan.chunks)
        self._after = self.plan.after
        self._requested: range | None = None
        self._waiting: list[jax.Array] = []
        self._start = time.perf_counter()
        self._live_before = [ledger.live_bytes for ledger in self.cluster.ledgers]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.plan.device_indices))

    @property
    def done(self) -> bool:
        """Whether all layers have switched."""
        return not self._left

    @property
    def _keeps_weights(self) -> bool:
        """Whether the source device keeps the weights of modules that leave it."""
        return self.plan.options.kind == "migrate" and self.plan.options.modules == "kv"

    @property
    def must_drain(self) -> bool:
        """Whether steps in flight must end before `settle`.

        True if the sampling state of sequences moves to another device.
        """
        return self.plan.options.kind == "scale_out"

    # Begin

    def begin(self) -> None:
        """Allocate pages at the new homes for every sequence, and divide sequences among the microbatches.

        Raises `OutOfPagesError` or `MemoryBudgetError`. Sequences and placement are then unchanged.
        """
        cluster = self.cluster
        shrunk: list[tuple[Site, BuddyAllocator, tuple[int, ...]]] = []
        try:
            for home, extents in self.plan.extents.items():
                site, allocators = site_at(cluster, home), allocators_at(cluster, home)
                if site is not None and allocators is not None and (extra := site.extent_pages[len(extents) :]):
                    shrink(cluster, home, site, allocators[0])
                    shrunk.append((site, allocators[0], extra))
            self._begin()
        except BaseException:
            for site, allocator, extra in shrunk:
                grow(cluster, site, allocator, extra)
            raise

    def _begin(self) -> None:
        plan, instance, cluster = self.plan, self.instance, self.cluster
        parts, sources = self._parts()
        needed = self._lacking(parts, sources)
        if not self._make_room(needed):
            for lane in dict.fromkeys(sources):  # requests matter more than cached prefixes
                lane.cache.clear()
            parts, sources = self._parts()
            needed = self._lacking(parts, sources)
        sites, allocators = dict(instance.runner.sites), dict(instance.allocators)
        if plan.joining is not None:
            sites |= plan.joining.runner.sites
            allocators |= plan.joining.allocators
        opened: list[Home] = []
        try:
            for home in homes_of(plan.after):
                if home not in sites:
                    sites[home], allocators[home] = self._open(home, opened)
            self._check_room(needed, allocators)
            self._install(parts, sources, sites, allocators)
        except BaseException:
            for home in opened:
                cluster.close_device(home.start)
            raise

    def _parts(self) -> tuple[list[LanePages], list[Lane]]:
        """Return the sequences and cached pages of each microbatch, and the lane to which they belong now."""
        count = self.plan.before.num_microbatches
        if (joining := self.plan.joining) is not None:
            lanes = [*self.instance.lanes, *joining.lanes]
            return [LanePages.of(lane.running, lane.cache.pages(), lane.pages.tp) for lane in lanes], lanes
        parts: list[LanePages] = []
        sources: list[Lane] = []
        old = self.instance.lanes
        for number, lane in enumerate(old):
            size = sum(new * len(old) // count == number for new in range(count))
            parts += dealt(lane, size)
            sources += [lane] * size
        return parts, sources

    def _homes(self, number: int) -> list[Home]:
        """Return the homes of a microbatch's attention before and after the relocation, each once."""
        before, after = self.plan.before.layers_by_home(number), self._after.layers_by_home(number)
        return list(dict.fromkeys([*before, *after]))

    def _lacking(self, parts: list[LanePages], sources: list[Lane]) -> dict[Home, int]:
        """Return the number of new pages that are needed at each home.

        A microbatch needs new pages at homes where it has none. It also needs copies of pages that another microbatch
        uses.
        """
        needed: dict[Home, int] = {}
        for number, (part, lane, shared) in enumerate(zip(parts, sources, _shared(parts, sources), strict=True)):
            for home in self._homes(number):
                count = int(shared.sum()) if home in lane.ranks else part.num_pages
                needed[home] = needed.get(home, 0) + count
        return needed

    def _make_room(self, needed: dict[Home, int]) -> bool:
        """Evict cached prefixes of other instances at homes that need pages.

        Return whether enough pages are then free.
        """
        enough = True
        for home, count in needed.items():
            allocators = allocators_at(self.cluster, home)
            if allocators is None:  # the device is still empty
                enough &= count <= sum(self.plan.extents[home])
                continue
            pool = self.cluster.factory.pool_at(home, {home: allocators})
            for lane in [lane for i in self.cluster.instances for lane in i.lanes if home in lane.ranks]:
                if lane not in self.instance.lanes:
                    lane.cache.evict(max(count - pool.num_free_pages, 0))
            enough &= count <= pool.num_free_pages
        return enough

    def _check_room(self, needed: dict[Home, int], allocators: Mapping[Home, SequenceOf[BuddyAllocator]]) -> None:
        for home, count in needed.items():
            free = min(self.cluster.factory.pool_at(home, allocators).free_by_rank())
            if count > free:
                raise OutOfPagesError(
                    f"device {home.start} has {free} free pages, and requests and cached prefixes need {count} there"
                )

    def _open(self, home: Home, opened: list[Home]) -> tuple[Site, SequenceOf[BuddyAllocator]]:
        """Return the site and the allocators of a new home. If the device is empty, first allocate its buffers.

        Append the home to `opened` if its device was empty.
        """
        cluster = self.cluster
        site, allocators = site_at(cluster, home), allocators_at(cluster, home)
        if site is not None and allocators is not None:
            return site, allocators
        if not in_use(cluster, home):
            opened.append(home)
            cluster.open_device(home.start)
        extents = self.plan.extents[home]
        return cluster.factory.empty_site(home, extents), [cluster.factory.open_allocator(home.start, extents)]

    def _install(
        self,
        parts: list[LanePages],
        sources: list[Lane],
        sites: dict[Home, Site],
        allocators: Mapping[Home, SequenceOf[BuddyAllocator]],
    ) -> None:
        cluster, instance, plan = self.cluster, self.instance, self.plan
        allocated: list[tuple[PagePool, np.ndarray, np.ndarray]] = []
        try:
            places = self._places(parts, sources, allocators, allocated)
        except BaseException:
            for pool, table, references in allocated:
                _free(pool, table, references)
            raise
        most = max(1, instance.max_running // len(parts))
        found = [
            lane_at(part, of, enabled=cluster.config.prefix_caching, max_running=most)
            for part, of in zip(parts, places, strict=True)
        ]
        lanes, owned = [lane for lane, _ in found], [pages for _, pages in found]
        if (joining := plan.joining) is not None:
            views = [(instance, lanes[-1], sequence, pages) for sequence, pages in owned.pop()]
            try:
                hand_over([joining], views, self.requeue)
            except BaseException:
                for pool, table, references in allocated:
                    _free(pool, table, references)
                raise
        for source in dict.fromkeys(sources):
            own = [part for part, of in zip(parts, sources, strict=True) if of is source]
            settle_references(source.pages, source.cache.pages(), own)
        for part, source, shared in zip(parts, sources, _shared(parts, sources), strict=True):
            _free(source.pages, part.table[:, shared], part.references[shared])
        for lane, pages in zip(lanes, owned, strict=False):
            for sequence, own in pages:
                sequence.pages = own
                lane.running.append(sequence)
        instance.lanes, instance.allocators = lanes, allocators
        instance.lane_buckets = cluster.buckets(max(1, instance.width // len(lanes)))
        instance.runner.sites = sites
        instance.runner.place(plan.before)
        if joining is not None:
            cluster.replace([joining], [])
        instance.transition = self
        instance.enter(Phase.CHANGING)
        cluster.link_lanes()

    def _places(
        self,
        parts: list[LanePages],
        sources: list[Lane],
        allocators: Mapping[Home, SequenceOf[BuddyAllocator]],
        allocated: list[tuple[PagePool, np.ndarray, np.ndarray]],
    ) -> list[dict[Home, tuple[PagePool, np.ndarray]]]:
        """Allocate the pages that each microbatch lacks at its homes. Return pools and page ids, by home.

        A page that an earlier microbatch also uses is copied. New pages are appended to `allocated`, with the number of
        references to each.
        """

        def new_pages(pool: PagePool, references: np.ndarray) -> np.ndarray:
            table = _allocated(pool, references)
            allocated.append((pool, table, references))
            return table

        found: list[dict[Home, tuple[PagePool, np.ndarray]]] = []
        for number, (part, source, shared) in enumerate(zip(parts, sources, _shared(parts, sources), strict=True)):
            places: dict[Home, tuple[PagePool, np.ndarray]] = {}
            for home in self._homes(number):
                pool = self.cluster.factory.pool_at(home, allocators)
                if home not in source.ranks:
                    places[home] = pool, new_pages(pool, part.references)
                    continue
                table = part.table[source.ranks[home]].copy()
                if shared.any():
                    old, table[:, shared] = table[:, shared], new_pages(pool, part.references[shared])
                    for layer in self.plan.before.layers_by_home(number).get(home, ()):
                        self._move(layer, home, home, old, table[:, shared])
                places[home] = pool, table
            found.append(places)
        return found

    # Switches

    def switch_layers(self) -> None:
        """Switch the next chunk of layers if its weights have arrived. If no sequence runs, switch all chunks."""
        with TraceAnnotation("amoeba.switch", instance=self.instance.id):
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

    def _request(self, chunk: range) -> None:
        """Start to copy the weights that the new homes of a chunk lack."""
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
        """Return the ids of all live pages of some microbatches, at the home `source` and at the home `target`."""
        tables = [(lane, lane.live_pages()) for lane in (self.instance.lanes[number] for number in numbers)]
        old = np.concatenate([table[lane.ranks[source]] for lane, table in tables], axis=1)
        return old, np.concatenate([table[lane.ranks[target]] for lane, table in tables], axis=1)

    def _move(self, layer: int, source: Home, target: Home, old: np.ndarray, new: np.ndarray) -> None:
        """Copy pages of a layer to another device, or to other pages of the same home.

        `old` and `new` are the page ids `[tp, pages]` at `source` and `target`.
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
        """Free KV cache and weights of modules on their devices. Modules that another instance needs there are kept."""
        cluster = self.cluster
        for module in modules:
            if is_used(cluster, module, self.instance):
                continue
            device, layer, kind = module
            if kind == "attention" and layer is not None:
                cluster.drop_layer(self.instance.runner.sites[Home(device, 1)], layer)
            if weights:
                cluster.weights.drop_modules(device, layer, kind)

    # End

    def stop(self) -> None:
        """Stop the relocation at the present placement.

        Free the weights of layers that have not switched at their new homes.
        """
        for layer in [layer for chunk in self._left for layer in chunk]:
            self._drop(self._gained(layer))
        self._left, self._after = [], self.instance.runner.placement
        self.arrays, self._waiting = [], []  # a kept error would keep the buffers

    @property
    def is_complete(self) -> bool:
        return self._after is self.plan.after

    def settle(self) -> None:
        """End the relocation: merge microbatches that have the same homes, and free unneeded homes.

        If layers have migrated away, the layers that stay get extra extents. In a `scale_out`, the last microbatch
        becomes an instance.
        """
        cluster, instance, runner = self.cluster, self.instance, self.instance.runner
        old = instance.lanes
        pools = {home: cluster.factory.pool_at(home, instance.allocators) for home in instance.allocators}
        if self.is_complete and self.plan.options.kind == "scale_out":
            old = self._hand_over_last(pools)
            placement, numbers = Placement.uniform(runner.placement.head, runner.placement.num_layers), (0,)
        else:
            placement, numbers = runner.placement.joined()
        lanes = cluster.factory.new_lanes(placement, instance.allocators, instance.width)
        for number, target in enumerate(lanes):
            regroup(target, [lane for lane, new in zip(old, numbers, strict=True) if new == number], pools)
        instance.lanes = lanes
        instance.lane_buckets = cluster.buckets(max(1, instance.width // len(lanes)))
        runner.place(placement)
        self.leave_homes()
        for home in runner.sites.keys() & self.plan.extents.keys() if self.is_complete else ():
            extra = self.plan.extents[home][len(runner.sites[home].extent_pages) :]
            if extra:
                grow(cluster, runner.sites[home], instance.allocators[home][0], extra)
        instance.transition = None
        instance.limit_batch(instance.batch_limit)
        instance.enter(Phase.SERVING)
        cluster.link_lanes()

    def leave_homes(self) -> None:
        """Free the homes that the present placement does not use. Close devices that no instance uses."""
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

    def _hand_over_last(self, pools: dict[Home, PagePool]) -> list[Lane]:
        """Turn the last microbatch into a separate instance. Return the lanes of the other microbatches."""
        cluster, instance, device = self.cluster, self.instance, self.plan.options.device
        *others, last = instance.lanes
        home, weights = Home(device, 1), cluster.weights
        copies = weights.copy_modules(device, None)
        self.copied_bytes += sum(copy.nbytes for copy in copies)
        self.arrays += copies
        cluster.open_device(device, samples=True)
        new = cluster.factory.instance_on(home, instance.runner.sites[home], instance.allocators[home])
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
                self.requeue(new, sequence)
        instance.free_slots(slots)
        cluster.swap([], [new])
        return others

    def report(self) -> PlacementReport:
        """Return the report of the ended relocation."""
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


def _shared(parts: list[LanePages], sources: list[Lane]) -> list[np.ndarray]:
    """Return a mask of the pages of each part: True for pages that an earlier part of the same lane has too.

    These pages must be copied, because new lanes must not share pages. A prefix cache notices only releases by
    sequences of its own lane.
    """
    found: list[np.ndarray] = []
    for number, (part, source) in enumerate(zip(parts, sources, strict=True)):
        earlier = [other.table[0] for other, of in zip(parts[:number], sources, strict=False) if of is source]
        known = np.concatenate(earlier) if earlier else np.empty(0, np.int32)
        found.append(np.isin(part.table[0], known))
    return found


def _allocated(pool: PagePool, references: np.ndarray) -> np.ndarray:
    """Allocate pages with the given numbers of references. Return their ids `[tp, pages]`."""
    table = pool.allocate(len(references))
    for extra in range(1, int(references.max(initial=1))):
        pool.share(table[:, references > extra])
    return table


def _free(pool: PagePool, table: np.ndarray, references: np.ndarray) -> None:
    """Drop the given number of references to each page."""
    for extra in range(int(references.max(initial=0))):
        pool.free(table[:, references > extra])


def _has_arrived(array: Any) -> bool:
    """Return whether an array is computed, without waiting."""
    return array.is_ready()
