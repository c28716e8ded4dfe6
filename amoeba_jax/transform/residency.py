"""Weights released or restored by an instance that keeps its degree: all layers in one go, between two steps."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.giving_up import give_up
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.lanes import LanePages
from amoeba_jax.transform.movers import InPlaceMover
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.restart import check_growth
from kvcache.allocator import BuddyAllocator
from kvcache.pages import SequencePages
from kvcache.relayout import place_within


class RestoreError(RuntimeError):
    """Weights could not be restored. The instance has none of them, as before, and an empty cache."""


def released_for(options: TransformOptions) -> int:
    """The degree for which an instance is to have released weights afterwards that has the degree asked for already."""
    return options.tensor_parallel_size if options.release_weights else 1


def restore_programs(cluster: Cluster, instance: Instance, degree: int) -> TransitionPrograms:
    """What moves pages out of extents that become weights again, and restores these: the programs of a split."""
    released, rows = (instance.released, degree), cluster.buckets(1).decode_sizes[0]
    return TransitionPrograms(
        cluster.plan, cluster.executables, instance.group, 1, up=False, released=released, rows=rows
    )


def move_specs(cluster: Cluster, instance: Instance, degree: int) -> list[ProgramSpec]:
    """The programs that move something."""
    if degree >= instance.released:
        return []
    programs = restore_programs(cluster, instance, degree)
    return programs.restore_specs() + programs.exchange_specs()


def release(cluster: Cluster, instance: Instance, degree: int) -> None:
    """Give an instance weights as cache that its ranks do not need at `degree`. Nothing is moved."""
    cluster.check_compiled(instance.group, instance.tp, degree)
    cluster.weights.prepare_release(instance.group, instance.released, degree)
    cluster.release_more(instance, degree)
    instance.launcher.extents_changed()


def restore(
    cluster: Cluster,
    requeue: Callable[[Instance, Sequence], None],
    reserve: Callable[[int], None],
    instance: Instance,
    degree: int,
) -> tuple[int, int, int]:
    """Have an instance's ranks hold again what was released beyond `degree`, its pages moved to the other extents.

    Cached prefixes for which there is no room any more are dropped, those that were not used for longest first.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
        reserve: sets aside bytes on the instance's devices for the time being. Raises `MemoryBudgetError`.
        instance: has nothing pending.

    Returns the bytes set aside, and the cached pages that were kept and dropped.

    Raises `RequestError`, with nothing changed, where its sequences do not fit, and `RestoreError`.
    """
    group, tp, lane = instance.group, instance.tp, instance.lane
    check_growth(cluster, instance, tp, degree)
    cluster.check_compiled(group, tp, degree)
    programs = restore_programs(cluster, instance, degree)
    allocators = [cluster.factory.new_allocator(degree) for _ in group.devices]
    room = min(allocator.num_free(lane.pages.geometry.order(tp)) for allocator in allocators)
    live = lane.live_pages().shape[1]
    if live - lane.cache.num_evictable_pages > room:
        needed = live - lane.cache.num_evictable_pages
        raise RequestError(f"requests have {needed} pages, and without the released weights there are {room}")
    mover = InPlaceMover(programs, cluster.weights)
    staging = mover.prepare(live)
    reserve(staging)
    dropped = lane.cache.evict(max(live - room, 0))
    part = LanePages.of(lane.running, lane.cache.pages(), tp)
    table = place_within(part.table, part.references, lane.pages.geometry, allocators)
    mover.plan([part.table], [table])
    try:
        for layer in range(programs.num_layers):
            _restore_layer(cluster, instance, programs, mover, layer)
    except Exception as error:
        _undo(cluster, requeue, instance, programs)
        drop_frames(error)
        raise RestoreError(str(error)) from error
    _end(cluster, instance, part, table, allocators)
    instance.released = degree
    instance.site.extent_pages = programs.new_extents
    instance.launcher.extents_changed()
    return staging, len(part.cached), dropped


def _restore_layer(
    cluster: Cluster, instance: Instance, programs: TransitionPrograms, mover: InPlaceMover, layer: int
) -> None:
    site, num_kept = instance.site, len(programs.new_extents)
    site.kv[layer] = mover.move(site.kv[layer])
    weights = mover.restore(programs.restored(layer), site.kv[layer][num_kept:])
    cluster.weights.put_back(instance.group, layer, *programs.released, weights)
    del site.kv[layer][num_kept:]


def _end(
    cluster: Cluster,
    instance: Instance,
    part: LanePages,
    table: Int32[np.ndarray, "tp pages"],
    allocators: list[BuddyAllocator],
) -> None:
    """Have sequences and cached prefixes know the places that their pages have now."""
    old, pool = instance.lane, instance.lane.pages
    cluster.factory.settle_allocators(instance.group, allocators)
    lane = cluster.factory.new_lane(pool, instance.group)
    for sequence in old.running:
        assert sequence.pages is not None, "it runs"
        sequence.pages = SequencePages(pool, table[:, part.columns(sequence.pages.table[0])])
        lane.running.append(sequence)
    places = part.columns(np.array([page.column[0] for page in part.cached], np.int32))
    columns = table[:, places].T.tolist()
    lane.cache.adopt(page._replace(column=tuple(column)) for page, column in zip(part.cached, columns, strict=True))
    instance.lanes = [lane]


def _undo(
    cluster: Cluster,
    requeue: Callable[[Instance, Sequence], None],
    instance: Instance,
    programs: TransitionPrograms,
) -> None:
    """Give back what was restored, and have the instance's sequences computed again."""
    give_up(cluster, instance, requeue)
    before, after = programs.released
    for layer, extents in enumerate(instance.site.kv):
        if len(extents) < len(programs.old_extents):
            extents += cluster.weights.release(instance.group, layer, after, before)
    cluster.rebuild(instance)
