"""Simulated host: instances and a queue, which the scheduler controls through its `Executor` protocol."""

import math
from collections.abc import Callable
from dataclasses import replace

from serving.scheduler import (
    Action,
    ClusterView,
    Dispatch,
    LimitBatch,
    Offload,
    Outcome,
    Preempt,
    Reject,
    RejectKind,
    ScaleDown,
    ScaleUp,
    Timing,
    WaitingRequest,
    invalid,
)
from serving.simulator.disaggregation import Handovers
from serving.simulator.group_changes import GroupChanges
from serving.simulator.host import drained_s, take_in
from serving.simulator.host_config import ForbiddenActionError, HostConfig, Refusal, Waiting
from serving.simulator.instance import SimInstance, pages_short, view_of
from serving.simulator.pauses import count_rooms, next_victim
from serving.simulator.placement_changes import PlacementChanges
from serving.simulator.prefix_store import PromptBlocks
from serving.simulator.run import Run
from serving.simulator.sim_timing import SimTimings
from serving.simulator.tally import Ending, Limit, Records, Tally

_ENDINGS = {
    RejectKind.NEVER_FITS: Ending.NEVER_FITS,
    RejectKind.DEADLINE: Ending.DEADLINE,
    RejectKind.QUEUE_FULL: Ending.QUEUE_FULL,
}


Reschedule = Callable[[SimInstance, float], None]


