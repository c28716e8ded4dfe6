"""Changes of instances that are over before the next step: nothing moves layer by layer."""

import time
from collections.abc import Callable

from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.call import TransformCall
from amoeba_jax.transform.needs import GroupChange
from amoeba_jax.transform.pausing import pause, resume
from amoeba_jax.transform.report import GroupTransform
from amoeba_jax.transform.residency import RestoreError, release, released_for, restore
from amoeba_jax.transform.restart import RestartError, restart
from amoeba_jax.transform.staging import reserve_staging
from amoeba_jax.transform.views import merge_idle, split_idle


class AtOnce:
    """Makes such changes, and adds what they did to their call. Used by the dispatcher thread only.

    Args:
        drain: waits for what an instance has launched, and takes in the results.
        requeue: takes a sequence off its instance, to be computed again.
    """

    def __init__(
        self,
        cluster: Cluster,
        drain: Callable[[Instance], None],
        requeue: Callable[[Instance, Sequence], None],
    ):
        self._cluster, self._drain, self._requeue = cluster, drain, requeue

    def pause(self, call: TransformCall, old: list[Instance]) -> None:
        """Pause the requests of instances, and have one over their devices serve."""
        start = time.perf_counter()
        change, cluster = GroupChange.of(self._cluster, call.options, old), self._cluster
        cluster.check_compiled(change.group, change.group.tp, change.released[1])
        for instance in old:
            if instance.released < change.released[0]:
                self._drain(instance)
                if instance not in cluster.instances:
                    raise RequestError(f"a step of instance {instance.id} has failed")
                cluster.release_more(instance, change.released[0])
        count = len(pause(cluster, old).paused_sequences)
        degrees = old[0].tp, change.group.tp
        call.groups.append(GroupTransform.without_moves(change.group.device_indices, degrees, start, paused=count))

    def resume(self, call: TransformCall, instance: Instance) -> None:
        """Have paused requests go on, in the place of an instance that has none."""
        start = time.perf_counter()
        dropped = instance.lane.cache.num_cached_pages
        members = resume(self._cluster, instance)
        call.groups.append(
            GroupTransform.without_moves(
                instance.group.device_indices,
                (instance.tp, members[0].tp),
                start,
                resumed=sum(len(member.running) for member in members),
                prefix_pages_dropped=dropped,
            )
        )

    def view(self, call: TransformCall, change: GroupChange, old: list[Instance]) -> None:
        """Put instances in the place of others that have no pages (`GroupChange.is_idle`), and release weights.

        A release that fails leaves an instance of the degree with the weights that it had, and fails the call. Raises
        whatever fails before, with all as it was.
        """
        start, cluster, devices = time.perf_counter(), self._cluster, change.group.device_indices
        before, after = change.released
        cluster.check_compiled(change.group, change.target, after)
        if not change.up:
            degrees = change.group.tp, change.lower
            split_idle(cluster, old[0], change.lower)
            call.groups.append(GroupTransform.without_moves(devices, degrees, start))
            return
        degrees = change.lower, change.group.tp
        cluster.weights.prepare_release(change.group, before, after)
        merged = merge_idle(cluster, old)
        try:
            cluster.release_more(merged, after)
        except Exception as error:
            merged.site.kv.clear()
            drop_frames(error)
            lost = cluster.take_back([merged])
            how = "is out of service until it can be made again" if lost else "has all weights that it had"
            call.fail(error, devices, f"its instance has TP{change.group.tp}, and {how}")
        else:
            call.groups.append(GroupTransform.without_moves(devices, degrees, start))

    def change_residency(self, call: TransformCall, instance: Instance) -> None:
        """Have an instance of the degree asked for release or restore weights."""
        start, degree, devices = time.perf_counter(), released_for(call.options), instance.group.device_indices
        call.residencies.discard(instance.id)
        counts: dict[str, int] = {}
        try:
            if degree > instance.released:
                release(self._cluster, instance, degree)
            else:
                staging, kept, dropped = restore(
                    self._cluster,
                    self._requeue,
                    lambda more: reserve_staging(self._cluster, devices, more),
                    instance,
                    degree,
                )
                counts = {"staging_bytes": staging, "prefix_pages_kept": kept, "prefix_pages_dropped": dropped}
        except RestoreError as error:
            call.fail(error, devices, "its requests are computed again")
        else:
            degrees = instance.tp, instance.tp
            call.groups.append(GroupTransform.without_moves(devices, degrees, start, **counts))
        finally:
            reserve_staging(self._cluster, devices, 0)

    def restart(self, call: TransformCall, old: list[Instance]) -> None:
        options = call.options
        try:
            done = restart(self._cluster, self._requeue, old, options.tensor_parallel_size, options.release_weights)
        except RestartError as error:
            devices = [device for instance in old for device in instance.group.device_indices]
            call.fail(error, devices, error.outcome)
        else:
            call.groups.append(done)
