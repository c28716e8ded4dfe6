"""Instances over the same devices and extents as others, whose pages are views of theirs: nothing moves."""

from collections.abc import Sequence
from functools import partial

import jax

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.scratch import Scratch
from amoeba_jax.instances.site import KvViews, Site
from sharding.mesh import SubMesh, assemble, disassemble


def joined(cluster: Cluster, group: SubMesh, members: list[Instance], scratch: Scratch) -> Instance:
    """Make an instance over a group, the devices of several, which have released the same weights.

    Views their extents, `[tp * pages, page_elems]` each, when they are asked for, and copies nothing; pages that they
    have in the devices' allocators stay there. `scratch` has a buffer for each rank. The members have all they had.
    """
    sites, factory = [member.site for member in members], cluster.factory
    groups = [site.group for site in sites]

    def whole(layer: tuple[list[jax.Array], ...]) -> list[jax.Array]:
        parts = (map(disassemble, groups, extents) for extents in zip(*layer, strict=True))
        return [assemble(group, [buffer for part in extent for buffer in part]) for extent in parts]

    layers = list(zip(*(site.kv for site in sites), strict=True))
    instance = factory.new_instance(group, factory.allocators_of(group), [], members[0].released, scratch)
    instance.site.view([partial(whole, layer) for layer in layers])
    return instance


class _DividedLayer:
    """Extents of a layer, `[tp * pages, page_elems]` each, as those of groups of equal degree side by side over the
    same devices. All are made when the first is asked for, as its programs take the buffers."""

    def __init__(self, whole: SubMesh, extents: list[jax.Array], groups: Sequence[SubMesh]):
        if any(extent.is_deleted() for extent in extents):
            raise RuntimeError(f"extents of {whole} have been deleted or donated")
        self._whole, self._extents, self._groups = whole, extents, groups
        self._parts: list[list[jax.Array]] = []

    def part(self, index: int) -> list[jax.Array]:
        """Give the extents of a group away."""
        if not self._parts:
            buffers = [disassemble(self._whole, extent) for extent in self._extents]
            for rank, group in zip(range(0, self._whole.tp, self._groups[0].tp), self._groups, strict=True):
                self._parts.append([assemble(group, extent[rank : rank + group.tp]) for extent in buffers])
            self._extents.clear()
        part, self._parts[index] = self._parts[index], []
        return part


def divided(site: Site, groups: Sequence[SubMesh]) -> list[KvViews]:
    """What makes a site's extents, `[tp * pages, page_elems]` each, those of groups of equal degree side by side over
    its devices. Copies nothing, and takes nothing from the site."""
    layers = [_DividedLayer(site.group, list(extents), groups) for extents in site.kv]
    return [[partial(layer.part, index) for layer in layers] for index in range(len(groups))]


def merge_idle(cluster: Cluster, members: list[Instance]) -> Instance:
    """Put one instance in the place of several that have no pages, and have released the same weights."""
    group = cluster.sub_meshes.group(members[0].id, sum(member.tp for member in members))
    scratch = Scratch.joined([cluster.factory.scratch_of(member) for member in members])
    merged = joined(cluster, group, members, scratch)
    _ = merged.site.kv  # made now: where that fails, nothing has changed
    for member in members:
        member.site.drop()
    cluster.replace(members, [merged])
    return merged


def split_idle(cluster: Cluster, instance: Instance, tp: int) -> None:
    """Put several instances in the place of one that has no pages. They have released the same weights."""
    factory, start = cluster.factory, instance.group.start
    groups = [cluster.sub_meshes.group(first, tp) for first in range(start, start + instance.tp, tp)]
    made = [[make() for make in views] for views in divided(instance.site, groups)]
    parts = zip(groups, made, factory.scratch_of(instance).split(tp), strict=True)
    new = [
        factory.new_instance(group, factory.allocators_of(group), kv, instance.released, scratch)
        for group, kv, scratch in parts
    ]
    instance.site.drop()
    cluster.replace([instance], new)
