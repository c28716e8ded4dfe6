"""Pause the requests of several instances, and resume these requests later.

During the pause, one larger instance serves on the devices of all paused instances. The larger instance uses the free
memory in the page buffers of the paused instances: one free page at TP1 has the memory for one rank's share of four
pages at TP4.

A pause or resume moves no pages, restores no weights and computes nothing again. Paused sequences keep their pages,
slots and sampling state. Steps that are in flight when a pause begins still run.
"""

import time
from collections import Counter
from collections.abc import Iterable

import jax
import numpy as np

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.site import KvBuffers
from amoeba_jax.transform.relayout_plan import RelayoutPlan
from amoeba_jax.transform.report import GroupTransform
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from sharding.mesh import SubMesh, combine, disassemble, divide


def pause(cluster: Cluster, plan: RelayoutPlan) -> GroupTransform:
    """Pause the instances `plan.old`, and create one instance over all of their devices. Return the report.

    The new instance keeps the paused instances in its attribute `paused`, for `resume`.
    """
    start, group, members = time.perf_counter(), plan.group, plan.old
    for instance in members:
        if instance.released < plan.released[0]:
            cluster.release_more(instance, plan.released[0])
    # No program donates the last tokens, so the members keep the tokens of their slots.
    last_tokens = [t for member in members for t in disassemble(member.group, member.runner.last_tokens)]
    instance = _joined(cluster, group, members, last_tokens)
    instance.take_the_place_of(tuple(members))
    cluster.swap(members, [instance])
    seconds, count = time.perf_counter() - start, len(instance.paused_sequences)
    return GroupTransform(group.device_indices, plan.lower, group.tp, seconds, paused=count)


def resume(cluster: Cluster, plan: RelayoutPlan) -> GroupTransform:
    """Replace the only instance of `plan.old` by its paused instances, and resume their requests. Return the report.

    The replaced instance must have no sequences and no steps in flight. The cached prefixes of the replaced instance
    are dropped.
    """
    start, (instance,) = time.perf_counter(), plan.old
    dropped = instance.lane.cache.num_cached_pages
    instance.lane.cache.clear()
    members = instance.drop_paused()
    groups = [member.group for member in members]
    for layer, extents in enumerate(instance.site.kv):
        parts = (divide(instance.group, extent, groups) for extent in extents)
        for member, *own in zip(members, *parts, strict=True):
            member.site.kv[layer] = own
    instance.site.kv.clear()
    cluster.replace([instance], list(members))
    seconds, count = time.perf_counter() - start, sum(len(member.running) for member in members)
    what = plan.group.device_indices, plan.group.tp, plan.lower, seconds
    return GroupTransform(*what, resumed=count, prefix_pages_dropped=dropped)


def forget_paused(plan: RelayoutPlan) -> None:
    """Drop the paused instances whose degree is not the degree that `plan` requests, because they cannot resume now.

    The paused instances of each instance in `plan.old` are checked. A dropped instance must have no sequences. The
    cached prefixes of a dropped instance are dropped too.
    """
    for instance in plan.old:
        if instance.paused and instance.paused[0].tp != plan.options.tensor_parallel_size:
            for member in instance.drop_paused():
                member.lane.cache.clear()
                member.clear_pending()
                member.retire()


def drop_prefixes(members: Iterable[Instance]) -> bool:
    """Empty the prefix caches of paused instances, and return True. If no page would become free, only return False."""
    caches = [member.lane.cache for member in members]
    if not any(cache.num_evictable_pages for cache in caches):
        return False
    for cache in caches:
        cache.clear()
    return True


def _joined(cluster: Cluster, group: SubMesh, members: list[Instance], last_tokens: list[jax.Array]) -> Instance:
    """Create one instance over `group` from the KV extents of the instances `members`, without a copy.

    An extent is a page buffer. Each new extent is an array `[tp * pages, page_elems]` over the group, and consists of
    one extent of each member. On success, the members lose their extents. On failure, the members keep their extents.

    Args:
        last_tokens: for each device of `group`, a buffer with the last token of each slot of the member on this device.
    """
    sites, factory = [member.site for member in members], cluster.factory
    groups = [site.group for site in sites]

    layers = zip(*(site.kv for site in sites), strict=True)
    kv: KvBuffers = [[combine(group, each, groups) for each in zip(*layer, strict=True)] for layer in layers]
    instance = factory.new_instance(group, factory.allocators_of(group), kv, members[0].released, last_tokens)
    for site in sites:
        site.kv[:] = [[] for _ in kv]
    return instance


class KeptPages:
    """Pages that paused instances keep while the merged instance splits.

    The constructor allocates these pages in the allocators of the new layout, so that no other sequence gets the pages.

    Args:
        instance: merged instance, which serves on the devices of the paused instances.
        allocators: empty allocators of the new layout, one for each device of `instance`.
    """

    def __init__(self, instance: Instance, allocators: list[BuddyAllocator]):
        self._lanes = [member.lane for member in instance.paused]
        self._pools: list[PagePool] = []
        self._claimed = [_references(lane) for lane in self._lanes]
        for index, (lane, claimed) in enumerate(zip(self._lanes, self._claimed, strict=True)):
            geometry, tp = lane.pages.geometry, lane.pages.tp
            ranks = allocators[index * tp : (index + 1) * tp]
            for column, count in claimed.items():
                for allocator, page in zip(ranks, column, strict=True):
                    unit = page * geometry.units_per_page(tp)
                    allocator.claim(unit, geometry.order(tp))
                    for _ in range(count - 1):
                        allocator.share(unit)
            self._pools.append(PagePool(geometry, ranks, tp))

    def settle(self) -> None:
        """Free the pages that paused instances have stopped using since this object was created.

        For example, a paused sequence ends during the split if its request is cancelled.
        """
        for lane, pool, claimed in zip(self._lanes, self._pools, self._claimed, strict=True):
            gone = list((claimed - _references(lane)).elements())
            pool.free(np.array(gone, np.int32).reshape(len(gone), pool.tp).T)


def _references(lane: Lane) -> Counter[tuple[int, ...]]:
    """Count the references to each page of a lane: one for each sequence that uses the page, and one if it is cached.

    Each key of the result is one page, as the tuple of its ids on all ranks.
    """
    tables = [s.pages.table for s in lane.running if s.pages is not None] + [lane.cache.table()]
    return Counter(tuple(column) for table in tables for column in table.T.tolist())
