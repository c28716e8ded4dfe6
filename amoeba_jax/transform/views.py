"""Instances over the same devices and extents as others, whose pages are views of theirs: nothing moves."""

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.scratch import Scratch
from amoeba_jax.instances.site import KvBuffers, Site
from sharding.mesh import SubMesh, assemble, disassemble


def joined(cluster: Cluster, group: SubMesh, members: list[Instance], scratch: Scratch) -> Instance:
    """Make an instance over a group, the devices of several, which have released the same weights.

    Takes their extents, `[tp * pages, page_elems]` each, and copies nothing; pages that they have in the devices'
    allocators stay there. `scratch` has a buffer for each rank. Where making it fails, the members have all they had.
    """
    sites, factory = [member.site for member in members], cluster.factory
    kv: KvBuffers = []
    for layers in zip(*(site.kv for site in sites), strict=True):
        parts = [
            [disassemble(site.group, extent) for extent in layer] for site, layer in zip(sites, layers, strict=True)
        ]
        kv.append([assemble(group, [b for part in same for b in part]) for same in zip(*parts, strict=True)])
    instance = factory.new_instance(group, factory.allocators_of(group), kv, members[0].released, scratch)
    for site in sites:
        site.kv[:] = [[] for _ in kv]
    return instance


def divided(site: Site, groups: list[SubMesh]) -> list[KvBuffers]:
    """View a site's extents, `[tp * pages, page_elems]` each, as those of groups of equal degree side by side over its
    devices. Copies nothing, and takes nothing from the site."""
    found: list[KvBuffers] = [[] for _ in groups]
    tp = groups[0].tp
    for layer in site.kv:
        buffers = [disassemble(site.group, extent) for extent in layer]
        for index, (kv, group) in enumerate(zip(found, groups, strict=True)):
            ranks = slice(index * tp, (index + 1) * tp)
            kv.append([assemble(group, of_ranks[ranks]) for of_ranks in buffers])
    return found


def merge_idle(cluster: Cluster, members: list[Instance]) -> Instance:
    """Put one instance in the place of several that have no pages, and have released the same weights."""
    group = cluster.sub_meshes.group(members[0].id, sum(member.tp for member in members))
    scratch = Scratch.joined([cluster.factory.scratch_of(member) for member in members])
    merged = joined(cluster, group, members, scratch)
    cluster.replace(members, [merged])
    return merged


def split_idle(cluster: Cluster, instance: Instance, tp: int) -> None:
    """Put several instances in the place of one that has no pages. They have released the same weights."""
    factory, start = cluster.factory, instance.group.start
    groups = [cluster.sub_meshes.group(first, tp) for first in range(start, start + instance.tp, tp)]
    parts = zip(groups, divided(instance.site, groups), factory.scratch_of(instance).split(tp), strict=True)
    new = [
        factory.new_instance(group, factory.allocators_of(group), kv, instance.released, scratch)
        for group, kv, scratch in parts
    ]
    instance.site.kv.clear()
    cluster.replace([instance], new)