class SimExecutor:
    """Simulated host: an `Executor` with simulated instances and a queue.

    Steps are planned in blocks. A block is a series of similar steps of an instance (`block.Block`). The event loop
    sets `now_s`, and calls `end_block` at the end of each block.

    Args:
        reschedule: function that plans an event for the end of an instance's block. It receives the instance and the
            time in seconds.

    Attributes:
        queue: waiting requests by id.
        log: pair (time in seconds, action) for each accepted action. Empty without `keep_log`.
        failing_transformations: number of merges and splits that will fail, beginning with the next one.
        changes: running and waiting merges and splits.
        placements: running placement changes.
        handovers: requests on their way from prefill to decode instances. None: all instances do both.
        timings: measured times of steps, merges and splits.
        prompt_blocks: function that receives the row of a request, and returns the blocks of its prompt
            (`RequestTable.prompt_blocks`).
        on_end: function that receives the row of each request that ends.
    """

    def __init__(
        self, config: HostConfig, records: Records, tally: Tally, reschedule: Reschedule, keep_log: bool = False
    ):
        self.config, self.records, self.tally = config, records, tally
        self.now_s = 0.0
        self.queue: dict[str, Waiting] = {}
        self.failing_transformations = 0
        self.changes = GroupChanges(self)
        self.placements = PlacementChanges(self)
        self.handovers = None if config.handover is None else Handovers(self, config.handover)
        self.timings = SimTimings()
        self.num_preempted = 0
        self.log: list[tuple[float, Action]] = []
        self.prompt_blocks: Callable[[int], PromptBlocks | None] = lambda index: None
        self.on_end: Callable[[int], None] | None = None
        self.limits = {limits.degree: limits for limits in config.limits}
        self._reschedule, self._keep_log = reschedule, keep_log
        self._home: dict[str, SimInstance] = {}
        """Instance of each running or paused request, by request id."""
        self.instances: list[SimInstance] = []
        first = 0
        for degree in config.degrees_at_start:
            self.instances.append(self.new_instance(tuple(range(first, first + degree))))
            first += degree
        for action in config.placed_at_start:
            self.placements.start(action, at_once=True)

    def new_instance(self, devices: tuple[int, ...], capacity_tokens: int | None = None) -> SimInstance:
        """Return a new instance without requests. The caller must add it to `instances`.

        Args:
            devices: devices of the instance. Their number is the tensor-parallel degree.
            capacity_tokens: additional limit of the capacity in tokens. None: only the limit of the degree applies.
        """
        c, limits = self.config, self.limits[len(devices)]
        if capacity_tokens is not None:
            limits = replace(limits, capacity_tokens=min(capacity_tokens, limits.capacity_tokens))
        self.tally.degrees.append((self.now_s, len(devices), len(devices)))
        return SimInstance(devices, limits, c.pricing, c.page_size, self.records, self.tally, c.launches_ahead)

    # Executor

    def snapshot(self) -> ClusterView:
        """Return the state of the host, in the form that policies use."""
        c, now_s = self.config, self.now_s
        self.placements.count_rooms()
        return ClusterView(
            now_s,
            tuple([view_of(instance, now_s, c.shows_timing) for instance in self.instances]),
            tuple([waiting.request for waiting in self.queue.values()]),
            c.limits,
            c.num_devices,
            c.base_degree,
            c.page_size,
            c.max_model_len,
            timing=self.timings.take(self.instances) if c.shows_timing else Timing(),
            layer=None if c.layers is None else c.layers.sizes,
            devices=() if c.layers is None else self.placements.devices(),
        )

    def apply(self, action: Action) -> Outcome:
        """Start an action of a policy, or refuse it. Return the outcome. A refused action changes nothing.

        The outcome of a refused action has the reason. If the configuration is strict, a refusal raises
        `ForbiddenActionError` instead.
        """
        if (problem := invalid(action)) is not None:
            return Outcome(False, problem)
        try:
            match action:
                case Dispatch(request_id, instance_id):
                    self._dispatch(request_id, self._find(instance_id))
                case Reject(request_id, kind):
                    self._end_waiting(self._waiting(request_id), _ENDINGS[kind])
                case Preempt(request_id):
                    self._preempt_action(request_id)
                case ScaleUp(devices):
                    self._check_spread(devices)
                    self.changes.scale_up(action)
                case ScaleDown(devices):
                    self._check_spread(devices)
                    self.changes.scale_down(action)
                case Offload(request_id):
                    self._offload(request_id)
                case LimitBatch(instance_id, size):
                    self._limit_batch(self._find(instance_id), size)
                case _:
                    self.placements.start(action)
        except Refusal as refusal:
            if self.config.strict:
                raise ForbiddenActionError(f"{refusal}: {action}") from None
            return Outcome(False, str(refusal))
        if self._keep_log:
            self.log.append((self.now_s, action))
        return Outcome(True)

    def _find(self, instance_id: int) -> SimInstance:
        for instance in self.instances:
            if instance.devices[0] == instance_id:
                return instance
        raise Refusal(f"there is no instance {instance_id}")

    def _check_spread(self, devices: tuple[int, ...]) -> None:
        self.placements.check_group([i for i in self.instances if not set(devices).isdisjoint(i.devices)])

    def _waiting(self, request_id: str) -> Waiting:
        if request_id not in self.queue:
            raise Refusal(f"there is no such request {request_id!r}")
        return self.queue[request_id]

    def _dispatch(self, request_id: str, instance: SimInstance) -> None:
        waiting = self._waiting(request_id)
        request = waiting.request
        self.placements.count_rooms()
        _check_room(instance, request, self.now_s)
        del self.queue[request_id]
        if waiting.offloaded is not None:
            self._bring_back(waiting, instance)
            return
        blocks = self.prompt_blocks(waiting.index)
        run = Run(request, waiting.index, waiting.output_left, waiting.last_token_s, blocks)
        run.added_s, run.queued_s = self.now_s, request.waited_s(self.now_s)
        self.records.waited_s[waiting.index] += self.now_s - waiting.since_s
        if math.isnan(self.records.dispatch_s[waiting.index]):
            self.records.dispatch_s[waiting.index] = self.now_s
        instance.add(run)
        self._home[request_id] = instance
        self.disturb(instance)

    def disturb(self, instance: SimInstance) -> None:
        """Plan the next steps of an instance anew, after a change such as a new request.

        If a step is running, drop all later steps. New steps are planned at the end of the running step. If the
        instance is idle, plan new steps now.
        """
        if instance.block is None:
            self.begin(instance)
        elif instance.cut(self.now_s):
            self._reschedule(instance, instance.block.end_s)

    # Steps

    def begin(self, instance: SimInstance) -> None:
        """Plan the next steps of an idle instance. If KV pages are missing, first preempt requests.

        If the time `instance.ready_s` has not come yet, plan the steps at that time instead.
        """
        if self.now_s < instance.ready_s:
            self._reschedule(instance, instance.ready_s)
            return
        if instance.spread is not None:
            self.placements.count_rooms()
            self.placements.crowd(instance)
        while instance.change is None and pages_short(instance):
            self.preempt(*next_victim(instance))
            self.placements.count_rooms()
        _crowd(instance, self.instances)
        block = instance.begin(self.now_s)
        if block is not None:
            self._reschedule(instance, block.end_s)

    def end_block(self, instance: SimInstance) -> bool:
        """Process the steps of an instance that have just ended, and plan the next steps.

        Return whether the scheduler must decide now. This is the case if a request, merge or split has ended, or if a
        merge has started.
        """
        finished = instance.end_block(self.now_s)
        for run in finished:
            self.finish(run, Ending.COMPLETED)
        changed = bool(finished)
        if instance.change is not None and instance.change.left <= 0:
            self.changes.end(instance)
            return True
        if self.handovers is not None:
            self.handovers.take(instance)
        if instance in self.instances and instance.block is None:
            self.begin(instance)
        return self.changes.proceed() or changed

    def forget(self, run: Run) -> None:
        """Record that a request is no longer on an instance."""
        self._home.pop(run.request.request_id, None)

    def finish(self, run: Run, ending: Ending) -> None:
        """Record the end of a request that ran. Its instance must have removed the request already."""
        self.forget(run)
        self._end(run.index, ending)

    def refuse(self, index: int) -> None:
        """Record that a request is refused at arrival, because it is longer than the context of the model."""
        self._end(index, Ending.NEVER_FITS)

    def _end(self, index: int, ending: Ending) -> None:
        self.records.end_s[index] = self.now_s + (self.config.pricing.latency_s if ending is Ending.COMPLETED else 0.0)
        self.records.ending[index] = ending
        if self.on_end is not None:
            self.on_end(index)

    def _end_waiting(self, waiting: Waiting, ending: Ending) -> None:
        del self.queue[waiting.request.request_id]
        self.records.waited_s[waiting.index] += self.now_s - waiting.since_s
        self._end(waiting.index, ending)

    def expire(self, request_id: str) -> bool:
        """End a running request whose deadline has passed. Return whether the request was running.

        If the request waits, return False. The scheduler then rejects the request.
        """
        instance = self._home.get(request_id)
        if instance is None:
            return False
        self._between_steps(instance)
        if (run := instance.runs.get(request_id)) is None:
            return False  # The step that has just ended generated the last token.
        instance.remove(run)
        self.finish(run, Ending.DEADLINE)
        count_rooms(self.instances)
        return True

    # Preemption

    def _take_off(self, request_id: str) -> tuple[SimInstance, Run | None]:
        """Prepare the removal of a request: process the ended steps of its instance.

        Raises `Refusal` if there is no such request, or if its instance merges or splits. Return `(instance, request)`.
        The request is None if it finished in the ended steps.
        """
        instance = self._home.get(request_id)
        if instance is None:
            raise Refusal(f"there is no such request {request_id!r}")
        if instance.change is not None:
            raise Refusal(f"instance {instance.devices[0]} is being transformed")
        self._between_steps(instance)
        return instance, instance.runs.get(request_id)

    def _preempt_action(self, request_id: str) -> None:
        instance, run = self._take_off(request_id)
        if run is not None:
            self.preempt(instance, run)
        self.changes.proceed()

    def _between_steps(self, instance: SimInstance) -> None:
        """Process the ended steps of an instance, and finish requests whose last step has ended.

        Requests can be removed afterwards. The running step continues.
        """
        block = instance.block
        if block is None:
            return
        running = block.rest(self.now_s)
        block.steps -= 1 if running is not None else 0
        finished = instance.end_block(self.now_s if running is None else running.start_s)
        for run in finished:
            self.finish(run, Ending.COMPLETED)
        instance.block = running
        instance.version += 1
        self._reschedule(instance, self.now_s if running is None else running.end_s)

    def preempt(self, instance: SimInstance, run: Run) -> None:
        """Remove a request and its KV pages from an instance, and put the request back into the queue.

        The caller must first process all ended steps (`_between_steps`).
        """
        self._requeue(instance, run, run.waiting_again(instance.steps, self.now_s))
        self.num_preempted += 1
        self.records.preemptions[run.index] += 1

    def _requeue(self, instance: SimInstance, run: Run, request: WaitingRequest) -> None:
        instance.remove(run)
        self.forget(run)
        last_s = self.now_s if run.base else run.last_token_s
        self.queue[request.request_id] = Waiting(
            request, run.index, run.left(instance.steps), self.now_s, last_token_s=last_s
        )
        count_rooms(self.instances)

    # Offload and limits

    def _limit_batch(self, instance: SimInstance, size: int | None) -> None:
        if instance.change is not None or instance.paused:
            raise Refusal(f"instance {instance.devices[0]} is being transformed, or requests are paused there")
        instance.batch_limit = size
        instance.max_requests = min(size or instance.limits.max_requests, instance.limits.max_requests)

    def _offload(self, request_id: str) -> None:
        """Move the KV pages of a decoding request to host memory, and put the request back into the queue.

        A request whose prompt is not computed yet is preempted instead.
        """
        instance, run = self._take_off(request_id)
        if run is None:
            return
        if not run.base:
            self.preempt(instance, run)
            return
        waiting = replace(run.waiting_again(instance.steps, self.now_s), offloaded=True)
        self._requeue(instance, run, waiting)
        self.queue[request_id].offloaded = (run, instance.steps)
        self._copy_to_host(instance, waiting.prompt_tokens)

    def _bring_back(self, waiting: Waiting, instance: SimInstance) -> None:
        """Continue an offloaded request on an instance, after its KV pages have been copied from host memory."""
        assert waiting.offloaded is not None, "the pages of the request are in host memory"
        (run, steps), name = waiting.offloaded, waiting.request.request_id
        ready_s = drained_s(self, instance)
        take_in(self, instance)
        instance.ready_s = max(instance.ready_s, ready_s)
        self._copy_to_host(instance, waiting.request.prompt_tokens)
        self.records.waited_s[waiting.index] += self.now_s - waiting.since_s
        self.tally.add_gaps(self.now_s - waiting.since_s, 1)
        run.queued_s = waiting.request.waited_s(self.now_s)
        instance.take_over({name: run}, steps)
        self.rehome(instance)
        self.begin(instance)

    def _copy_to_host(self, instance: SimInstance, tokens: int) -> None:
        """Delay an instance's next step while the KV pages of `tokens` tokens are copied to or from host memory."""
        if (cost := self.config.layers) is not None:
            num_bytes = tokens * cost.sizes.kv_token_bytes * cost.sizes.num_layers
            start_s = self.now_s if instance.block is None else instance.block.end_s
            instance.ready_s = max(instance.ready_s, start_s) + num_bytes / cost.host_rate

    def fail_device(self, device: int, down_s: float) -> None:
        """Simulate the failure of a device. All instances that compute on it lose their KV cache and prefix cache.

        The running and paused requests of these instances are preempted. The instances accept no requests for `down_s`
        seconds. A running merge or split of these instances starts again with the first layer.
        """
        for instance in self.instances:
            if device in (instance.devices if instance.spread is None else instance.spread.devices):
                self._fail(instance, down_s)

    def _fail(self, instance: SimInstance, down_s: float) -> None:
        if (change := instance.change) is not None and not change.fails:
            change.left = change.total  # The transformation starts again.
        self._between_steps(instance)
        for each in (instance, *instance.paused):
            for run in list(each.runs.values()):
                self.preempt(each, run)
            each.prefixes.shrink(0)
        self.changes.proceed()
        instance.down_until_s = self.now_s + down_s if down_s else -1.0

    def replace(self, old: list[SimInstance], new: list[SimInstance]) -> None:
        """Replace instances by new instances on the same devices. The new instances must already have the requests."""
        self.tally.degrees += [(self.now_s, i.degree, -i.degree) for i in old]
        kept = [i for i in self.instances if i not in old]
        self.instances = sorted([*kept, *new], key=lambda i: i.devices[0])
        for instance in new:
            self.rehome(instance)
        self.placements.count_capacities()

    def rehome(self, instance: SimInstance) -> None:
        """Record that `instance` now runs the requests in `instance.runs`. Call this after requests have moved."""
        for name in instance.runs:
            self._home[name] = instance


