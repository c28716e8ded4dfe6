"""Transformations: which groups of devices change their degree, from the request to the report."""

import time
from collections.abc import Callable
from concurrent.futures import Future

from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.active import ActiveTransitions
from amoeba_jax.transform.beginning import Beginning
from amoeba_jax.transform.call import TransformCall, check_options, next_groups
from amoeba_jax.transform.needs import GroupChange, request_programs
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.pausing import check_paused, forget, pause, resume
from amoeba_jax.transform.report import GroupTransform, TransformReport
from amoeba_jax.transform.staging import reserve_staging
from amoeba_jax.views import TransformStatus
from kvcache.allocator import OutOfPagesError


class Transformations:
    """Starts, advances and ends transitions of a cluster's instances. Used by the dispatcher thread only.

    Args:
        drain: waits for what an instance has launched, and takes in the results.
        requeue: takes a sequence off its instance, to be computed again.

    Attributes:
        active: the transitions under way.
    """

    def __init__(
        self,
        cluster: Cluster,
        drain: Callable[[Instance], None],
        requeue: Callable[[Instance, Sequence], None],
    ):
        self._cluster, self._drain = cluster, drain
        self.active = ActiveTransitions(cluster, requeue, self._proceed)
        self._beginning = Beginning(cluster, requeue)
        self._calls: list[TransformCall] = []

    @property
    def busy(self) -> bool:
        """A transformation has not ended yet."""
        return bool(self._calls)

    @property
    def awaits_programs(self) -> bool:
        """A transformation cannot begin, or go on, before programs have come."""
        return any(call.awaits_programs for call in self._calls)

    @property
    def statuses(self) -> tuple[TransformStatus, ...]:
        """Progress of the calls that have not ended."""
        return tuple(call.status for call in self._calls)

    def targets(self) -> dict[int, int]:
        """Return the degree to come of every device that is being transformed, or is about to be.

        Groups of a call that have ended, or that will not begin as another has failed, are not among them.
        """
        targets: dict[int, int] = {}
        for call in (call for call in self._calls if not call.awaits_programs):
            devices = {device for active in self.active if active.call is call for device in active.devices}
            if call.error is None:
                to_come = [i for i in self._cluster.instances if i.tp != call.options.tensor_parallel_size]
                devices |= {device for i in to_come for device in i.group.device_indices}
            targets |= dict.fromkeys(devices & set(call.options.devices), call.options.tensor_parallel_size)
        return targets

    def request_programs(self, options: TransformOptions) -> bool:
        """Whether a transformation could begin at once. If not, its programs are compiled meanwhile."""
        return not request_programs(self._cluster, options, next_groups(options, self._cluster))

    def capacity_to_come(self, instance: Instance, further: TransformOptions | None = None) -> tuple[int, int]:
        """Tokens that an instance of an instance's devices holds when all transformations are through, and its degree.

        `further` is one that has not been requested yet. May be called by any thread, for an instance that has been
        retired meanwhile too.
        """
        call = next((call for call in list(self._calls) if instance.id in call.options.devices), None)
        options = call.options if call is not None else further
        if options is None or instance.id not in options.devices or instance.tp == options.tensor_parallel_size:
            return self._cluster.capacity_tokens(instance.tp, instance.released), instance.tp
        tp, released = options.tensor_parallel_size, instance.released
        if tp < instance.tp:
            released = min(released, tp)
        elif options.release_weights:
            released = max(released, tp)
        return self._cluster.capacity_tokens(tp, released), tp

    def request(self, options: TransformOptions) -> "Future[TransformReport]":
        """Start a transformation. Raises `LayoutError` or `RequestError`, with nothing changed, if it cannot be."""
        check_options(options, self._cluster, self._calls)
        self._cluster.check_in_service(options.devices)
        check_paused([i for i in self._cluster.instances if i.id in options.devices], options)
        call = TransformCall(options)
        self._calls.append(call)
        self._proceed(call)
        return call.future

    # The course of a call

    def _proceed(self, call: TransformCall) -> None:
        """Start whatever transitions of a call can start now; report if there are none left."""
        if call.error is None:
            try:
                while not call.active and call.error is None and (groups := next_groups(call.options, self._cluster)):
                    call.awaited = []
                    if self._await_requests(call, groups):
                        return  # until `collect` finds that they have ended
                    missing = request_programs(self._cluster, call.options, groups)
                    call.await_programs(missing, self._cluster.executables.estimate_compile_s(missing))
                    if missing:
                        return  # until `retry`
                    if self._await_steps(call, groups):
                        return  # until `collect` finds that they have run
                    for old in groups:
                        self._begin(call, old)
            except Exception as error:
                self.active.take_back(call)
                if not call.groups and not call.active:
                    self._calls.remove(call)
                    if isinstance(error, OutOfPagesError | RequestError):
                        kind = type(error) if isinstance(error, RequestError) else RequestError
                        raise kind(f"the transformation is refused: {error}") from error
                    drop_frames(error)
                    degree = call.options.tensor_parallel_size
                    raise TransformError(
                        f"the transformation to TP{degree} failed: {error} (it had not begun; all is as it was)"
                    ) from error
                call.error = error
                call.outcomes.append("what had not begun is as it was")
        if not call.active:
            self._end(call)

    def _end(self, call: TransformCall) -> None:
        """Give the caller the report. Instances that did not change, as a part of their group is lost, go on."""
        self._calls.remove(call)
        left = [i for i in self._cluster.instances if i.id in call.options.devices]
        for lane in [lane for instance in left for lane in instance.lanes]:
            lane.closed = False
        lost = set(call.options.devices).difference(*(instance.group.device_indices for instance in left))
        if lost and call.error is None:
            error = RuntimeError("devices went out of service while steps or requests were waited for")
            call.fail(
                error, sorted(lost), "their requests are computed again elsewhere; the others of their groups go on"
            )
        call.end()

    def is_about_to_change(self, instance: Instance) -> bool:
        """Whether an instance changes when steps that were launched have run."""
        return any(instance in call.awaited for call in self._calls)

    def holds(self, instance: Instance) -> bool:
        """Whether an instance must launch no steps until those in flight have run: it is about to change, or all of its
        layers have switched."""
        if instance.transition is not None:
            return bool(instance.pending) and self.active.has_switched_all(instance)
        return self.is_about_to_change(instance)

    def retry(self) -> None:
        """Programs have come: go on with calls that wait for some."""
        self._proceed_with([call for call in self._calls if call.awaits_programs])

    def _proceed_with(self, calls: list[TransformCall]) -> None:
        for call in calls:
            try:
                self._proceed(call)
            except Exception as error:  # it cannot begin, and all is as it was
                call.future.set_exception(error)

    def _begin(self, call: TransformCall, old: list[Instance]) -> None:
        degree = call.options.tensor_parallel_size
        for instance in old:
            if instance.paused and instance.paused[0].tp != degree:
                forget(instance)  # they have no requests: see `check_paused`
        if _keeps_steps(call, old):
            self._pause(call, old)
            return
        if old[0].paused and not old[0].running:
            self._resume(call, old[0])
            return
        try:
            active = self._beginning.merge(call, old) if len(old) > 1 else self._beginning.split(call, old[0])
        except BaseException:
            for instance in old:
                reserve_staging(self._cluster, instance.group.device_indices, 0)
            raise
        self.active.add(active)

    def _pause(self, call: TransformCall, old: list[Instance]) -> None:
        """Pause the requests of instances, and let one instance over their devices serve."""
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

    def _resume(self, call: TransformCall, instance: Instance) -> None:
        """Resume paused requests in the place of an instance without requests."""
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

    def _await_requests(self, call: TransformCall, groups: list[list[Instance]]) -> bool:
        """Whether requests run that are waited for. No others start beside them."""
        instances = [instance for old in groups for instance in old]
        count = sum(len(instance.running) for instance in instances)
        call.await_requests(count if call.options.running == "wait" else 0)
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = call.awaits_requests
        return call.awaits_requests

    def _await_steps(self, call: TransformCall, groups: list[list[Instance]]) -> bool:
        """Whether steps that were launched are waited for. Meanwhile the instances launch no others, not even those
        that have none now, or their group would wait for these in turn. No requests start beside them."""
        changing = [i for old in groups if not _keeps_steps(call, old) for i in old]
        call.awaited = changing if any(i.pending for i in changing) else []
        for lane in [lane for old in groups if call.awaited for instance in old for lane in instance.lanes]:
            lane.closed = True
        return bool(call.awaited)

    def wait(self) -> None:
        """Wait for transitions that have switched all layers, and end them."""
        self.active.wait()
        self.collect()

    def collect(self) -> None:
        """End the transitions whose last step has run, and begin those whose instances' requests, or steps, have
        ended."""
        self.active.collect()
        self._proceed_with([call for call in self._calls if call.awaits_requests or _steps_have_run(call)])

    def fail(self, error: BaseException) -> None:
        """The engine fails: so do the transformations under way."""
        for call in self._calls:
            failure = TransformError(f"the engine failed: {error}")
            failure.__cause__ = error
            call.future.set_exception(failure)
        self._calls.clear()
        self.active.clear()


def _keeps_steps(call: TransformCall, old: list[Instance]) -> bool:
    """Whether a change leaves the steps that its instances have launched to themselves: their requests pause."""
    return call.options.running == "pause" and len(old) > 1


def _steps_have_run(call: TransformCall) -> bool:
    """Whether a call can begin that has waited for steps."""
    return bool(call.awaited) and not any(instance.pending for instance in call.awaited)
