"""Instances over the same devices and extents as others, whose pages are views of theirs: nothing moves."""

import jax

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.factory import Scratch
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.site import KvBuffers, Site
from sharding.mesh import SubMesh, assemble, disassemble


def joined(cluster: Cluster, group: SubMesh, members: list[Instance], scratch: Scratch) -> Instance:
    """Make an instance over a group, the devices of several, which have released the same weights.

    Takes their extents, `[tp * pages, page_elems]` each, and copies nothing; pages that they have in the devices'
    allocators stay there. `scratch` has a buffer for each rank. Where making it fails, the members have all they had.
    """
    sites, factory = [member.site for member in members], cluster.factory
    groups = [site.group for site in sites]

    def whole(extents: tuple[jax.Array, ...]) -> jax.Array:
        return assemble(group, [buffer for part in map(disassemble, groups, extents) for buffer in part])

    layers = zip(*(site.kv for site in sites), strict=True)
    kv: KvBuffers = [[whole(extents) for extents in zip(*layer, strict=True)] for layer in layers]
    instance = factory.new_instance(group, factory.allocators_of(group), kv, members[0].released, scratch)
    for site in sites:
        site.kv[:] = [[] for _ in kv]
    return instance


def divided(site: Site, groups: list[SubMesh]) -> list[KvBuffers]:
    """View a site's extents, `[tp * pages, page_elems]` each, as those of groups of equal degree side by side over its
    devices. Copies nothing, and takes nothing from the site."""
    tp, whole = groups[0].tp, site.group

    def parts(extent: jax.Array) -> list[jax.Array]:
        buffers = disassemble(whole, extent)
        if tp == 1:
            return buffers
        return [
            assemble(group, buffers[rank : rank + tp])
            for rank, group in zip(range(0, whole.tp, tp), groups, strict=True)
        ]

    layers = [[parts(extent) for extent in layer] for layer in site.kv]
    return [[[extent[index] for extent in layer] for layer in layers] for index in range(len(groups))]
