"""Simulated host: instances and a queue, which the scheduler controls through its `Executor` protocol."""

import math
from collections.abc import Callable
from dataclasses import replace

from serving.scheduler import (
    Action,
    ClusterView,
    Dispatch,
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
from serving.simulator.group_changes import GroupChanges
from serving.simulator.host_config import ForbiddenActionError, HostConfig, Refusal, Waiting
from serving.simulator.instance import SimInstance, pages_short, view_of
from serving.simulator.pauses import count_rooms, next_victim
from serving.simulator.prefix_store import PromptBlocks
from serving.simulator.run import Run
from serving.simulator.sim_timing import SimTimings
from serving.simulator.tally import Ending, Records, Tally

_ENDINGS = {
    RejectKind.NEVER_FITS: Ending.NEVER_FITS,
    RejectKind.DEADLINE: Ending.DEADLINE,
    RejectKind.QUEUE_FULL: Ending.QUEUE_FULL,
}


Reschedule = Callable[[SimInstance, float], None]


class SimExecutor:
    """`Executor` over simulated instances.

    The event loop sets `now_s`, and calls `end_block` at the end of each block (a series of steps, `block.Block`).

    Args:
        reschedule: callback for a new or changed block. It receives the instance and the end of the block in seconds.

    Attributes:
        queue: waiting requests by id.
        log: accepted actions with their times in seconds; empty without `keep_log`.
        failing_transformations: number of transformations that will still fail, counted down.
        changes: running and waiting transformations.
        timings: measured times of steps and transformations.
        prompt_blocks: function from the row of a request to the cacheable blocks of its prompt; None if unknown.
        on_end: callback that receives the row of each request that ends.
    """

    def __init__(
        self, config: HostConfig, records: Records, tally: Tally, reschedule: Reschedule, keep_log: bool = False
    ):
        self.config, self.records, self.tally = config, records, tally
        self.now_s = 0.0
        self.queue: dict[str, Waiting] = {}
        self.failing_transformations = 0
        self.changes = GroupChanges(self)
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

    def new_instance(self, devices: tuple[int, ...], capacity_tokens: int | None = None) -> SimInstance:
        """Return an instance without requests. The caller adds it to `instances`.

        Args:
            devices: devices of the instance; their number is its degree.
            capacity_tokens: upper limit of its capacity. None: the capacity of its degree.
        """
        c, limits = self.config, self.limits[len(devices)]
        if capacity_tokens is not None:
            limits = replace(limits, capacity_tokens=min(capacity_tokens, limits.capacity_tokens))
        self.tally.degrees.append((self.now_s, len(devices), len(devices)))
        return SimInstance(devices, limits, c.pricing, c.page_size, self.records, self.tally, c.launches_ahead)

    # Executor

    def snapshot(self) -> ClusterView:
        """Return the state of the host, as policies see it."""
        c, now_s = self.config, self.now_s
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
        )

    def apply(self, action: Action) -> Outcome:
        """Start an action, and return its outcome. If the action is refused, nothing changes.

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
                case ScaleUp():
                    self.changes.scale_up(action)
                case ScaleDown():
                    self.changes.scale_down(action)
                case _:
                    return Outcome(False, f"the simulator does not support {action}")
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

    def _waiting(self, request_id: str) -> Waiting:
        if request_id not in self.queue:
            raise Refusal(f"there is no such request {request_id!r}")
        return self.queue[request_id]

    def _dispatch(self, request_id: str, instance: SimInstance) -> None:
        waiting = self._waiting(request_id)
        request = waiting.request
        _check_room(instance, request, self.now_s)
        del self.queue[request_id]
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
        """Let the block of an instance end after the running step, so that the next step can differ.

        If the instance is idle, begin a block.
        """
        if instance.block is None:
            self.begin(instance)
        elif instance.cut(self.now_s):
            self._reschedule(instance, instance.block.end_s)

    # Steps

    def begin(self, instance: SimInstance) -> None:
        """Plan the next block of an idle instance. While pages are missing, preempt requests first.

        If the instance is not ready yet, only schedule another attempt at `ready_s`.
        """
        if self.now_s < instance.ready_s:
            self._reschedule(instance, instance.ready_s)
            return
        while instance.change is None and pages_short(instance):
            self.preempt(*next_victim(instance))
        _crowd(instance, self.instances)
        block = instance.begin(self.now_s)
        if block is not None:
            self._reschedule(instance, block.end_s)

    def end_block(self, instance: SimInstance) -> bool:
        """Process the end of a block, and begin the next block.

        Returns whether the scheduler must decide: a request or a transformation has ended, or a merge has started.
        """
        finished = instance.end_block(self.now_s)
        for run in finished:
            self.finish(run, Ending.COMPLETED)
        changed = bool(finished)
        if instance.change is not None and instance.change.left <= 0:
            self.changes.end(instance)
            return True
        if instance in self.instances:
            self.begin(instance)
        return self.changes.proceed() or changed

    def finish(self, run: Run, ending: Ending) -> None:
        """Record the end of a request that ran. Its instance has removed the request already."""
        self._home.pop(run.request.request_id, None)
        self._end(run.index, ending)

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
        """End a running request whose deadline has passed, and return whether there was one.

        The result is False if the request waits (the scheduler then rejects it) or has ended already.
        """
        instance = self._home.get(request_id)
        if instance is None:
            return False
        self._between_steps(instance)
        if (run := instance.runs.get(request_id)) is None:
            return False  # It generated its last token in the step that has just ended.
        instance.remove(run)
        self.finish(run, Ending.DEADLINE)
        count_rooms(self.instances)
        return True

    # Preemption

    def _preempt_action(self, request_id: str) -> None:
        instance = self._home.get(request_id)
        if instance is None:
            raise Refusal(f"there is no such request {request_id!r}")
        if instance.change is not None:
            raise Refusal(f"instance {instance.devices[0]} is being transformed")
        self._between_steps(instance)
        if request_id in instance.runs:
            self.preempt(instance, instance.runs[request_id])
        self.changes.proceed()

    def _between_steps(self, instance: SimInstance) -> None:
        """Process the steps of the block that have ended, including finished requests, so that requests can be removed.

        The running step continues as a block of its own.
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
        """Remove a request and its pages from an instance, and put the request back into the queue.

        The caller has processed all steps that have ended (`_between_steps`).
        """
        request = run.waiting_again(instance.steps, self.now_s)
        instance.remove(run)
        self._home.pop(run.request.request_id, None)
        self.num_preempted += 1
        self.records.preemptions[run.index] += 1
        last_s = self.now_s if run.base else run.last_token_s
        self.queue[request.request_id] = Waiting(
            request, run.index, run.left(instance.steps), self.now_s, last_token_s=last_s
        )
        count_rooms(self.instances)

    def fail_device(self, device: int, down_s: float) -> None:
        """Preempt all running and paused requests on the instance of a device, and empty its prefix cache.

        The instance accepts no requests for `down_s` seconds. A running transformation of the instance starts again
        with all layers.
        """
        instance = next(i for i in self.instances if device in i.devices)
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
        """Replace instances by other instances on the same devices. The new instances have the requests already."""
        self.tally.degrees += [(self.now_s, i.degree, -i.degree) for i in old]
        kept = [i for i in self.instances if i not in old]
        self.instances = sorted([*kept, *new], key=lambda i: i.devices[0])
        for instance in new:
            for name in instance.runs:
                self._home[name] = instance


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
    """Set the slowdown of an instance by other busy instances on the same processor, if it was measured."""
    pricing = instance.pricing
    if pricing.crowding:
        busy = sum(other.block is not None for other in instances if other is not instance) + 1
        instance.slowdown, instance.prompt_slowdown = pricing.slowdown(busy), pricing.slowdown(busy, prompts=True)