def limit_of(executor: SimExecutor) -> Limit | None:
    """Return the resource that the first waiting request lacks, or None if no request waits."""
    if not executor.queue:
        return None
    request = next(iter(executor.queue.values())).request
    if all(instance.capacity_tokens < request.max_total_tokens for instance in executor.instances):
        return Limit.DEGREE
    full = all(len(instance.runs) >= instance.max_requests for instance in executor.instances)
    return Limit.SLOTS if full else Limit.CACHE


def _check_room(instance: SimInstance, request: WaitingRequest, now_s: float) -> None:
    """Raise `Refusal` with the reason if a request cannot start on an instance now."""
    name, size, change = instance.devices[0], instance.page_size, instance.change
    needs, used = -(-request.prompt_tokens // size) * size, instance.used_tokens()
    if instance.waits_for is not None or (change is not None and change.fails):
        raise Refusal(f"instance {name} is being transformed")
    capacity = instance.capacity_tokens if change is None else change.lane_tokens
    if capacity < request.max_total_tokens:
        raise Refusal(f"instance {name} holds {capacity} tokens, but the request needs {request.max_total_tokens}")
    if needs > (instance.room_tokens - used if change is None else change.joinable_tokens(instance, used)):
        raise Refusal(f"instance {name} has no room for {request.prompt_tokens} tokens now")
    if len(instance.runs) >= instance.max_requests:
        raise Refusal(f"instance {name} has no slot: it runs {len(instance.runs)} requests")
    if now_s < instance.down_until_s:
        raise Refusal(f"instance {name} is out of service")


def _crowd(instance: SimInstance, instances: list[SimInstance]) -> None:
    """Update `slowdown` and `prompt_slowdown` of an instance. Without measurements of the slowdown, change nothing."""
    pricing = instance.pricing
    if pricing.crowding:
        busy = sum(other.block is not None for other in instances if other is not instance) + 1
        instance.slowdown, instance.prompt_slowdown = pricing.slowdown(busy), pricing.slowdown(busy, prompts=True)
