"""How transitions begin: with all that they need, and a place for each page in the layout to come."""

import time
from collections.abc import Callable
from typing import Any

from amoeba_jax.errors import MemoryBudgetError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.factory import Scratch
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.sampling.rows import SamplerKind
from amoeba_jax.transform.call import GroupTransition, TransformCall
from amoeba_jax.transform.ending import hand_over
from amoeba_jax.transform.lanes import LanePages, deal, joined_lane, settle_references
from amoeba_jax.transform.movers import InPlaceMover
from amoeba_jax.transform.needs import GroupChange, samplers, transition_programs
from amoeba_jax.transform.pausing import KeptPages, drop_prefixes
from amoeba_jax.transform.staging import reserve_staging
from amoeba_jax.transform.transition import Transition
from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool
from kvcache.relayout import place_down, place_up
from sharding.placement import Placement


class Beginning:
    """Begins transitions of instances that have nothing pending. Used by the dispatcher thread only.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
    """

    def __init__(self, cluster: Cluster, requeue: Callable[[Instance, Sequence], None]):
        self._cluster, self._requeue = cluster, requeue

    def merge(self, call: TransformCall, old: list[Instance]) -> GroupTransition:
        """Begin to have one instance in the place of several, over their devices."""
        cluster, geometry = self._cluster, self._cluster.dims.pages
        change = GroupChange.of(cluster, call.options, old)
        group, (before, after) = change.group, change.released
        rows = max(len(instance.running) for instance in old)
        parts = [LanePages.of(i.running, i.lane.cache.pages(), i.tp) for i in old]
        programs, mover, extra = self._prepare(call, change, rows, samplers(old), parts)
        if programs.changes_weights:
            cluster.weights.prepare_release(group, before, after)
        allocators = [cluster.factory.new_allocator(after) for _ in group.devices]
        tables = place_up([p.table for p in parts], [p.references for p in parts], geometry, allocators)
        for instance in old:
            if instance.released < before:
                cluster.release_more(instance, before)
        members = [instance.site for instance in old]
        scratch = Scratch.joined([cluster.factory.scratch_of(instance) for instance in old])
        new = cluster.factory.new_instance(group, allocators, [[] for _ in members[0].kv], after, scratch)
        high, pool = new.site, new.lane.pages
        homes = tuple(site.group.home for site in members)
        high_group = (group.home,) * len(homes)
        new.lanes, views, limit = [], [], self._lane_limit(parts, change.lower)
        for instance, part, table in zip(old, parts, tables, strict=True):
            low = homes, instance.lane.pages, part.table
            lane, pages = self._joined_lane(part, low, (high_group, pool, table), limit)
            new.lanes.append(lane)
            views += [(new, lane, sequence, own) for sequence, own in pages]
        new.runner.sites.update(zip(homes, members, strict=True))
        new.runner.place(Placement(group.home, (homes,) * programs.num_layers, (homes,) * programs.num_layers))
        paces = [step_s for instance in old if (step_s := instance.pace.step_s) is not None]
        step_s = max(paces, default=None)
        transition = Transition(
            new, high, members, programs, mover, cluster.weights,
            call.options.layers_per_step, overlapped=call.overlapped,
        )  # fmt: skip
        new.lane_buckets = cluster.buckets(change.lower)
        hand_over(old, views, self._requeue)
        cluster.replace(old, [new])
        cached = sum(len(part.cached) for part in parts)
        return GroupTransition(call, transition, allocators, old, extra, step_s, None, cached, cached)

    def split(self, call: TransformCall, instance: Instance) -> GroupTransition:
        """Begin to have several instances in the place of one."""
        cluster, geometry = self._cluster, self._cluster.dims.pages
        change = GroupChange.of(cluster, call.options, [instance])
        group, tp, after = instance.group, change.target, change.released[1]
        check_growth(cluster, instance, tp, after)
        old_lane = instance.lane
        limits = [cluster.buckets(tp).max_num_seqs] * (group.tp // tp)
        limits = [most - busy for most, busy in zip(limits, self._busy(instance, len(limits)), strict=True)]
        while True:
            allocators = [cluster.factory.new_allocator(after) for _ in group.devices]
            kept = KeptPages(instance, allocators)
            room = [a.num_free(geometry.order(tp)) for a in allocators[::tp]]
            try:
                parts = deal(old_lane, room, limits)
                break
            except OutOfPagesError as error:
                if not instance.paused:
                    raise
                if drop_prefixes(instance.paused):
                    continue
                message = f"{error}, beside those that are paused: running='wait' has them end first"
                raise RequestError(message) from error
        rows = max(len(part.sequences) for part in parts)
        programs, mover, extra = self._prepare(call, change, rows, samplers([instance]), parts)
        tables = place_down([p.table for p in parts], [p.references for p in parts], geometry, allocators)
        settle_references(old_lane.pages, old_lane.cache.pages(), parts)
        num_layers, members, lanes = programs.num_layers, [], []
        if not any(part.num_pages for part in parts):
            limits = [0] * len(parts)  # all layers switch at once, with nothing to move
        low_group = tuple(member.home for member in programs.members)
        for index, (part, table) in enumerate(zip(parts, tables, strict=True)):
            member = programs.members[index]
            members.append(cluster.factory.new_site(member, [[] for _ in range(num_layers)], after))
            pool = PagePool(geometry, allocators[index * tp : (index + 1) * tp], tp)
            high = (group.home,) * len(parts), old_lane.pages, part.table
            lane, pages = self._joined_lane(part, (low_group, pool, table), high, limits[index])
            for sequence, own in pages:
                sequence.pages = own
                lane.running.append(sequence)
            lanes.append(lane)
        instance.lanes, instance.lane_buckets = lanes, cluster.buckets(tp)
        instance.runner.sites.update((site.group.home, site) for site in members)
        instance.runner.place(Placement.uniform(group.home, num_layers, len(lanes)))
        transition = Transition(
            instance, instance.site, members, programs, mover, cluster.weights,
            call.options.layers_per_step, overlapped=call.overlapped,
        )  # fmt: skip
        cached = old_lane.cache.num_cached_pages, len({page.key for part in parts for page in part.cached})
        return GroupTransition(call, transition, allocators, [instance], extra, instance.pace.step_s, kept, *cached)

    @staticmethod
    def _busy(instance: Instance, count: int) -> list[int]:
        """Count the slots that paused requests have on each of the instances to come."""
        return [len(member.running) for member in instance.paused] or [0] * count

    def _joined_lane(self, part: LanePages, low: Any, high: Any, max_running: int):
        enabled = self._cluster.config.prefix_caching
        return joined_lane(part, low, high, enabled=enabled, max_running=max_running)

    def _lane_limit(self, parts: list[LanePages], tp: int) -> int:
        """Sequences that a lane may run: none where there are no pages, as then all layers switch at once, with nothing
        to move."""
        return self._cluster.buckets(tp).max_num_seqs if any(part.num_pages for part in parts) else 0

    def _prepare(
        self,
        call: TransformCall,
        change: GroupChange,
        rows: int,
        kinds: set[SamplerKind],
        pages: list[LanePages],
    ) -> tuple[TransitionPrograms, InPlaceMover, int]:
        """Compile what the transition needs, before anything changes. Also returns the bytes that it takes besides.

        Raises `RequestError` where these are over the budget, and `NotCompiledError` for a program that is missing.
        """
        cluster = self._cluster
        start = time.perf_counter()
        cluster.check_compiled(change.group, change.target, change.released[1])
        num_layers = cluster.dims.config.num_layers
        programs = transition_programs(cluster, change, rows, kinds)
        max_pieces = 0
        if rows:
            programs.prepare_steps(prompts=any(s.num_uncomputed_tokens > 1 for part in pages for s in part.sequences))
        if any(part.num_pages for part in pages):
            per_step = call.options.layers_per_step
            steps = num_layers if per_step == "auto" else -(-num_layers // per_step)
            new_pages = cluster.buckets(change.lower).max_num_seqs * (1 + steps // cluster.dims.page_size)
            max_pieces = max(part.num_pages for part in pages) + new_pages
        devices = change.group.device_indices
        mover = InPlaceMover(programs, cluster.weights)
        extra = mover.prepare(max_pieces)
        try:
            reserve_staging(cluster, devices, extra)
        except MemoryBudgetError as error:
            raise RequestError(f"{error}, or kv_cache_tokens") from error
        call.prepare_s += time.perf_counter() - start
        return programs, mover, extra


def check_growth(cluster: Cluster, instance: Instance, tp: int, released: int) -> None:
    """Raise `RequestError` if an instance of degree `tp` could not hold what a request may grow to.

    `released` is the degree for which its weights are released.
    """
    limit = cluster.capacity_tokens(tp, released)
    for sequence in instance.running:
        if sequence.max_total_tokens > limit:
            raise RequestError(
                f"request {sequence.request_id!r} may grow to {sequence.max_total_tokens} tokens, and a TP{tp} "
                f"instance holds {limit}"
            )
