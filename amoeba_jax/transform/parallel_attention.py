"""Data-parallel attention: parts of a group compute attention, each for its own sequences, and the group the FFNs.

A group changes between this placement and attention of its own degree like in a merge or split (`merge_split.py`), but
FFN weights stay where they are. Only pages move. Instances of a lower degree reach the placement through a merge, and
are reached from it through a split.

    4 x TP1  <- merge, split ->  TP4  <- this module ->  attention at 4 x TP1, FFNs at TP4
"""

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import Site
from amoeba_jax.transform.lanes import LanePages, lane_at, move_into
from amoeba_jax.transform.merge_split import prepare
from amoeba_jax.transform.needs import GroupChange
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.transition import Transition
from kvcache.pages import PagePool, SequencePages
from kvcache.relayout import place_up
from sharding.placement import Placement


def join_attention(cluster: Cluster, options: TransformOptions, instance: Instance) -> Transition:
    """Prepare the end of data-parallel attention, and return the transition that will switch the layers.

    The instance must have no steps in flight. Raises `RequestError`, `OutOfPagesError` or the error of a program, and
    changes nothing, if the change is impossible.
    """
    change, geometry = GroupChange.of(cluster, options, [instance]), cluster.dims.pages
    group, old = change.group, instance.lanes
    parts = [LanePages.of(lane.running, lane.cache.pages(), lane.pages.tp) for lane in old]
    prepared = prepare(cluster, options, change, max(len(lane.running) for lane in old), [instance], parts)
    allocators = [cluster.factory.new_allocator(instance.released) for _ in group.devices]
    tables = place_up([p.table for p in parts], [p.references for p in parts], geometry, allocators)
    pool, sites = PagePool(geometry, allocators, group.tp), instance.runner.sites
    members = [sites[home] for home in instance.runner.placement.attention[0]]
    # Without pages, all layers switch at once, and no sequence may start before that.
    limit = cluster.buckets(change.lower).max_num_seqs if any(part.num_pages for part in parts) else 0
    found: list[tuple[Lane, list[tuple[Sequence, SequencePages]]]] = []
    for site, lane, part, table in zip(members, old, parts, tables, strict=True):
        places = {site.group.home: (lane.pages, part.table), group.home: (pool, table)}
        found.append(lane_at(part, places, enabled=cluster.config.prefix_caching, max_running=limit))
    for lane, pages in found:  # nothing fails from here on
        for sequence, own in pages:
            sequence.pages = own
            lane.running.append(sequence)
    instance.lanes = [lane for lane, _ in found]
    cached = sum(len(part.cached) for part in parts)
    return Transition(
        instance, sites[group.home], members, prepared, cluster.weights, options, allocators, [instance],
        step_s=instance.pace.step_s, cached=(cached, cached),
    )  # fmt: skip


def divide_attention(cluster: Cluster, transition: Transition) -> None:
    """End a change to data-parallel attention: every lane keeps its pages in the new layout."""
    cluster.factory.settle_allocators(transition.instance.group, transition.allocators)
    serve_parallel(cluster, transition.instance, transition.members)


def serve_parallel(cluster: Cluster, instance: Instance, members: list[Site]) -> None:
    """Let an instance serve with data-parallel attention at `members`, which have the KV cache of all layers.

    The allocators of the devices must have the pages of this layout.
    """
    factory, group, degree = cluster.factory, instance.group, members[0].group.tp
    placement = Placement.parallel_attention(group.home, degree, cluster.dims.config.num_layers)
    allocators = {site.group.home: factory.allocators_of(site.group) for site in members}
    lanes = factory.new_lanes(placement, allocators, instance.width)
    for new, old, home in zip(lanes, instance.lanes, allocators, strict=True):
        for sequence, own in move_into(new, [old], home):
            sequence.pages = own
            new.running.append(sequence)
    instance.lanes, instance.lane_buckets, instance.transition = lanes, cluster.buckets(degree), None
    instance.attention_degree, instance.allocators = degree, allocators
    instance.runner.sites = {group.home: instance.site, **{site.group.home: site for site in members}}
    instance.runner.place(placement)
    instance.enter(Phase.SERVING)
    instance.limit_batch(instance.batch_limit)
    cluster.link_lanes()
