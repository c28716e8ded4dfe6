"""Immutable snapshot of the cluster, the input of policies: instances, queue, and possible degrees.

Token counts are tokens of KV cache. Times are seconds of one monotonic clock, real or virtual. A long request exceeds
the capacity of an empty instance of the base degree; all others are short. A request with a priority below 0 is urgent.
A merge either releases weights (each rank keeps its shard; the rest becomes KV cache) or keeps them all resident.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from serving.scheduler.timing import Timing


@dataclass(frozen=True)
class WaitingRequest:
    """A request in the queue."""

    request_id: str
    prompt_tokens: int
    """Tokens to compute before the next token is sampled. For a preempted request this includes the output so far."""
    max_total_tokens: int
    """Maximum length of the request: prompt plus `max_tokens`."""
    priority: int = 0
    """Priority as in `SamplingParams.priority`: lower goes first."""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    """Time after which a waiting request is rejected. None: no deadline."""
    started: bool = False
    """Whether the request was preempted. If so, it is never rejected because the queue is full."""
    waiting_since_s: float | None = None
    """Present time minus the total time that the request has waited. Running time is not waiting time. None: the
    request has waited since its arrival."""
    ttft_slo_s: float | None = None
    """Limit of this request for the time from arrival to first token. None: the policy's limit."""
    tpot_slo_s: float | None = None
    """Limit of this request for each further token, in seconds. None: the policy's limit."""
    beyond_share: bool = False
    """Whether the client of this request already uses its share of slots or KV cache, and other clients wait. Such
    requests go behind all requests of clients within their shares."""

    @property
    def since_s(self) -> float:
        """`waiting_since_s`, or the arrival if that is None."""
        return self.arrival_s if self.waiting_since_s is None else self.waiting_since_s

    def waited_s(self, now_s: float) -> float:
        """Return the total seconds that the request has waited."""
        return now_s - self.since_s

    @property
    def rank(self) -> tuple[bool, int]:
        """Rank for preemption: a request may preempt requests of a higher rank. Requests beyond their client's share
        have a higher rank than all other requests. Apart from this, the rank is the priority."""
        return self.beyond_share, self.priority


@dataclass(frozen=True)
class RunningRequest:
    """A request on an instance."""

    request_id: str
    num_tokens: int
    """Tokens so far, including the prompt. Their KV pages are allocated."""
    max_total_tokens: int
    """Maximum length of the request: prompt plus `max_tokens`."""
    uncomputed_tokens: int = 0
    """Tokens to compute before the request decodes: the remaining prompt, and earlier output after a preemption."""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    beyond_share: bool = False
    """See `WaitingRequest.beyond_share`. Such a request may be preempted for a request of a client within its share."""
    queued_s: float = 0.0
    """Total seconds that the request waited before it ran. After a preemption, its waiting time continues from this
    value."""

    def waited_s(self, now_s: float) -> float:
        """Return `queued_s`: the waiting time does not grow while the request runs. `now_s` has no effect."""
        return self.queued_s

    @property
    def rank(self) -> tuple[bool, int]:
        """Rank for preemption: see `WaitingRequest.rank`."""
        return self.beyond_share, self.priority


@dataclass(frozen=True)
class InstanceView:
    """A serving replica."""

    id: int
    """First device. A merged instance has the id of its first member."""
    devices: tuple[int, ...]
    capacity_tokens: int
    """Tokens that the empty instance can hold."""
    free_tokens: int
    """Free tokens. Cached prefixes that no request uses count as free."""
    free_slots: int
    """Number of requests that the instance could run in addition."""
    running: tuple[RunningRequest, ...] = ()
    transition_to: int | None = None
    """Degree of the instances on these devices after the present transformation. None: no transformation. During a
    transformation, the instance accepts only requests that fit `joinable_tokens`."""
    coming_tokens: int | None = None
    """Capacity after the transformation. None: `DegreeLimits.capacity_tokens` of `transition_to`."""
    joinable_tokens: int = 0
    """Tokens available to a new request while layers change. The request must also fit an instance of the lower of both
    degrees."""
    draining: bool = False
    """Whether an operator has stopped new requests to this instance."""
    step_s: float | None = None
    """Median seconds of its recent decode steps. None: no step yet."""
    paused: tuple[tuple[RunningRequest, ...], ...] = ()
    """Requests that are paused while this instance uses their devices: one tuple for each instance before the merge, in
    device order. Paused requests keep their pages and slots, which `free_tokens` and `free_slots` exclude. Empty: no
    request is paused."""
    paused_degree: int | None = None
    """Degree of the instances before the merge. A split to this degree resumes the paused requests. None: no request is
    paused."""

    @cached_property
    def degree(self) -> int:
        """TP degree."""
        return len(self.devices)

    @property
    def used_tokens(self) -> int:
        return self.capacity_tokens - self.free_tokens

    @cached_property
    def largest(self) -> int:
        """Highest `max_total_tokens` of its running requests; 0 if there is no request."""
        return max([request.max_total_tokens for request in self.running], default=0)

    @cached_property
    def runs_urgent(self) -> bool:
        """Whether it runs a request with a priority below 0."""
        return any(request.priority < 0 for request in self.running)

    @cached_property
    def uncomputed_tokens(self) -> int:
        """Sum of `uncomputed_tokens` of its running requests."""
        return sum([request.uncomputed_tokens for request in self.running])

    @cached_property
    def load(self) -> float:
        """Share of the KV cache in use. Prompt tokens that are not computed yet count twice."""
        return (self.used_tokens + self.uncomputed_tokens) / self.capacity_tokens


