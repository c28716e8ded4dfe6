"""An executor with a virtual clock: requests are served at given rates, and transformations take their time.

A tool for tests of policies, not a model of a machine: rates are constant between two events.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from serving.scheduler import (
    Action,
    ClusterView,
    DegreeLimits,
    Dispatch,
    InstanceView,
    Outcome,
    Policy,
    Preempt,
    Reject,
    RejectKind,
    RunningRequest,
    ScaleDown,
    ScaleUp,
    Scheduler,
    Timing,
    WaitingRequest,
)


@dataclass(frozen=True)
class ServiceRates:
    """Speed of an instance by degree, in tokens a second.

    Four TP1 instances generate 1600 tokens a second together, one TP4 instance 688: 57% less, the loss that Gyges'
    paper reports.
    """

    prefill: dict[int, float] = field(default_factory=lambda: {1: 4_000.0, 2: 7_000.0, 4: 12_000.0})
    decode: dict[int, float] = field(default_factory=lambda: {1: 400.0, 2: 560.0, 4: 688.0})
    """Of all its requests together."""
    decode_each: dict[int, float] = field(default_factory=lambda: {1: 25.0, 2: 33.0, 4: 40.0})
    """Of one request, at most."""
    transformation_s: float = 1.0
    transforming_speed: float = 0.8
    """Share of the lower degree's decode speed that is left meanwhile. Prompts pause."""

    def timing(self) -> Timing:
        """What a policy would measure."""
        pairs = [(a, b) for a in self.decode for b in self.decode if a != b]
        steps_s = {degree: 1 / each for degree, each in self.decode_each.items()}
        return Timing(steps_s, self.prefill, dict.fromkeys(pairs, self.transformation_s))


@dataclass
class _Run:
    request: WaitingRequest
    output_left: float
    prefill_left: float
    produced: float = 0.0
    queued_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_tokens + int(self.produced)


@dataclass(eq=False)
class _Instance:
    devices: tuple[int, ...]
    running: list[_Run] = field(default_factory=list)
    transition: ScaleUp | ScaleDown | None = None
    ends_s: float = math.inf
    speed_degree: int = 0
    """Degree whose speed it has while it changes."""


