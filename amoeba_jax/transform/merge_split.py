"""Begin merges and splits of instances, and changes between normal and data-parallel attention.

`begin` compiles missing programs, reserves temporary memory, and gives every page further ids, for the new layout. The
result of `begin` is a transition, which switches the layers later.

A `divide` changes an instance to data-parallel attention, and a `join` changes the instance back. A `divide` or `join`
moves pages, and leaves the FFN weights where they are.

    4 x TP1  -- merge -->  TP4  -- divide -->  attention at 4 x TP1, FFNs at TP4
    4 x TP1  <-- split --  TP4  <-- join ----  attention at 4 x TP1, FFNs at TP4
"""

from typing import NamedTuple

from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.lanes import LanePages, Requeue, deal, lane_at, move_sequences, settle_references
from amoeba_jax.transform.pausing import KeptPages, drop_prefixes
from amoeba_jax.transform.relayout import Relayout
from amoeba_jax.transform.relayout_plan import RelayoutPlan, prepare, reserve_staging
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.pages import PagePool, SequencePages
from kvcache.relayout import place_down, place_up
from sharding.mesh import disassemble
from sharding.placement import Placement


def begin(cluster: Cluster, plan: RelayoutPlan, requeue: Requeue) -> Relayout:
    """Begin a merge or split, or a change to or from data-parallel attention (`divide` or `join`).

    Return the transition, which switches the layers later. The instances of the plan must have no steps in flight. In a
    merge, a new instance replaces the old instances immediately, and serves during the transition. In a split, `divide`
    or `join`, the old instance serves during the transition.

    Raises `RequestError`, `OutOfPagesError` or the error of a program that does not compile. If an error is raised, the
    old instances serve as before, but a merge may have requeued some of their sequences (`move_sequences`).
    """
    try:
        return _up(cluster, plan, requeue) if plan.up else _down(cluster, plan)
    except BaseException:
        reserve_staging(cluster, plan.group.device_indices, 0)
        raise


def _up(cluster: Cluster, plan: RelayoutPlan, requeue: Requeue) -> Relayout:
    """Begin a merge, or a `join` (the end of data-parallel attention)."""
    factory, group, old, (before, after) = cluster.factory, plan.group, plan.old, plan.released
    old_lanes = [lane for instance in old for lane in instance.lanes]
    parts = [LanePages.of(lane.running, lane.cache.pages(), plan.lower) for lane in old_lanes]
    prepared = prepare(cluster, plan, parts)
    if before != after:
        cluster.weights.prepare_release(group, before, after)
    allocators = [factory.new_allocator(after) for _ in group.devices]
    tables = place_up([p.table for p in parts], [p.references for p in parts], cluster.dims.pages, allocators)
    pool, num_layers = PagePool(cluster.dims.pages, allocators, group.tp), cluster.dims.config.num_layers
    if plan.kind == "join":
        (new,) = old
        members = [new.runner.sites[home] for home in new.runner.placement.attention[0]]
    else:
        for instance in old:
            if instance.released < before:
                cluster.release_more(instance, before)
        members = [instance.site for instance in old]
        tokens = [token for i in old for token in disassemble(i.group, i.runner.last_tokens)]
        new = factory.new_instance(group, allocators, [[] for _ in range(num_layers)], after, tokens)
    homes = tuple(site.group.home for site in members)
    # If no page is in use, all layers switch at once, and no sequence may start before this switch.
    limit = cluster.plan.buckets(plan.lower).max_num_seqs if any(part.num_pages for part in parts) else 0
    lanes: list[Lane] = []
    views: list[tuple[Instance, Lane, Sequence, SequencePages]] = []
    for home, old_lane, part, table in zip(homes, old_lanes, parts, tables, strict=True):
        places = {home: (old_lane.pages, part.table), group.home: (pool, table)}
        lane, pages = lane_at(factory, part, places, limit)
        lanes.append(lane)
        views += [(new, lane, *own) for own in pages]
    new.lanes, cached = lanes, sum(len(part.cached) for part in parts)
    transition = Relayout(cluster, plan, new, members, prepared, allocators, cached=(cached, cached))
    if plan.kind == "join":  # the sequences keep their slots
        for _, lane, sequence, pages in views:
            sequence.pages = pages
            lane.running.append(sequence)
        return transition
    new.runner.sites.update(zip(homes, members, strict=True))
    new.runner.place(Placement(group.home, (homes,) * num_layers, (homes,) * num_layers))
    move_sequences(old, views, requeue)
    cluster.replace(old, [new])
    return transition


