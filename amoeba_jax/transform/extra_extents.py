"""Extra extents: additional buffers for KV pages, in memory that becomes free when layers leave a device.

The layers that stay on the device use these buffers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.site import Site
from amoeba_jax.programs.plan import EXTRA_SHARES
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.pages import SequencePages
from sharding.owners import Owner
from sharding.placement import Home


def extra_pages(base: int, free_bytes: int, page_bytes: int) -> tuple[int, ...]:
    """Return `(n,)`: the number of pages of the largest extra KV extent that fits. Return `()` if no extra extent fits.

    An extent is a page buffer of one layer. All layers on a device get extra extents of the same size. The possible
    sizes are `base * share` pages, for each share in `EXTRA_SHARES`.

    Args:
        base: number of pages in the first extent of a layer.
        free_bytes: number of bytes that the extra extents of all layers on the device may use together.
        page_bytes: number of bytes of one page of one layer, times the number of layers that stay on the device.
    """
    if not page_bytes:
        return ()
    fitting = [pages for share in EXTRA_SHARES if 0 < (pages := int(base * share)) * page_bytes <= free_bytes]
    return tuple(fitting[-1:])


def grow(cluster: Cluster, site: Site, allocator: BuddyAllocator, extra: tuple[int, ...]) -> None:
    """Add extra KV extents (page buffers) to every layer that has KV cache on a device.

    Each layer gets an extent of `extra[0]` pages. Then each layer gets an extent of `extra[1]` pages, and so on. Stop
    if the free memory is too small for the next extents of all layers. Raises the error of JAX if an allocation fails.

    Args:
        site: buffers of the device.
        allocator: page allocator of the device.
        extra: numbers of pages, one number for each extra extent of a layer. All layers get extents of these sizes.
    """
    (device,), page_bytes = site.group.devices, cluster.memory_plan.page_bytes
    for num_pages in extra:
        layers = [layer for layer, extents in enumerate(site.kv) if extents]
        if num_pages * page_bytes * len(layers) > cluster.ledgers[site.group.start].free_bytes:
            return  # memory was taken since the plan was made: add no further extents
        shape = (num_pages, cluster.dims.pages.page_elems)
        new = jax.block_until_ready([jnp.zeros(shape, cluster.dims.dtype, device=device) for _ in layers])
        for layer, extent in zip(layers, new, strict=True):
            cluster.ledgers[site.group.start].add(Owner.KV_CACHE, num_pages * page_bytes, layer)
            site.kv[layer] = [*site.kv[layer], extent]
        site.extent_pages = (*site.extent_pages, num_pages)
        allocator.add_extent(num_pages)


def shrink(cluster: Cluster, home: Home, site: Site, allocator: BuddyAllocator) -> None:
    """Remove the extra KV extents (page buffers) of every layer on a device. Each layer keeps only its first extent.

    If any page in the extra extents is in use, first empty the prefix caches at `home`. If a page in the extra extents
    is still in use, move the page to a free page in the first extent.

    Raises `OutOfPagesError` if the first extent has too few free pages. In this case, the prefix caches may be empty,
    but nothing else has changed.

    Args:
        home: home (group of devices) that consists of only this device.
        site: buffers of the device.
        allocator: page allocator of the device.
    """
    lanes = [lane for instance in cluster.instances for lane in instance.lanes if home in lane.ranks]
    base = site.extent_pages[0] * allocator.max_tp
    if any(block.unit >= base for block in allocator.live_blocks()):
        for lane in lanes:
            lane.cache.clear()
    smaller = cluster.factory.empty_allocator(site.extent_pages[:1])
    moving = [block for block in allocator.live_blocks() if block.unit >= base]
    for block in allocator.live_blocks():
        if block.unit < base:
            smaller.claim(block.unit, block.order)
            for _ in range(block.references - 1):
                smaller.share(block.unit)
    order = allocator.max_order
    if len(moving) > smaller.num_free(order):
        raise OutOfPagesError(
            f"device {home.start} needs {len(moving)} free pages in the KV cache that it keeps, and has "
            f"{smaller.num_free(order)}"
        )
    places: dict[int, int] = {}
    for block in moving:
        unit = smaller.allocate(order)
        for _ in range(block.references - 1):
            smaller.share(unit)
        places[block.unit // allocator.max_tp] = unit // allocator.max_tp
    _copy(cluster, site, places)
    for lane in lanes:
        _renumber(lane, home, places)
    for layer, extents in enumerate(site.kv):
        if extents:
            size = sum(site.extent_pages[1:]) * cluster.memory_plan.page_bytes
            cluster.ledgers[home.start].remove(Owner.KV_CACHE, size, layer)
            site.kv[layer] = extents[:1]
    site.extent_pages = site.extent_pages[:1]
    allocator.become(smaller)


def _copy(cluster: Cluster, site: Site, places: dict[int, int]) -> None:
    """Copy KV pages of every layer to other pages on the device. `places` maps old page ids to new page ids."""
    if not places:
        return
    program = cluster.executables.get(cluster.executables.specs.page_copy(site.group, site.extent_pages))
    for old, new in places.items():
        for layer, extents in enumerate(site.kv):
            if extents:
                site.kv[layer] = program(extents, np.array([[old, new]], np.int32))


def _renumber(lane: Lane, home: Home, places: dict[int, int]) -> None:
    """Replace the ids of moved pages in the block tables of a lane's sequences.

    `places` maps old page ids to new page ids at `home`. Page ids at other homes do not change. The prefix cache of the
    lane must be empty.
    """
    (row,) = range(lane.pages.tp)[lane.ranks[home]]
    for sequence in lane.running:
        if sequence.pages is not None:
            table = sequence.pages.table.copy()
            table[row] = [places.get(page, page) for page in table[row].tolist()]
            sequence.pages = SequencePages(lane.pages, table)
