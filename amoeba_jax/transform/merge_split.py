"""Begin of a merge or split: compile programs, reserve memory, and allocate each page in the new layout."""

import time
from collections.abc import Callable
from typing import NamedTuple

from amoeba_jax.errors import MemoryBudgetError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.lanes import LanePages, deal, lane_at, settle_references
from amoeba_jax.transform.movers import InPlaceMover
from amoeba_jax.transform.needs import GroupChange, reserve_staging, sampler_kinds, transition_programs
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.pausing import KeptPages, drop_prefixes
from amoeba_jax.transform.transition import Prepared, Transition
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.pages import PagePool, SequencePages
from kvcache.relayout import place_down, place_up
from sharding.placement import Placement

Requeue = Callable[[Instance, Sequence], None]
"""Function that takes a sequence off its instance and queues it. The sequence is computed again from its tokens."""


def merge(cluster: Cluster, options: TransformOptions, old: list[Instance], requeue: Requeue) -> Transition:
    """Replace instances by one instance over their devices, and return the transition that will switch its layers.

    The old instances must have no steps in flight. Raises `RequestError`, `OutOfPagesError` or the error of a program,
    and changes nothing, if the merge is impossible.
    """
    geometry, change = cluster.dims.pages, GroupChange.of(cluster, options, old)
    group, (before, after) = change.group, change.released
    parts = [LanePages.of(i.running, i.lane.cache.pages(), i.tp) for i in old]
    most = max(len(instance.running) for instance in old)
    prepared = prepare(cluster, options, change, most, old, parts)
    programs = prepared.programs
    if programs.changes_weights:
        cluster.weights.prepare_release(group, before, after)
    allocators = [cluster.factory.new_allocator(after) for _ in group.devices]
    tables = place_up([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    for instance in old:
        if instance.released < before:
            cluster.release_more(instance, before)
    members = [instance.site for instance in old]
    tokens = [buffer for instance in old for buffer in cluster.factory.last_tokens_of(instance)]
    new = cluster.factory.new_instance(group, allocators, [[] for _ in members[0].kv], after, tokens)
    pool, homes = new.lane.pages, tuple(site.group.home for site in members)
    # Without pages, all layers switch at once, and no sequence may start before that.
    limit = cluster.buckets(change.lower).max_num_seqs if any(part.num_pages for part in parts) else 0
    lanes: list[Lane] = []
    views: list[tuple[Instance, Lane, Sequence, SequencePages]] = []
    for home, instance, part, table in zip(homes, old, parts, tables, strict=True):
        places = {home: (instance.lane.pages, part.table), group.home: (pool, table)}
        lane, pages = lane_at(part, places, enabled=cluster.config.prefix_caching, max_running=limit)
        lanes.append(lane)
        views += [(new, lane, sequence, own) for sequence, own in pages]
    new.lanes, new.lane_buckets = lanes, cluster.buckets(change.lower)
    new.runner.sites.update(zip(homes, members, strict=True))
    new.runner.place(Placement(group.home, (homes,) * programs.num_layers, (homes,) * programs.num_layers))
    cached = sum(len(part.cached) for part in parts)
    paces = [step_s for instance in old if (step_s := instance.pace.step_s) is not None]
    transition = Transition(
        new, new.site, members, prepared, cluster.weights, options, allocators, old,
        step_s=max(paces, default=None), cached=(cached, cached),
    )  # fmt: skip
    hand_over(old, views, requeue)
    cluster.replace(old, [new])
    return transition


def split(cluster: Cluster, options: TransformOptions, instance: Instance) -> Transition:
    """Prepare the split of an instance, and return the transition that will switch its layers.

    The instance must have no steps in flight. It serves until all of its layers have switched. Raises `RequestError`,
    `OutOfPagesError` or the error of a program, and changes nothing, if the split is impossible.
    """
    geometry, change = cluster.dims.pages, GroupChange.of(cluster, options, [instance])
    group, tp, after, lane = instance.group, change.target, change.released[1], instance.lane
    check_growth(cluster, instance, tp, after)
    kept, allocators, limits, parts = _deal_pages(cluster, instance, tp, after)
    most = max(len(part.sequences) for part in parts)
    prepared = prepare(cluster, options, change, most, [instance], parts)
    programs = prepared.programs
    tables = place_down([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    settle_references(lane.pages, lane.cache.pages(), parts)
    if not any(part.num_pages for part in parts):
        limits = [0] * len(parts)  # all layers switch at once, and no sequence may start before that
    homes, num_layers = tuple(member.home for member in programs.members), programs.num_layers
    members = [cluster.factory.new_site(member, [[] for _ in range(num_layers)], after) for member in programs.members]
    lanes: list[Lane] = []
    for index, (part, table, limit) in enumerate(zip(parts, tables, limits, strict=True)):
        pool = PagePool(geometry, allocators[index * tp : (index + 1) * tp], tp)
        places = {homes[index]: (pool, table), group.home: (lane.pages, part.table)}
        new, pages = lane_at(part, places, enabled=cluster.config.prefix_caching, max_running=limit)
        for sequence, own in pages:
            sequence.pages = own
            new.running.append(sequence)
        lanes.append(new)
    cached = lane.cache.num_cached_pages, len({page.key for part in parts for page in part.cached})
    instance.lanes, instance.lane_buckets = lanes, cluster.buckets(tp)
    instance.runner.sites.update((site.group.home, site) for site in members)
    instance.runner.place(Placement.uniform(group.home, num_layers, len(lanes)))
    return Transition(
        instance, instance.site, members, prepared, cluster.weights, options, allocators, [instance],
        step_s=instance.pace.step_s, cached=cached, kept=kept,
    )  # fmt: skip


class _Dealt(NamedTuple):
    """Sequences and cached pages of an instance, divided among the new instances.

    Attributes:
        kept: pages of paused requests.
        allocators: new allocators, one for each device.
        limits: maximum number of sequences of each new instance.
        parts: sequences and cached pages of each new instance.
    """

    kept: KeptPages
    allocators: list[BuddyAllocator]
    limits: list[int]
    parts: list[LanePages]


def _deal_pages(cluster: Cluster, instance: Instance, tp: int, released: int) -> _Dealt:
    """Divide the sequences and cached pages of an instance among the new instances of degree `tp`.

    If the pages of paused requests leave too few free pages, prefixes that only the paused instances cache are dropped.
    Raises `OutOfPagesError` or `RequestError` if the pages still do not fit.
    """
    count, geometry = instance.tp // tp, cluster.dims.pages
    busy = [len(member.running) for member in instance.paused] or [0] * count
    limits = [cluster.buckets(tp).max_num_seqs - slots for slots in busy]
    while True:
        allocators = [cluster.factory.new_allocator(released) for _ in instance.group.devices]
        kept = KeptPages(instance, allocators)
        room = [allocator.num_free(geometry.order(tp)) for allocator in allocators[::tp]]
        try:
            return _Dealt(kept, allocators, limits, deal(instance.lane, room, limits))
        except OutOfPagesError as error:
            if not instance.paused:
                raise
            if not drop_prefixes(instance.paused):
                message = f"{error}, beside those that are paused: running='wait' has them end first"
                raise RequestError(message) from error


def prepare(
    cluster: Cluster,
    options: TransformOptions,
    change: GroupChange,
    most: int,
    old: list[Instance],
    parts: list[LanePages],
) -> Prepared:
    """Compile the programs of a transition, and reserve memory for its temporaries.

    Raises `RequestError` if the memory exceeds the budget, and `NotCompiledError` if a program is missing.

    Args:
        most: maximum number of sequences of an instance of the lower degree.
        parts: sequences and cached pages of the instances of the lower degree.
    """
    start = time.perf_counter()
    if not change.attention_only:
        cluster.check_compiled(change.group, change.target, change.released[1])
    programs = transition_programs(cluster, change, most, sampler_kinds(old))
    if most:
        programs.prepare_steps(prompts=any(s.num_uncomputed_tokens > 1 for part in parts for s in part.sequences))
    max_pieces = 0
    if any(part.num_pages for part in parts):
        num_layers = cluster.dims.config.num_layers
        steps = num_layers if options.layers_per_step == "auto" else -(-num_layers // options.layers_per_step)
        new_pages = cluster.buckets(change.lower).max_num_seqs * (1 + steps // cluster.dims.page_size)
        max_pieces = max(part.num_pages for part in parts) + new_pages
    mover = InPlaceMover(programs, cluster.weights)
    staging_bytes = mover.prepare(max_pieces)
    try:
        reserve_staging(cluster, change.group.device_indices, staging_bytes)
    except MemoryBudgetError as error:
        raise RequestError(f"{error}, or kv_cache_tokens") from error
    return Prepared(programs, mover, staging_bytes, time.perf_counter() - start)


def check_growth(cluster: Cluster, instance: Instance, tp: int, released: int) -> None:
    """Raise `RequestError` if a running request may outgrow an instance of degree `tp`.

    Args:
        released: degree for which the weights of the smaller instance will be released.
    """
    limit = cluster.capacity_tokens(tp, released)
    for sequence in instance.running:
        if sequence.max_total_tokens > limit:
            raise RequestError(
                f"request {sequence.request_id!r} may grow to {sequence.max_total_tokens} tokens, and a TP{tp} "
                f"instance holds {limit}"
            )


def hand_over(
    old: list[Instance], views: list[tuple[Instance, Lane, Sequence, SequencePages]], requeue: Requeue
) -> None:
    """Move the sequences of old instances to new instances, lanes and pages. `views` lists the new owners.

    If that fails, the old instances keep their sequences. A sequence whose sampling state on the device was overwritten
    is then computed again.
    """
    before = [(sequence, sequence.pages, sequence.slot) for _, _, sequence, _ in views]
    try:
        for instance, lane, sequence, pages in views:
            sequence.pages = pages
            instance.add(sequence, lane)
    except BaseException:
        for instance, lane, sequence, _ in views:
            if sequence in lane.running:
                instance.leave(sequence, lane)
        for sequence, pages, slot in before:
            sequence.pages, sequence.slot = pages, slot
        for instance in old:
            for sequence in [s for s in instance.running if s.sampling.uses_state]:
                requeue(instance, sequence)
        raise
    for instance in old:
        for lane in instance.lanes:
            lane.running = []
