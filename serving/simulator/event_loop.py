"""Event loop of a simulation, in virtual time, for one or more simulated hosts.

A host is a scheduler with its devices. A tick is a decision of a scheduler. A block is a series of similar steps of an
instance (`block.Block`), and the simulator plans all steps of a block at once. Examples of events are an arrival, a
deadline, a failure, a tick, and the end of a block.
"""

import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from serving.scheduler import (
    AmoebaPolicy,
    LeastLoadFirstPolicy,
    Offload,
    Policy,
    Preempt,
    RoundRobinPolicy,
    Scheduler,
    StaticPolicy,
)
from serving.simulator.faults import Faults
from serving.simulator.host_config import HostConfig, Waiting
from serving.simulator.instance import SimInstance
from serving.simulator.requests import RequestTable
from serving.simulator.router import Router
from serving.simulator.sim_executor import SimExecutor, limit_of
from serving.simulator.tally import Limit, Records, Tally

TICK_S = 1.0
"""Seconds from one tick to the next if no event happens, as in `EngineScheduler.interval_s`."""
IDLE_TICK_S = 5.0
"""Seconds between ticks of a host without waiting requests, if there are several hosts. It replaces `TICK_S`.

A large cluster needs fewer ticks, but merged instances may split up to 4 s later.
"""
_AGAIN_S = 1e-3
"""Seconds from a tick that preempted, paused or resumed requests to the next tick."""
_TIMELESS: tuple[type, ...] = (AmoebaPolicy, LeastLoadFirstPolicy, RoundRobinPolicy, StaticPolicy)
"""Policies that need no ticks while no request waits and no instance is merged."""
_BLOCK, _TICK, _DEADLINE, _FAULT, _FAILED, _PLACED, _HANDOVER = range(7)

Progress = Callable[[float, float], None]
"""Callback that receives the virtual time in seconds, and the share of requests that have arrived (0 to 1)."""


@dataclass(frozen=True)
class LoopConfig:
    """Limits at which a simulation stops."""

    until_s: float | None = None
    """Virtual seconds to simulate. None: until all requests have ended."""
    drain_s: float = 3600.0
    """Maximum virtual seconds to simulate after the last arrival, if `until_s` is None."""
    queue_limit: int | None = None
    """Maximum number of waiting requests of a host. The simulation stops if a host has more. None: no limit."""


class Host:
    """Group of devices with one scheduler.

    Attributes:
        next_tick_s: time of the scheduler's next decision (tick). Infinite: no tick is planned.
        not_before_s: earliest time of the next tick.
        limit: resource that waiting requests have lacked since `limit_since_s`. None: no request waits.
        idle_ticks: whether the policy needs ticks even if no request waits and no instance is merged.
    """

    __slots__ = (
        "executor", "idle_ticks", "index", "limit", "limit_since_s", "next_tick_s", "not_before_s", "scheduler",
    )  # fmt: skip

    def __init__(self, index: int, executor: SimExecutor, scheduler: Scheduler):
        self.index, self.executor, self.scheduler = index, executor, scheduler
        self.next_tick_s = math.inf
        self.not_before_s = -1.0
        self.limit: Limit | None = None
        self.limit_since_s = 0.0
        self.idle_ticks = not isinstance(scheduler.policy, _TIMELESS)

    @property
    def is_quiet(self) -> bool:
        """Whether the host can wait for its next event without a tick (decision of the scheduler)."""
        executor = self.executor
        if executor.queue or self.idle_ticks:
            return False
        base = executor.config.base_degree
        return not [i for i in executor.instances if i.degree > base or i.change is not None]