def _down(cluster: Cluster, plan: RelayoutPlan) -> Relayout:
    """Begin a split, or a `divide` (the start of data-parallel attention)."""
    geometry, group, tp, after, (instance,) = cluster.dims.pages, plan.group, plan.lower, plan.released[1], plan.old
    lane = instance.lane
    _check_growth(cluster, instance, tp, after)
    kept, allocators, limits, parts = _deal_pages(cluster, instance, tp, after)
    prepared = prepare(cluster, plan, parts)
    groups, num_layers = prepared.programs.members, cluster.dims.config.num_layers
    tables = place_down([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    settle_references(lane.pages, lane.cache.pages(), parts)
    if not any(part.num_pages for part in parts):
        limits = [0] * len(parts)  # all layers switch at once, and no sequence may start before this switch
    extents = cluster.plan.extent_pages(after)
    members = [cluster.factory.site(member, [[] for _ in range(num_layers)], extents) for member in groups]
    lanes: list[Lane] = []
    for index, (member, part, table, limit) in enumerate(zip(groups, parts, tables, limits, strict=True)):
        pool = PagePool(geometry, allocators[index * tp : (index + 1) * tp], tp)
        places = {member.home: (pool, table), group.home: (lane.pages, part.table)}
        new, pages = lane_at(cluster.factory, part, places, limit)
        for sequence, own in pages:
            sequence.pages = own
            new.running.append(sequence)
        lanes.append(new)
    cached = lane.cache.num_cached_pages, len({page.key for part in parts for page in part.cached})
    instance.lanes = lanes
    instance.runner.sites.update((site.group.home, site) for site in members)
    instance.runner.place(Placement.uniform(group.home, num_layers, len(lanes)))
    return Relayout(cluster, plan, instance, members, prepared, allocators, cached=cached, kept=kept)


class _Dealt(NamedTuple):
    """Result of `_deal_pages`: the sequences and pages of each new instance.

    Attributes:
        kept: pages of paused requests. `allocators` count these pages as allocated, so no other sequence gets them.
        allocators: list of page allocators for the new layout, one for each device.
        limits: list with the maximum number of sequences that each new instance may get.
        parts: list with one `LanePages` for each new instance: the sequences and cached pages that the instance gets.
    """

    kept: KeptPages
    allocators: list[BuddyAllocator]
    limits: list[int]
    parts: list[LanePages]


def _deal_pages(cluster: Cluster, instance: Instance, tp: int, released: int) -> _Dealt:
    """Divide the sequences and cached pages of an instance among the new instances of degree `tp`.

    In a `divide`, the parts of the group that will compute attention separately count as the new instances.

    Without paused instances, `OutOfPagesError` is raised if the pages of the sequences do not fit. With paused
    instances, the pages of the paused instances also need memory in the new layout. If too little memory is left for
    the sequences, the prefix caches of the paused instances are emptied. If the pages of the sequences still do not
    fit, `RequestError` is raised.

    Args:
        released: degree whose weights the new instances keep. The memory of all other weights is KV cache.
    """
    count, geometry = instance.tp // tp, cluster.dims.pages
    busy = [len(member.running) for member in instance.paused] or [0] * count
    limits = [cluster.plan.buckets(tp).max_num_seqs - slots for slots in busy]
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


def _check_growth(cluster: Cluster, instance: Instance, tp: int, released: int) -> None:
    """Raise `RequestError` if a running request may become too long for the new instances of degree `tp`.

    `released` is the degree whose weights the new instances keep. The memory of all other weights is KV cache.
    """
    limit = cluster.plan.capacity_tokens(tp, released)
    for sequence in instance.running:
        if sequence.max_total_tokens > limit:
            raise RequestError(
                f"request {sequence.request_id!r} may grow to {sequence.max_total_tokens} tokens, and a TP{tp} "
                f"instance holds {limit}"
            )