@dataclass
class SimulatedCluster:
    """Implements `Executor`. It is strict: what a policy must never ask for fails an assertion."""

    degrees: tuple[DegreeLimits, ...]
    num_devices: int = 8
    rates: ServiceRates = field(default_factory=ServiceRates)
    page_size: int = 16
    now_s: float = 0.0
    fail_transformations: int = 0
    """That many transformations end without effect."""
    shows_timing: bool = False
    """Snapshots tell what steps and transformations take."""
    queue: list[WaitingRequest] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    """Output tokens that each request will generate."""
    first_token_s: dict[str, float] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, RejectKind] = field(default_factory=dict)
    log: list[tuple[float, Action]] = field(default_factory=list)
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.instances = [_Instance((device,)) for device in range(self.num_devices)]
        self.capacity = {limits.degree: limits.capacity_tokens for limits in self.degrees}
        self.slots = {limits.degree: limits.max_requests for limits in self.degrees}

    # Executor

    def snapshot(self) -> ClusterView:
        instances = tuple(self._view(i) for i in sorted(self.instances, key=lambda i: i.devices))
        return ClusterView(
            self.now_s,
            instances,
            tuple(self.queue),
            self.degrees,
            self.num_devices,
            page_size=self.page_size,
            timing=self.rates.timing() if self.shows_timing else Timing(),
        )

    def _view(self, instance: _Instance) -> InstanceView:
        degree = len(instance.devices)
        running = tuple(
            RunningRequest(
                r.request.request_id,
                r.num_tokens,
                r.request.max_total_tokens,
                math.ceil(r.prefill_left),
                r.request.priority,
                r.request.arrival_s,
                queued_s=r.queued_s,
            )
            for r in instance.running
        )
        free = max(self.capacity[degree] - self._used(instance), 0)
        to = instance.transition.degree if instance.transition else None
        slots = self.slots[degree] - len(running)
        return InstanceView(instance.devices[0], instance.devices, self.capacity[degree], free, slots, running, to)

    def _used(self, instance: _Instance) -> int:
        return sum(-(-r.num_tokens // self.page_size) * self.page_size for r in instance.running)

    def apply(self, action: Action) -> Outcome:
        self.log.append((self.now_s, action))
        match action:
            case Dispatch(request_id, instance_id):
                request = self._take_waiting(request_id)
                instance = next(i for i in self.instances if i.devices[0] == instance_id)
                degree = len(instance.devices)
                assert instance.transition is None, "dispatched to an instance in transition"
                assert self._used(instance) + request.prompt_tokens <= self.capacity[degree], "no room"
                assert request.max_total_tokens <= self.capacity[degree], "too long for the instance"
                assert len(instance.running) < self.slots[degree], "no slot"
                run = _Run(request, self.outputs[request_id], request.prompt_tokens)
                run.queued_s = request.waited_s(self.now_s)
                instance.running.append(run)
            case Reject(request_id, kind):
                self.rejected[request_id] = kind
                self._take_waiting(request_id)
            case Preempt(request_id):
                instance = next(i for i in self.instances if request_id in {r.request.request_id for r in i.running})
                self._preempt(instance, next(r for r in instance.running if r.request.request_id == request_id))
            case ScaleUp(devices, degree):
                self._scale_up(action, devices, degree)
            case ScaleDown(devices, degree):
                (instance,) = [i for i in self.instances if i.devices == devices]
                assert instance.transition is None, "it is being transformed"
                self._begin(instance, action, degree)
            case _:
                return Outcome(False, "not simulated")
        return Outcome(True)

    def _take_waiting(self, request_id: str) -> WaitingRequest:
        request = next(r for r in self.queue if r.request_id == request_id)
        self.queue.remove(request)
        return request

    def _scale_up(self, action: ScaleUp, devices: tuple[int, ...], degree: int) -> None:
        assert len(devices) == degree, "one instance is made"
        assert devices == tuple(range(devices[0], devices[0] + degree)), "contiguous"
        assert devices[0] % degree == 0, "aligned"
        members = [i for i in self.instances if not set(devices).isdisjoint(i.devices)]
        assert all(i.transition is None and set(i.devices) < set(devices) for i in members), "they may merge"
        if self.fail_transformations:
            for member in members:
                self._begin(member, action, len(member.devices))
            self.fail_transformations -= 1
            return
        merged = _Instance(devices, [run for member in members for run in member.running])
        self.instances = [*(i for i in self.instances if i not in members), merged]
        self._begin(merged, action, len(members[0].devices))

    def _begin(self, instance: _Instance, action: ScaleUp | ScaleDown, speed_degree: int) -> None:
        instance.transition, instance.speed_degree = action, speed_degree
        instance.ends_s = self.now_s + self.rates.transformation_s

    # The clock

    def run(self, scheduler: Scheduler, arrivals: Iterable[tuple[WaitingRequest, int]], until_s: float) -> None:
        """Serve `arrivals` (requests and their numbers of output tokens, in order of arrival)."""
        coming = sorted(arrivals, key=lambda a: a[0].arrival_s)[::-1]
        while self.now_s < until_s:
            while coming and coming[-1][0].arrival_s <= self.now_s:
                request, self.outputs[request.request_id] = coming.pop()
                self.queue.append(request)
            scheduler.tick()
            next_arrival_s = coming[-1][0].arrival_s if coming else math.inf
            event_s = min([until_s, next_arrival_s, self.now_s + 1.0, *(self._event_s(i) for i in self.instances)])
            self._advance(max(event_s, self.now_s + 1e-6))

    def _speeds(self, instance: _Instance) -> tuple[float, float]:
        """Of the prompt that is computed, and of each request that decodes."""
        decoding = sum(r.prefill_left <= 0 for r in instance.running) or 1
        rates, degree = self.rates, len(instance.devices)
        if instance.transition is None:
            return rates.prefill[degree], min(rates.decode_each[degree], rates.decode[degree] / decoding)
        share = rates.transforming_speed * degree / instance.speed_degree
        together = min(rates.decode[instance.speed_degree] * share / decoding, rates.decode_each[instance.speed_degree])
        return 0.0, together

    def _event_s(self, instance: _Instance) -> float:
        """When the instance's next prompt, request or transformation ends."""
        prefill, decode = self._speeds(instance)
        times = [instance.ends_s]
        times += [self.now_s + r.prefill_left / prefill for r in instance.running[:] if r.prefill_left > 0 and prefill][
            :1
        ]
        times += [self.now_s + r.output_left / decode for r in instance.running if r.prefill_left <= 0]
        return min(times)

    def _advance(self, to_s: float) -> None:
        step_s, self.now_s = to_s - self.now_s, to_s
        for instance in list(self.instances):
            prefill, decode = self._speeds(instance)
            budget = prefill * step_s
            for run in list(instance.running):
                if run.prefill_left > 0:
                    done = min(run.prefill_left, budget)
                    run.prefill_left, budget = run.prefill_left - done, budget - done
                    if run.prefill_left < 1e-6:
                        run.prefill_left = 0
                        self.first_token_s.setdefault(run.request.request_id, self.now_s)
                    continue
                made = min(decode * step_s, run.output_left)
                run.produced, run.output_left = run.produced + made, run.output_left - made
                if run.output_left < 1e-6:
                    instance.running.remove(run)
                    self.finished_s[run.request.request_id] = self.now_s
            while self._used(instance) > self.capacity[len(instance.devices)]:
                self._preempt(instance, max(instance.running, key=lambda r: r.request.arrival_s))
            if instance.transition is not None and self.now_s >= instance.ends_s:
                self._end(instance)

    def _preempt(self, instance: _Instance, run: _Run) -> None:
        self.num_preempted += 1
        instance.running.remove(run)
        self.outputs[run.request.request_id] = math.ceil(run.output_left)
        since_s = self.now_s - run.queued_s
        self.queue.append(replace(run.request, prompt_tokens=run.num_tokens, started=True, waiting_since_s=since_s))

    def _end(self, instance: _Instance) -> None:
        action, instance.transition, instance.ends_s = instance.transition, None, math.inf
        if not isinstance(action, ScaleDown):
            return
        starts = range(0, len(instance.devices), action.degree)
        parts = [_Instance(instance.devices[start : start + action.degree]) for start in starts]
        for run in sorted(instance.running, key=lambda r: -r.num_tokens):
            min(parts, key=self._used).running.append(run)
        self.instances = [*(i for i in self.instances if i is not instance), *parts]

    # What happened

    def count(self, *kinds: type[Action]) -> int:
        """Actions of some kinds."""
        return sum(isinstance(action, kinds) for _, action in self.log)

    def generated_tokens(self, requests: Iterable[tuple[WaitingRequest, int]]) -> int:
        """Output tokens of the requests that have finished."""
        return sum(tokens for request, tokens in requests if request.request_id in self.finished_s)


def simulate(
    policy: Policy,
    arrivals: list[tuple[WaitingRequest, int]],
    until_s: float,
    degrees: tuple[DegreeLimits, ...],
    **fields,
) -> tuple[SimulatedCluster, Scheduler]:
    """Serve arrivals with a policy, on a cluster that starts with TP1 instances."""
    simulated = SimulatedCluster(degrees, **fields)
    scheduler = Scheduler(policy, simulated)
    simulated.run(scheduler, arrivals, until_s)
    return simulated, scheduler
