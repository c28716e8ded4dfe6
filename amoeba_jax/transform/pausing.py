"""Instances whose requests pause while one instance over all of their devices serves, and which resume afterwards.

Nothing is moved, restored or computed again: the bytes of a page are the bytes of its sub-pages at the higher degree,
so the larger instance views the same extents. Paused sequences keep their pages, slots and sampling state. The larger
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
    """Raise `RequestError` if paused requests ran at another degree than the requested one. They resume only there."""
    for instance in [instance for instance in instances if instance.paused_sequences]:
        count, degree = len(instance.paused_sequences), instance.paused[0].tp
        what = f"{count} requests are paused on devices {list(instance.group.device_indices)}"
        if degree != options.tensor_parallel_size:
            raise RequestError(f"{what}: transform them to TP{degree} first, which lets them go on")


def pause(cluster: Cluster, members: list[Instance]) -> Instance:
    """Replace instances, which have released the same weights, by one instance over their devices."""
    group = cluster.sub_meshes.group(members[0].id, sum(member.tp for member in members))
    # No program donates the last tokens, so the members keep the tokens of their slots.
    last_tokens = [t for member in members for t in disassemble(member.group, member.runner.last_tokens)]
    instance = _joined(cluster, group, members, last_tokens)
    instance.take_the_place_of(tuple(members))
    cluster.swap(members, [instance])
    return instance


def resume(cluster: Cluster, instance: Instance) -> tuple[Instance, ...]:
    """Replace an instance, which has no sequences and no steps in flight, by its paused instances.

    Drops its cached prefixes.
    """
    instance.lane.cache.clear()
    members = instance.drop_paused()
    for member, kv in zip(members, _divided(instance.site, [member.group for member in members]), strict=True):
        member.site.kv[:] = kv
    instance.site.kv.clear()
    cluster.replace([instance], list(members))
    return members


def forget(instance: Instance) -> None:
    """Drop the paused instances of an instance. They have no sequences. Their cached prefixes are dropped too."""
    for member in instance.drop_paused():
        member.lane.cache.clear()
        member.clear_pending()
        member.retire()


def drop_prefixes(members: Iterable[Instance]) -> bool:
    """Drop the cached prefixes of paused instances that no sequence uses. Return whether there were any."""
    caches = [member.lane.cache for member in members]
    if not any(cache.num_evictable_pages for cache in caches):
        return False
    for cache in caches:
        cache.clear()
    return True


def _joined(cluster: Cluster, group: SubMesh, members: list[Instance], last_tokens: list[jax.Array]) -> Instance:
    """Return an instance over a group. It takes the extents of the members, `[tp * pages, page_elems]` each, uncopied.

    If it cannot be made, the members still have their extents.
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
    """Return the extents of a site, `[tp * pages, page_elems]` each, as extents of groups of equal degree, uncopied."""
    tp, whole = groups[0].tp, site.group

    def parts(extent: jax.Array) -> list[jax.Array]:
        buffers = disassemble(whole, extent)
        if tp == 1:
            return buffers
        return [assemble(group, buffers[index * tp : (index + 1) * tp]) for index, group in enumerate(groups)]

    layers = [[parts(extent) for extent in layer] for layer in site.kv]
    return [[[extent[index] for extent in layer] for layer in layers] for index in range(len(groups))]


class KeptPages:
    """Pages of paused instances, claimed in the allocators of the new layout, so that no other sequence gets them.

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
        """Free the pages that paused sequences have freed since, for example because they were cancelled."""
        for lane, pool, claimed in zip(self._lanes, self._pools, self._claimed, strict=True):
            gone = list((claimed - _references(lane)).elements())
            pool.free(np.array(gone, np.int32).reshape(len(gone), pool.tp).T)


def _references(lane: Lane) -> Counter[tuple[int, ...]]:
    """Count how often a lane's sequences and its prefix cache hold each page.

    A key is the page's column in a block table: its id on each rank.
    """
    tables = [s.pages.table for s in lane.running if s.pages is not None] + [lane.cache.table()]
    return Counter(tuple(column) for table in tables for column in table.T.tolist())
