"""Instances whose requests pause while one over all of their devices serves, and that go on afterwards.

Nothing is moved, restored or computed again: a page's bytes are those of its sub-pages at the higher degree, so the
extents are viewed as the larger instance's, and back. Paused sequences keep their pages, slots and what sampling
remembers of them; the larger instance has the pages and slots that are free. Steps that were launched before go on, and
their results are taken in.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.factory import Scratch
from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.step import clear_in_flight
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.views import divided, joined
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from sharding.mesh import disassemble


def check_paused(instances: Iterable[Instance], options: TransformOptions) -> None:
    """Raise `RequestError` if instances have paused requests of another degree: they go on only at their own."""
    for instance in [instance for instance in instances if instance.paused_sequences]:
        count, degree = len(instance.paused_sequences), instance.paused[0].tp
        what = f"{count} requests are paused on devices {list(instance.group.device_indices)}"
        if degree != options.tensor_parallel_size:
            raise RequestError(f"{what}: transform them to TP{degree} first, which lets them go on")


def pause(cluster: Cluster, members: list[Instance]) -> Instance:
    """Put an instance over the devices of several, which have released the same weights, in their place."""
    group = cluster.sub_meshes.group(members[0].id, sum(member.tp for member in members))
    # No program takes last tokens donated: what the members have of their slots stays theirs.
    last_tokens = [t for member in members for t in disassemble(member.group, member.runner.last_tokens)]
    hidden = [buffer for member in members for buffer in member.runner.hidden.release(check=False).values()]
    instance = joined(cluster, group, members, Scratch(last_tokens, hidden))
    instance.take_the_place_of(tuple(members))
    cluster.swap(members, [instance])
    return instance


def resume(cluster: Cluster, instance: Instance) -> tuple[Instance, ...]:
    """Put paused instances back in the place of the one over their devices, which has nothing launched, and no
    sequence. Its cached prefixes are dropped."""
    instance.lane.cache.clear()
    members = instance.drop_paused()
    for member, kv in zip(members, divided(instance.site, [member.group for member in members]), strict=True):
        member.site.kv[:] = kv
    give_hidden(members, list(instance.runner.hidden.release(check=False).values()))
    instance.site.kv.clear()
    cluster.replace([instance], list(members))
    return members


def give_hidden(members: Sequence[Instance], buffers: list[jax.Array]) -> None:
    """Give paused instances that go on the hidden states' buffers of the one in their place, in the order of ranks."""
    for member in members:
        own, buffers = buffers[: member.tp], buffers[member.tp :]
        member.runner.hidden = HiddenStates(dict(zip(member.group.device_indices, own, strict=True)))


def forget(instance: Instance) -> None:
    """Drop paused instances that have no sequences, with their cached prefixes."""
    for member in instance.drop_paused():
        member.lane.cache.clear()
        clear_in_flight(row for step in member.pending for row in step.sampled)
        member.pending.clear()
        member.retire()


def drop_prefixes(members: Iterable[Instance]) -> bool:
    """Drop the cached prefixes of paused instances that no sequence uses. Returns whether there were any."""
    caches = [member.lane.cache for member in members]
    if not any(cache.num_evictable_pages for cache in caches):
        return False
    for cache in caches:
        cache.clear()
    return True


class KeptPages:
    """Pages of paused instances in allocators on which a change of their devices is planned: no one else gets them.

    Args:
        instance: over the paused ones.
        allocators: empty, of the extents to come, one a device of the instance.
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
        """Give up there what has been given up since: a paused sequence may have ended."""
        for lane, pool, claimed in zip(self._lanes, self._pools, self._claimed, strict=True):
            gone = list((claimed - _references(lane)).elements())
            pool.free(np.array(gone, np.int32).reshape(len(gone), pool.tp).T)


def _references(lane: Lane) -> Counter[tuple[int, ...]]:
    """How many references a lane's sequences and cache have to each page, by its column of a table."""
    tables = [s.pages.table for s in lane.running if s.pages is not None] + [lane.cache.table()]
    return Counter(tuple(column) for table in tables for column in table.T.tolist())
