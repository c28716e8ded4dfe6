"""Policies in virtual time, on a simulated host that raises on forbidden actions."""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from serving.scheduler import Action, DegreeLimits, Outcome, Policy, Preempt, Scheduler, WaitingRequest
from serving.simulator.batching import TokenBudget
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.faults import Faults
from serving.simulator.host_config import HostConfig, Waiting
from serving.simulator.instance import SimInstance
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.router import OneHost
from serving.simulator.sim_executor import SimExecutor
from serving.simulator.step_cost import RateStepCost
from serving.simulator.tally import Ending, Records, Tally
from serving.simulator.transformation_cost import FixedTransformation

Arrivals = list[tuple[WaitingRequest, int]]
"""Requests with their numbers of output tokens."""
RATES = RateStepCost(
    prefill={1: 4_000, 2: 7_000, 4: 12_000}, decode={1: 400, 2: 560, 4: 688}, decode_each={1: 25, 2: 33, 4: 40}
)
"""Four TP1 instances together generate 1600 tokens/s. One TP4 instance generates 688, 57% less, as in Gyges' paper.
Prompts and decodes share steps."""
TRANSFORMATION_S, LAYERS = 1.0, 10
PREEMPTION_S = 1e-3
"""Delay of the next decision after a preemption."""


def host_config(degrees: tuple[DegreeLimits, ...], num_devices: int = 8, shows_timing: bool = False) -> HostConfig:
    """Return a host of TP1 instances."""
    return HostConfig(
        num_devices,
        tuple(limits for limits in degrees if limits.degree <= num_devices),
        Pricing(RATES, TokenBudget(512)),
        FixedTransformation(TRANSFORMATION_S, LAYERS),
        (1,) * num_devices,
        shows_timing=shows_timing,
        strict=True,
    )


@dataclass(frozen=True)
class PolicyRun:
    """Result of a policy's run. The names of requests are the keys of times."""

    cluster: Cluster

    @property
    def executor(self) -> SimExecutor:
        return self.cluster.hosts[0].executor

    @property
    def scheduler(self) -> Scheduler:
        return self.cluster.hosts[0].scheduler

    @property
    def first_token_s(self) -> dict[str, float]:
        """Times of the first tokens."""
        requests = self.cluster.requests
        times = enumerate(self.cluster.records.first_token_s)
        return {requests.name(index): time_s for index, time_s in times if not math.isnan(time_s)}

    @property
    def finished_s(self) -> dict[str, float]:
        """Times at which requests completed."""
        records, requests = self.cluster.records, self.cluster.requests
        done = (index for index, ending in enumerate(records.ending) if ending == Ending.COMPLETED)
        return {requests.name(index): records.end_s[index] for index in done}

    def count(self, *kinds: type[Action]) -> int:
        """Count the accepted actions of some kinds."""
        return sum(isinstance(action, kinds) for _, action in self.executor.log)

    def generated_tokens(self) -> int:
        """Return the output tokens of completed requests."""
        ended = np.array(self.cluster.records.ending) == Ending.COMPLETED
        return int(self.cluster.requests.output_len[ended].sum())


def table_of(arrivals: Arrivals) -> RequestTable:
    """Return requests as columns, in order of arrival."""
    ordered = sorted(arrivals, key=lambda arrival: arrival[0].arrival_s)
    requests = [request for request, _ in ordered]
    return RequestTable(
        np.array([r.arrival_s for r in requests]),
        np.array([r.prompt_tokens for r in requests]),
        np.array([output for _, output in ordered]),
        np.array([r.max_total_tokens - r.prompt_tokens for r in requests]),
        np.zeros(len(requests), int),
        priority=np.array([r.priority for r in requests]),
        names=[r.request_id for r in requests],
    )


def simulate(
    policy: Policy,
    arrivals: Arrivals,
    until_s: float,
    degrees: tuple[DegreeLimits, ...],
    num_devices: int = 8,
    shows_timing: bool = False,
    fail_transformations: int = 0,
) -> PolicyRun:
    """Serve requests with a policy until `until_s`. A forbidden action raises `ForbiddenActionError`."""
    config = host_config(degrees, num_devices, shows_timing)
    faults = Faults(transformations=fail_transformations)
    cluster = Cluster([(config, lambda: policy)], table_of(arrivals), OneHost(), faults, keep_log=True)
    cluster.run(LoopConfig(until_s))
    return PolicyRun(cluster)


class DrivenHost:
    """A host whose time a test advances. It also accepts transformations from an operator."""

    def __init__(self, config: HostConfig, policy: Policy, most_requests: int = 1_000):
        self.records, self._events = Records(most_requests), []
        self._numbers = itertools.count()
        self._names: list[str] = []
        self.executor = SimExecutor(config, self.records, Tally(1.0), self._reschedule, keep_log=True)
        self.scheduler = Scheduler(policy, self.executor)

    @property
    def now_s(self) -> float:
        return self.executor.now_s

    def _reschedule(self, instance: SimInstance, end_s: float) -> None:
        heapq.heappush(self._events, (end_s, next(self._numbers), instance, instance.version))

    def send(self, request: WaitingRequest, output: int) -> None:
        """Queue a request that will generate `output` tokens."""
        self.executor.queue[request.request_id] = Waiting(request, len(self._names), output, self.now_s)
        self._names.append(request.request_id)

    def ask(self, action: Action) -> Outcome:
        """Apply an operator's action. An impossible action is refused, as in an engine."""
        executor, config = self.executor, self.executor.config
        executor.config = replace(config, strict=False)
        try:
            return executor.apply(action)
        finally:
            executor.config = config

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """Advance time, with a decision after each event and each second."""
        executor, not_before_s = self.executor, -1.0
        while self.now_s < until_s and not done():
            if self.now_s >= not_before_s:
                decisions = self.scheduler.tick()
                preempted = any(isinstance(d.action, Preempt) for d in decisions)
                not_before_s = self.now_s + PREEMPTION_S if preempted else -1.0
            failing = [at_s for at_s, _ in executor.changes.failing]
            times_s = [until_s, self.now_s + 1.0, *failing, *(entry[0] for entry in self._events[:1])]
            if not_before_s > self.now_s:
                times_s.append(not_before_s)
            executor.now_s = max(min(times_s), self.now_s)
            executor.changes.end_failed()
            while self._events and self._events[0][0] <= self.now_s:
                _, _, instance, version = heapq.heappop(self._events)
                if instance.version != version:
                    continue
                if instance.block is not None:
                    executor.end_block(instance)
                elif instance in executor.instances:
                    executor.begin(instance)

    def ended(self, *endings: Ending) -> set[str]:
        """Return the names of requests that ended in one of these ways."""
        return {name for name, ending in zip(self._names, self.records.ending, strict=False) if ending in endings}
