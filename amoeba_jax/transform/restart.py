"""Gives a group of devices another degree by starting it again: what transformations are measured against."""

import time
from collections.abc import Callable

from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.report import GroupTransform
from sharding.mesh import SubMesh


class RestartError(RuntimeError):
    """The weights could not be read again, or the cache not be recreated. The instances have their old degree, and an
    empty cache; or they are out of service, where that cannot be had any more: see `Cluster.lost`.

    Attributes:
        outcome: what became of the instances and their requests, for the caller of the transformation.
    """

    def __init__(self, message: str, lost: list[SubMesh]):
        super().__init__(message)
        self.outcome = "its instances are as they were, and its requests are computed again"
        if lost:
            self.outcome = (
                f"{', '.join(map(str, lost))} cannot be made again, and are out of service until they can: that is "
                "tried every second; its requests are computed again"
            )


def restart(
    cluster: Cluster,
    requeue: Callable[[Instance, Sequence], None],
    old: list[Instance],
    tp: int,
    release_weights: bool,
) -> GroupTransform:
    """Put instances of another degree in the place of others, in the dispatcher thread. Everything waits meanwhile.

    Weights are read again, extents are recreated, and requests are queued to be computed again.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
        old: several instances of one degree, which become one, or one, which splits. Nothing of theirs is pending.
        tp: degree of the new instances, where one splits.
        release_weights: whether a merged instance gives weights that its ranks do not need to its cache.

    Raises `RequestError`, with nothing changed, where a request may grow beyond the lower degree, or a program is
    missing; and `RestartError`.
    """
    start = time.perf_counter()
    group = cluster.sub_meshes.group(old[0].id, sum(instance.tp for instance in old))
    up = len(old) > 1
    before = max(instance.released for instance in old)
    if up:
        groups, after = [group], max(group.tp, before) if release_weights else before
        have = [instance.released for instance in old for _ in instance.group.devices]
    else:
        groups = [cluster.sub_meshes.group(first, tp) for first in range(group.start, group.start + group.tp, tp)]
        after = min(before, tp)
        have = [after] * group.tp
        check_growth(cluster, old[0], tp, after)
    cluster.check_compiled(group, groups[0].tp, after)
    recomputed = 0
    for instance in old:
        for sequence in list(instance.running):
            requeue(instance, sequence)
            recomputed += 1
        instance.lane.cache.clear()
        instance.site.kv.clear()
    failed = "the weights cannot be read again"
    try:
        with cluster.open_weights() as reader:
            cluster.weights.reload(reader, group, have)
        failed = "the KV cache cannot be recreated"
        for layer in range(cluster.dims.config.num_layers) if up else ():
            for instance in old:
                cluster.weights.release(instance.group, layer, instance.released, before)
            cluster.weights.release(group, layer, before, after)
        new = [cluster.factory.empty_instance(g, after) for g in groups]
    except Exception as error:
        drop_frames(error)  # with them goes what was read and made
        raise RestartError(f"{failed}: {error}", cluster.take_back(old)) from error
    cluster.replace(old, new)
    degrees = old[0].tp, groups[0].tp
    return GroupTransform.without_moves(group.device_indices, degrees, start, recomputed=recomputed)


def check_growth(cluster: Cluster, instance: Instance, tp: int, released: int) -> None:
    """Raise `RequestError` where an instance of degree `tp` could not hold what a request may grow to.

    `released` is the degree for which its weights are released.
    """
    limit = cluster.capacity_tokens(tp, released)
    for sequence in instance.running:
        if sequence.max_total_tokens > limit:
            raise RequestError(
                f"request {sequence.request_id!r} may grow to {sequence.max_total_tokens} tokens, and a TP{tp} "
                f"instance holds {limit}"
            )