class Cluster:
    """Simulated hosts that serve a table of requests.

    Args:
        hosts: pair (configuration, function that returns the policy) for each host.
        router: rule that chooses the host of each request.
        faults: failures to inject. Devices are numbered over all hosts.
        bin_s: width of the bins of `Tally.tokens_per_bin` in seconds.
        keep_log: whether `SimExecutor.log` records actions.

    Attributes:
        now_s: virtual time in seconds.
        records: times of each request.
        tally: sums over all requests.
        overloaded: whether `LoopConfig.queue_limit` stopped the run.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[HostConfig, Callable[[], Policy]]],
        requests: RequestTable,
        router: Router,
        faults: Faults | None = None,
        bin_s: float = 1.0,
        keep_log: bool = False,
    ):
        self.requests, self.router = requests, router
        self.records, self.tally = Records(len(requests)), Tally(bin_s)
        self.now_s = 0.0
        self._events: list[tuple] = []
        """Heap of `(time in seconds, count, kind, host, *arguments)`. The count keeps events of equal time in order."""
        self._count = 0
        self.overloaded = False
        self._ended = 0
        self._next = 0
        self.hosts = [self._host(index, config, make(), keep_log) for index, (config, make) in enumerate(hosts)]
        firsts = [0, *accumulate(config.num_devices for config, _ in hosts)]
        for fault in (faults or Faults()).devices:
            index = bisect_right(firsts, fault.device) - 1
            self._push(fault.at_s, _FAULT, self.hosts[index], fault.device - firsts[index], fault.down_s)
        for host in self.hosts:
            host.executor.failing_transformations = (faults or Faults()).transformations

    def _host(self, index: int, config: HostConfig, policy: Policy, keep_log: bool) -> Host:
        def reschedule(instance: SimInstance, end_s: float) -> None:
            self._push(end_s, _BLOCK, host, instance, instance.version)

        executor = SimExecutor(config, self.records, self.tally, reschedule, keep_log)
        executor.prompt_blocks = self.requests.prompt_blocks
        executor.on_end = self._on_end
        host = Host(index, executor, Scheduler(policy, executor))
        return host

    def _push(self, at_s: float, kind: int, host: Host, *more: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, kind, host, *more))

    def _on_end(self, index: int) -> None:
        self._ended += 1
        self.router.ended(index, self.requests)

    # The loop

    def run(self, config: LoopConfig | None = None, progress: Progress | None = None) -> None:
        """Simulate until all requests have ended, or until a limit of `config` is reached. Call this method only once.

        Results are in `records` and `tally`. `progress` is a function that receives the virtual time in seconds and the
        share of requests that have arrived.
        """
        config = config or LoopConfig()
        arrivals, total = array("d", self.requests.arrival_s), len(self.requests)
        last_s = self.requests.span_s
        end_s = last_s + config.drain_s if config.until_s is None else config.until_s
        events, dirty, since = self._events, {}, 0
        for host in self.hosts:
            if host.idle_ticks:
                self._plan_tick(host, 0.0)
        while True:
            arrival_s = arrivals[self._next] if self._next < total else math.inf
            event_s = events[0][0] if events else math.inf
            now_s = min(arrival_s, event_s)
            if now_s > end_s or (config.until_s is None and self._ended == total and self._next == total):
                break
            self.now_s = now_s
            while events and events[0][0] <= now_s:
                event = heapq.heappop(events)
                self.tally.events += 1
                host = event[3]
                host.executor.now_s = now_s
                if self._handle(event, host):
                    dirty[host.index] = host
            while self._next < total and arrivals[self._next] <= now_s:
                host = self._arrive(self._next, now_s)
                dirty[host.index] = host
                self._next += 1
                self.tally.events += 1
            for host in dirty.values():
                self._tick(host, now_s)
            if config.queue_limit is not None and any(
                len(host.executor.queue) > config.queue_limit for host in dirty.values()
            ):
                self.overloaded = True
                break
            dirty.clear()
            if progress is not None and (since := since + 1) >= 2000:
                since = 0
                progress(now_s, self._next / total)
        if config.until_s is not None and not self.overloaded:
            self.now_s = end_s
        self._close()

    def _handle(self, event: tuple, host: Host) -> bool:
        """Process an event. Return whether the scheduler of the host must decide now."""
        kind, executor = event[2], host.executor
        if kind == _BLOCK:
            instance, version = event[4], event[5]
            if instance.version != version:
                return False
            if instance.block is None:
                if instance in executor.instances:
                    executor.begin(instance)
                return bool(executor.queue)
            changed = executor.end_block(instance)
            self._plan_handovers(host)
            return changed and not host.is_quiet
        if kind == _TICK:
            due = host.next_tick_s <= event[0]
            if due:
                host.next_tick_s = math.inf
            return due
        if kind == _DEADLINE:
            return executor.expire(event[4]) and not host.is_quiet
        if kind == _FAULT:
            executor.fail_device(event[4], event[5])
            if event[5]:
                self._push(event[0] + event[5], _FAILED, host)
            return True
        if kind == _PLACED:
            executor.placements.proceed()
            self._plan_placements(host)
            return True
        if kind == _HANDOVER:
            handovers = executor.handovers
            assert handovers is not None, "it planned this event"
            handovers.proceed()
            self._plan_handovers(host)
            return bool(executor.queue)
        executor.changes.end_failed()
        return True

    def _plan_handovers(self, host: Host) -> None:
        if (handovers := host.executor.handovers) is not None:
            for at_s in handovers.new_times:
                self._push(at_s, _HANDOVER, host)
            handovers.new_times.clear()

    def _plan_placements(self, host: Host) -> None:
        for at_s in host.executor.placements.take_new_times():
            self._push(at_s, _PLACED, host)

    def _arrive(self, index: int, now_s: float) -> Host:
        requests = self.requests
        host = self.hosts[self.router.choose(index, requests)]
        host.executor.now_s = now_s
        request = requests.waiting(index)
        if requests.max_model_len is not None and request.max_total_tokens > requests.max_model_len:
            host.executor.refuse(index)
            return host
        host.executor.queue[request.request_id] = Waiting(request, index, int(requests.output_len[index]), now_s)
        if request.deadline_s is not None:
            self._push(request.deadline_s, _DEADLINE, host, request.request_id)
        return host

    def _tick(self, host: Host, now_s: float) -> None:
        executor = host.executor
        executor.now_s = now_s
        if now_s < host.not_before_s:
            if host.next_tick_s > host.not_before_s:
                self._plan_tick(host, host.not_before_s)
            return
        failing, regroups = len(executor.changes.failing), len(self.tally.regroups)
        decisions = host.scheduler.tick()
        for at_s, _ in executor.changes.failing[failing:]:
            self._push(at_s, _FAILED, host)
        self._plan_placements(host)
        preempted = any(isinstance(d.action, (Preempt, Offload)) for d in decisions)
        host.not_before_s = now_s + _AGAIN_S if preempted else -1.0
        self._count_limit(host, now_s)
        if host.is_quiet:
            host.next_tick_s = math.inf
        elif len(self.tally.regroups) > regroups or preempted:
            self._plan_tick(host, now_s + _AGAIN_S)
        else:
            wait_s = TICK_S if executor.queue or len(self.hosts) == 1 else IDLE_TICK_S
            if host.next_tick_s <= now_s or host.next_tick_s > now_s + wait_s:
                self._plan_tick(host, now_s + wait_s)

    def _count_limit(self, host: Host, now_s: float) -> None:
        """Add the time since the last call to `Tally.limited_s`, for the resource that was recorded by that call.

        Then record the resource that waiting requests lack now, for the next call.
        """
        limited_s = self.tally.limited_s
        if host.limit is not None:
            limited_s[host.limit] = limited_s.get(host.limit, 0.0) + now_s - host.limit_since_s
        host.limit, host.limit_since_s = limit_of(host.executor), now_s

    def _plan_tick(self, host: Host, at_s: float) -> None:
        host.next_tick_s = at_s
        self._push(at_s, _TICK, host)

    def _close(self) -> None:
        """Complete `tally` and `records` at the end of the simulation.

        Add the ended steps of each running block, and the waiting times of the requests that are still in queues.
        """
        for host in self.hosts:
            self._count_limit(host, self.now_s)
            executor = host.executor
            for instance in executor.instances:
                if instance.block is not None:
                    block = instance.block
                    block.steps = block.done(self.now_s)
                    instance.end_block(block.end_s)
            for waiting in executor.queue.values():
                self.records.waited_s[waiting.index] += self.now_s - waiting.since_s