@dataclass(frozen=True)
class DegreeLimits:
    """Size of an instance of one degree."""

    degree: int
    capacity_tokens: int
    max_requests: int
    """Slots: requests that run at once."""
    kept_tokens: int | None = None
    """Capacity of an instance that was merged with all weights kept. None: the sum of the capacities of the instances
    of the base degree on its devices."""
    ready: bool = True
    """Whether the programs of this degree are compiled. If not, all its groups are in `ClusterView.refused`."""


@dataclass(frozen=True)
class ClusterView:
    """Snapshot of the cluster: the only input of a policy."""

    now_s: float
    instances: tuple[InstanceView, ...]
    """Instances in device order."""
    queue: tuple[WaitingRequest, ...]
    """Waiting requests, in any order."""
    degrees: tuple[DegreeLimits, ...]
    """Limits of all possible degrees, lowest degree first."""
    num_devices: int
    base_degree: int = 1
    """Degree that instances start with and split to."""
    page_size: int = 16
    """Tokens in a KV page."""
    max_model_len: int | None = None
    """Longest prompt plus output of the model, in tokens. None: no limit other than KV capacity."""
    merge_to: int = 1
    """Lowest degree after a merge, if the cluster has this degree. Set by the policy, not by the executor."""
    refused: frozenset[tuple[tuple[int, ...], int]] = frozenset()
    """Transformations, as (devices, degree), that a policy must not request now, because they were refused or failed
    recently, or their programs are being compiled."""
    timing: Timing = field(default_factory=Timing)
    """Measured durations of steps and transformations."""
    hidden_tokens: tuple[int, ...] = ()
    """`max_total_tokens` of each waiting request that is not in `queue` because it cannot start yet: its last token is
    still in flight after a preemption, or a program is being compiled for it. An instance that can hold such a request
    should not split."""

    @cached_property
    def limits(self) -> dict[int, DegreeLimits]:
        """Entries of `degrees` by degree."""
        return {limits.degree: limits for limits in self.degrees}

    @property
    def longest(self) -> DegreeLimits:
        """Limits of the degree with the largest capacity."""
        return max(self.degrees, key=lambda limits: limits.capacity_tokens)

    def is_long(self, max_total_tokens: int) -> bool:
        """Return whether a request exceeds the capacity of an empty instance of the base degree."""
        return max_total_tokens > self.limits[self.base_degree].capacity_tokens

    def has_long(self, instance: InstanceView) -> bool:
        """Return whether an instance runs a long request."""
        return self.is_long(instance.largest)

    @cached_property
    def _waiting_sizes(self) -> list[int]:
        return sorted([*(request.max_total_tokens for request in self.queue), *self.hidden_tokens])

    def largest_waiting(self, limit_tokens: int) -> int:
        """Return the size of the largest waiting request of at most `limit_tokens` tokens; 0 if there is none."""
        place = bisect_right(self._waiting_sizes, limit_tokens)
        return self._waiting_sizes[place - 1] if place else 0

    def kept_tokens(self, degree: int) -> int:
        """Return `DegreeLimits.kept_tokens` of a degree, or its default if it is None."""
        known, base = self.limits[degree].kept_tokens, self.limits[self.base_degree].capacity_tokens
        return base * max(degree // self.base_degree, 1) if known is None else known

    def keeps_weights(self, instance: InstanceView) -> bool:
        """Return whether an instance was merged with all weights kept. If so, a split and then a merge that releases
        weights would increase its capacity."""
        return instance.capacity_tokens < self.limits[instance.degree].capacity_tokens

    def degree_for(self, max_total_tokens: int) -> int | None:
        """Return the lowest degree whose empty instances hold a request; None if it fits nowhere.

        The result is at least the base degree. If the request needs a higher degree, the result is also at least
        `merge_to`, or the highest degree if no degree reaches `merge_to`.
        """
        holding = [
            limits.degree
            for limits in self.degrees
            if limits.degree >= self.base_degree and limits.capacity_tokens >= max_total_tokens
        ]
        if not holding or holding[0] == self.base_degree:
            return min(holding, default=None)
        return next((degree for degree in holding if degree >= self.merge_to), holding[-1])

    def kept_degree_for(self, max_total_tokens: int) -> int | None:
        """Return the lowest degree whose instances hold a request with all weights kept; None if no degree does."""
        holding = (d for d in self.limits if d >= self.base_degree and self.kept_tokens(d) >= max_total_tokens)
        return min(holding, default=None)

    def final_capacity(self, instance: InstanceView) -> int:
        """Return the tokens that an instance can hold after its present transformation, or now if it is not in one."""
        to = instance.transition_to
        if instance.coming_tokens is not None:
            return instance.coming_tokens
        return instance.capacity_tokens if to in (None, instance.degree) else self.limits[to].capacity_tokens

    def groups(self, degree: int) -> list[tuple[int, ...]]:
        """Return the groups of devices that can form an instance of a degree: contiguous and aligned."""
        starts = range(0, self.num_devices - degree + 1, degree)
        return [tuple(range(start, start + degree)) for start in starts]

    def instances_on(self, devices: Iterable[int]) -> tuple[InstanceView, ...]:
        """Return the instances that use any of these devices."""
        wanted = set(devices)
        return tuple(instance for instance in self.instances if not wanted.isdisjoint(instance.devices))

    def whole_pages(self, num_tokens: int) -> int:
        """Round a number of tokens up to whole pages."""
        return -(-num_tokens // self.page_size) * self.page_size
