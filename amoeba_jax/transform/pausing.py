"""Pause and resume: the requests of instances pause while one larger instance serves on all of their devices.

Nothing is moved, restored or computed again. A page has the same bytes as its sub-pages at the higher degree, so the
larger instance uses the same extents. Paused sequences keep their pages, slots and sampling state. The larger
instance uses the pages and slots that are free. Steps in flight end as usual.
"""

from collections import Counter
from collections.abc import Iterable

import jax
import numpy as np

from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.site import KvBuffers, Site
from amoeba_jax.transform.options import TransformOptions
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from sharding.mesh import SubMesh, assemble, disassemble


def check_paused(instances: Iterable[Instance], options: TransformOptions) -> None:
    """Raise `RequestError` if an instance has paused requests of a degree other than the requested degree.

    Paused requests can resume only at the degree at which they ran.
    """
    for instance in [instance for instance in instances if instance.paused_sequences]:
        count, degree = len(instance.paused_sequences), instance.paused[0].tp
        what = f"{count} requests are paused on devices {list(instance.group.device_indices)}"
        if degree != options.tensor_parallel_size:
            raise RequestError(f"{what}: transform them to TP{degree} first, which lets them go on")


def pause(cluster: Cluster, members: list[Instance]) -> Instance:
    """Replace instances by one instance over their devices, and pause them. All must have released the same weights."""
    group = cluster.sub_meshes.group(members[0].id, sum(member.tp for member in members))
    # No program donates the last tokens, so the members keep the tokens of their slots.
    last_tokens = [t for member in members for t in disassemble(member.group, member.runner.last_tokens)]
    instance = _joined(cluster, group, members, last_tokens)
    instance.take_the_place_of(tuple(members))
    cluster.swap(members, [instance])
    return instance


def resume(cluster: Cluster, instance: Instance) -> tuple[Instance, ...]:
    """Replace an instance by its paused instances. It must have no sequences and no steps in flight.

    Its cached prefixes are dropped.
    """
    instance.lane.cache.clear()
    members = instance.drop_paused()
    for member, kv in zip(members, _divided(instance.site, [member.group for member in members]), strict=True):
        member.site.kv[:] = kv
    instance.site.kv.clear()
    cluster.replace([instance], list(members))
    return members


def forget(instance: Instance) -> None:
    """Drop the paused instances of an instance, with their cached prefixes. They must have no sequences."""
    for member in instance.drop_paused():
        member.lane.cache.clear()
        member.clear_pending()
        member.retire()


def drop_prefixes(members: Iterable[Instance]) -> bool:
    """Drop the cached prefixes of paused instances that no sequence uses. Return whether any was dropped."""
    caches = [member.lane.cache for member in members]
    if not any(cache.num_evictable_pages for cache in caches):
        return False
    for cache in caches:
        cache.clear()
    return True


def _joined(cluster: Cluster, group: SubMesh, members: list[Instance], last_tokens: list[jax.Array]) -> Instance:
    """Create an instance over a group from the KV extents of its members, without a copy.

    Each extent becomes part of an array `[tp * pages, page_elems]` over the group. If this fails, the members keep
    their extents.
    """
    sites, factory = [member.site for member in members], cluster.factory
    groups = [site.group for site in sites]

    def whole(extents: tuple[jax.Array, ...]) -> jax.Array:
        return assemble(group, [buffer for part in map(disassemble, groups, extents) for buffer in part])

    layers = zip(*(site.kv for site in sites), strict=True)
    kv: KvBuffers = [[whole(extents) for extents in zip(*layer, strict=True)] for layer in layers]
    instance = factory.new_instance(group, factory.allocators_of(group), kv, members[0].released, last_tokens)
    for site in sites:
        site.kv[:] = [[] for _ in kv]
    return instance


def _divided(site: Site, groups: list[SubMesh]) -> list[KvBuffers]:
    """Divide the KV extents of a site among groups of equal degree, without a copy.

    Every extent is an array `[tp * pages, page_elems]` over its devices.
    """
    tp, whole = groups[0].tp, site.group

    def parts(extent: jax.Array) -> list[jax.Array]:
        buffers = disassemble(whole, extent)
        if tp == 1:
            return buffers
        return [assemble(group, buffers[index * tp : (index + 1) * tp]) for index, group in enumerate(groups)]

    layers = [[parts(extent) for extent in layer] for layer in site.kv]
    return [[[extent[index] for extent in layer] for layer in layers] for index in range(len(groups))]


class KeptPages:
    """Pages of paused instances in the allocators of the new layout.

    They are claimed there, so no other sequence gets them.

    Args:
        instance: instance that serves in place of the paused instances.
        allocators: empty allocators of the new layout, one for each device of the instance.
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
        """Free pages whose paused sequences were removed during the transition, for example by a cancellation."""
        for lane, pool, claimed in zip(self._lanes, self._pools, self._claimed, strict=True):
            gone = list((claimed - _references(lane)).elements())
            pool.free(np.array(gone, np.int32).reshape(len(gone), pool.tp).T)


def _references(lane: Lane) -> Counter[tuple[int, ...]]:
    """Count the references of a lane's sequences and prefix cache to each page.

    A key is the page's column in a block table: its id on each rank.
    """
    tables = [s.pages.table for s in lane.running if s.pages is not None] + [lane.cache.table()]
    return Counter(tuple(column) for table in tables for column in table.T.tolist())
