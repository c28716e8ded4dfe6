"""Begin merges and splits of instances, and changes of only their attention.

Each function compiles programs, reserves memory and allocates every page in the new layout. The result is a transition.
The transition switches the layers later.

If only the attention of an instance changes, its pages move, and FFN weights stay where they are. The change to
data-parallel attention is called `divide`. The function `split` also begins a `divide`. The change back is called
`join`.

    4 x TP1  <- merge, split ->  TP4  <- divide, join ->  attention at 4 x TP1, FFNs at TP4
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
from sharding.placement import Placement


def merge(cluster: Cluster, plan: RelayoutPlan, requeue: Requeue) -> Relayout:
    """Replace instances by one instance over all of their devices. Return the transition.

    The layers switch later, during the transition. The old instances must have no steps in flight. If the merge is
    impossible, nothing has changed, and this function raises `RequestError`, `OutOfPagesError` or the error of a
    program that does not compile.
    """
    with _staging(cluster, plan):
        return _merge(cluster, plan, requeue)


def join(cluster: Cluster, plan: RelayoutPlan) -> Relayout:
    """Begin to change data-parallel attention back to attention of the instance's own degree. Return the transition.

    The layers switch later, during the transition. The instance must have no steps in flight. If the change is
    impossible, nothing has changed, and this function raises `RequestError`, `OutOfPagesError` or the error of a
    program that does not compile.
    """
    with _staging(cluster, plan):
        return _join(cluster, plan)


def split(cluster: Cluster, plan: RelayoutPlan) -> Relayout:
    """Begin to split an instance, or only its attention. Return the transition.

    The layers switch later, during the transition. The instance serves until all of its layers have switched. The
    instance must have no steps in flight. If the split is impossible, nothing has changed, and this function raises
    `RequestError`, `OutOfPagesError` or the error of a program that does not compile.
    """
    with _staging(cluster, plan):
        return _split(cluster, plan)


@contextmanager
def _staging(cluster: Cluster, plan: RelayoutPlan) -> Iterator[None]:
    """Release the memory that is reserved for temporaries of the change, if the `with` block raises an error."""
    try:
        yield
    except BaseException:
        reserve_staging(cluster, plan.group.device_indices, 0)
        raise


def _merge(cluster: Cluster, plan: RelayoutPlan, requeue: Requeue) -> Relayout:
    geometry, group, old, (before, after) = cluster.dims.pages, plan.group, plan.old, plan.released
    parts = [LanePages.of(i.running, i.lane.cache.pages(), i.tp) for i in old]
    prepared = prepare(cluster, plan, parts)
    if before != after:
        cluster.weights.prepare_release(group, before, after)
    allocators = [cluster.factory.new_allocator(after) for _ in group.devices]
    tables = place_up([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    for instance in old:
        if instance.released < before:
            cluster.release_more(instance, before)
    members = [instance.site for instance in old]
    tokens = [buffer for instance in old for buffer in cluster.factory.last_tokens_of(instance)]
    num_layers = cluster.dims.config.num_layers
    new = cluster.factory.new_instance(group, allocators, [[] for _ in range(num_layers)], after, tokens)
    pool, homes = new.lane.pages, tuple(site.group.home for site in members)
    # Without pages, all layers switch at once, and no sequence may start before that.
    limit = cluster.plan.buckets(plan.lower).max_num_seqs if any(part.num_pages for part in parts) else 0
    lanes: list[Lane] = []
    views: list[tuple[Instance, Lane, Sequence, SequencePages]] = []
    for home, instance, part, table in zip(homes, old, parts, tables, strict=True):
        places = {home: (instance.lane.pages, part.table), group.home: (pool, table)}
        lane, pages = lane_at(part, places, enabled=cluster.config.prefix_caching, max_running=limit)
        lanes.append(lane)
        views += [(new, lane, *own) for own in pages]
    new.lanes = lanes
    new.runner.sites.update(zip(homes, members, strict=True))
    new.runner.place(Placement(group.home, (homes,) * num_layers, (homes,) * num_layers))
    cached = sum(len(part.cached) for part in parts)
    transition = Relayout(cluster, plan, new, members, prepared, allocators, cached=(cached, cached))
    move_sequences(old, views, requeue)
    cluster.replace(old, [new])
    return transition


def _join(cluster: Cluster, plan: RelayoutPlan) -> Relayout:
    geometry, group, (instance,) = cluster.dims.pages, plan.group, plan.old
    old, sites = instance.lanes, instance.runner.sites
    parts = [LanePages.of(lane.running, lane.cache.pages(), plan.lower) for lane in old]
    prepared = prepare(cluster, plan, parts)
    allocators = [cluster.factory.new_allocator(instance.released) for _ in group.devices]
    tables = place_up([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    pool, homes = PagePool(geometry, allocators, group.tp), instance.runner.placement.attention[0]
    # Without pages, all layers switch at once, and no sequence may start before that.
    limit = cluster.plan.buckets(plan.lower).max_num_seqs if any(part.num_pages for part in parts) else 0
    found: list[tuple[Lane, list[tuple[Sequence, SequencePages]]]] = []
    for home, lane, part, table in zip(homes, old, parts, tables, strict=True):
        places = {home: (lane.pages, part.table), group.home: (pool, table)}
        found.append(lane_at(part, places, enabled=cluster.config.prefix_caching, max_running=limit))
    for lane, pages in found:  # nothing fails from here on
        for sequence, own in pages:
            sequence.pages = own
            lane.running.append(sequence)
    instance.lanes = [lane for lane, _ in found]
    cached, members = sum(len(part.cached) for part in parts), [sites[home] for home in homes]
    return Relayout(cluster, plan, instance, members, prepared, allocators, cached=(cached, cached))


def _split(cluster: Cluster, plan: RelayoutPlan) -> Relayout:
    geometry, group, tp, after, (instance,) = cluster.dims.pages, plan.group, plan.lower, plan.released[1], plan.old
    lane = instance.lane
    _check_growth(cluster, instance, tp, after)
    kept, allocators, limits, parts = _deal_pages(cluster, instance, tp, after)
    prepared = prepare(cluster, plan, parts)
    groups, num_layers = prepared.programs.members, cluster.dims.config.num_layers
    tables = place_down([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    settle_references(lane.pages, lane.cache.pages(), parts)
    if not any(part.num_pages for part in parts):
        limits = [0] * len(parts)  # all layers switch at once, and no sequence may start before that
    extents = cluster.plan.extent_pages(after)
    members = [cluster.factory.site(member, [[] for _ in range(num_layers)], extents) for member in groups]
    lanes: list[Lane] = []
    for index, (member, part, table, limit) in enumerate(zip(groups, parts, tables, limits, strict=True)):
        pool = PagePool(geometry, allocators[index * tp : (index + 1) * tp], tp)
        places = {member.home: (pool, table), group.home: (lane.pages, part.table)}
        new, pages = lane_at(part, places, enabled=cluster.config.prefix_caching, max_running=limit)
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
    """Result of `_deal_pages`: the sequences and pages of each new instance of a split.

    Attributes:
        kept: pages of paused requests. `allocators` give these pages to no other sequence.
        allocators: page allocators of the new layout, one for each device.
        limits: maximum number of sequences of each new instance.
        parts: sequences and cached pages of each new instance.
    """

    kept: KeptPages
    allocators: list[BuddyAllocator]
    limits: list[int]
    parts: list[LanePages]


def _deal_pages(cluster: Cluster, instance: Instance, tp: int, released: int) -> _Dealt:
    """Divide the sequences and cached pages of an instance among the new instances of degree `tp`.

    Pages of paused requests also need room. If too few pages are free, the prefix caches of the paused instances are
    emptied. Raises `OutOfPagesError` or `RequestError` if the pages still do not fit.

    Args:
        released: released degree of the new instances. These instances keep all weights that the released degree needs.
            The memory of all other weights becomes KV cache.
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
    """Raise `RequestError` if a running request may become too long for an instance of degree `tp`.

    Args:
        released: released degree of that instance. The instance keeps all weights that the released degree needs. The
            memory of all other weights becomes KV cache.
    """
    limit = cluster.plan.capacity_tokens(tp, released)
    for sequence in instance.running:
        if sequence.max_total_tokens > limit:
            raise RequestError(
                f"request {sequence.request_id!r} may grow to {sequence.max_total_tokens} tokens, and a TP{tp} "
                f"instance holds {limit}"
            )
