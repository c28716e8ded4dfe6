"""What a policy sees: an immutable snapshot of instances, the queue, and the degrees that instances may have.

Plain data. Token counts are of KV cache; times are seconds of one monotonic clock, which may be a virtual one.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from serving.scheduler.timing import Timing


@dataclass(frozen=True)
class WaitingRequest:
    """A request in the queue."""

    request_id: str
    prompt_tokens: int
    """Tokens to compute before the next one is sampled. Of a preempted request its output so far is among them."""
    max_total_tokens: int
    """Most tokens that it may grow to: prompt and `max_tokens`."""
    priority: int = 0
    """Lower goes first, as `SamplingParams.priority`."""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    """When it is of no use to the client any more; None: never."""
    started: bool = False
    """It ran before and was preempted. It is never turned away for a full queue."""
    waiting_since_s: float | None = None
    """Now less the seconds that it has waited in all, the time that it ran left out; None: since its arrival."""
    ttft_slo_s: float | None = None
    """Seconds after its arrival by which its first token should come; None: the policy's."""
    tpot_slo_s: float | None = None
    """Seconds that each further token should take at most; None: the policy's."""
    beyond_share: bool = False
    """The client has its share of slots or KV cache without it, and other clients have requests: it goes behind all
    that are within theirs."""

    @property
    def since_s(self) -> float:
        """Now less the seconds that it has waited in all."""
        return self.arrival_s if self.waiting_since_s is None else self.waiting_since_s

    def waited_s(self, now_s: float) -> float:
        """Seconds that it has waited in all."""
        return now_s - self.since_s

    @property
    def rank(self) -> tuple[bool, int]:
        """Requests may be preempted for those of a lower rank: of higher priority, or within their client's share."""
        return self.beyond_share, self.priority


@dataclass(frozen=True)
class RunningRequest:
    """A request on an instance."""

    request_id: str
    num_tokens: int
    """Tokens so far, prompt included: what it has pages for."""
    max_total_tokens: int
    """Most tokens that it may grow to."""
    uncomputed_tokens: int = 0
    """Tokens that are still to be computed before it decodes: of its prompt, and of its output after a preemption."""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    beyond_share: bool = False
    """As of a `WaitingRequest`: it may be preempted for one that is within its client's share."""
    queued_s: float = 0.0
    """Seconds that it waited in all before it ran. It would wait again with these behind it."""

    def waited_s(self, now_s: float) -> float:
        """Seconds that it has waited in all; `now_s` makes no difference while it runs."""
        return self.queued_s

    @property
    def rank(self) -> tuple[bool, int]:
        """Requests may be preempted for those of a lower rank: of higher priority, or within their client's share."""
        return self.beyond_share, self.priority


@dataclass(frozen=True)
class InstanceView:
    """A serving replica."""

    id: int
    """The first device. A merged instance and the one over its first device alone share the id, at different times."""
    devices: tuple[int, ...]
    capacity_tokens: int
    """Tokens that it holds when empty."""
    free_tokens: int
    """Tokens, of these, that are free, or held only by prefixes that no one uses."""
    free_slots: int
    """Requests that it could run besides those that it runs."""
    running: tuple[RunningRequest, ...] = ()
    transition_to: int | None = None
    """Degree that its devices change to; None when they are not being transformed. It takes no requests then but such
    as `joinable_tokens` have room for."""
    coming_tokens: int | None = None
    """Tokens that the instance of that degree will hold; None: those of an instance that has released its weights."""
    joinable_tokens: int = 0
    """Tokens that a request may begin with there while layers change, as one that runs on an instance of the lower
    degree; 0 where none can."""
    draining: bool = False
    """An operator keeps new requests away from it."""
    step_s: float | None = None
    """Seconds that its recent decode steps took; None before the first."""
    paused: tuple[tuple[RunningRequest, ...], ...] = ()
    """Requests that keep their pages on its devices and do not run, of each of the instances that it took the place of,
    in the order of devices. Empty where there are none. `free_tokens` and `free_slots` are what they leave."""
    paused_degree: int | None = None
    """Degree of the instances of `paused`: a split to it lets them go on. None where no request is paused."""

    @cached_property
    def degree(self) -> int:
        """The TP degree."""
        return len(self.devices)

    @property
    def used_tokens(self) -> int:
        return self.capacity_tokens - self.free_tokens

    @cached_property
    def largest(self) -> int:
        """Most tokens that any of its requests may grow to; 0 if it runs none."""
        return max([request.max_total_tokens for request in self.running], default=0)

    @cached_property
    def first_priority(self) -> int:
        """The lowest priority of its requests, which are served first; the highest there is if it runs none."""
        return min([request.priority for request in self.running], default=2**31 - 1)

    @cached_property
    def last_rank(self) -> tuple[bool, int]:
        """The highest rank of its requests, which are preempted first: see `RunningRequest.rank`."""
        return max([(request.beyond_share, request.priority) for request in self.running], default=(False, -(2**31)))

    @cached_property
    def uncomputed_tokens(self) -> int:
        """Tokens of its requests that are still to be computed before these decode."""
        return sum([request.uncomputed_tokens for request in self.running])

    @cached_property
    def load(self) -> float:
        """Share of the KV cache in use, with prompt tokens that are still to be computed counted twice."""
        return (self.used_tokens + self.uncomputed_tokens) / self.capacity_tokens


@dataclass(frozen=True)
class DegreeLimits:
    """What an instance of one degree would hold, if it were made."""

    degree: int
    capacity_tokens: int
    max_requests: int
    """Requests that it would run at once."""
    kept_tokens: int | None = None
    """Tokens that it would hold if it were merged from instances of the base degree with their weights kept. None: as
    many as those hold together."""
    ready: bool = True
    """Whether the programs are there. An instance is not made of a degree that is not ready: `ClusterView.refused` has
    all of its groups."""


@lru_cache(maxsize=64)
def _aligned_groups(num_devices: int, degree: int) -> tuple[tuple[int, ...], ...]:
    starts = range(0, num_devices - degree + 1, degree)
    return tuple(tuple(range(start, start + degree)) for start in starts)


@lru_cache(maxsize=64)
def _free_groups(
    num_devices: int, degree: int, refused: frozenset[tuple[tuple[int, ...], int]]
) -> tuple[tuple[int, ...], ...]:
    return tuple(devices for devices in _aligned_groups(num_devices, degree) if (devices, degree) not in refused)


@dataclass(frozen=True)
class ClusterView:
    """A snapshot of everything that a policy decides about."""

    now_s: float
    instances: tuple[InstanceView, ...]
    queue: Collection[WaitingRequest]
    """In any order. A `QueueSnapshot` where the executor keeps a `WaitingQueue`, else a tuple."""
    degrees: tuple[DegreeLimits, ...]
    """Limits of all degrees that instances may have here, lowest first; the last is the cluster's max_tp."""
    num_devices: int
    base_degree: int = 1
    """Degree that instances start with, and split to."""
    page_size: int = 16
    """Tokens in a KV page."""
    max_model_len: int | None = None
    """Longest prompt plus output of the model, in tokens; None: as long as an instance can hold."""
    merge_to: int = 1
    """Merges go to this degree at least, or to the highest that there is. A policy's setting, not the executor's."""
    refused: frozenset[tuple[tuple[int, ...], int]] = frozenset()
    """Transformations (devices, degree) that were refused or failed a moment ago, or whose programs are being compiled:
    not to be asked for now."""
    timing: Timing = field(default_factory=Timing)
    """What steps and transformations take here."""
    hidden_tokens: tuple[int, ...] = ()
    """Most tokens of each request that waits and is not in `queue`, as nothing can be done for it for a moment: it was
    preempted and its last token is in flight, say. Instances that hold it are not to split."""

    def with_hidden(self, largest: Callable[[int], int]) -> Callable[[int], int]:
        """Add `hidden_tokens` to what gives the largest request of the queue that has at most that many tokens."""
        hidden = sorted(self.hidden_tokens)
        if not hidden:
            return largest
        return lambda most: max(largest(most), hidden[place - 1] if (place := bisect_right(hidden, most)) else 0)

    @cached_property
    def limits(self) -> dict[int, DegreeLimits]:
        """`degrees` by degree."""
        return {limits.degree: limits for limits in self.degrees}

    @property
    def longest(self) -> DegreeLimits:
        """Limits of the degree that holds most."""
        return max(self.degrees, key=lambda limits: limits.capacity_tokens)

    def is_long(self, max_total_tokens: int) -> bool:
        """A request that an instance of the base degree could not hold, were it empty."""
        return max_total_tokens > self.limits[self.base_degree].capacity_tokens

    def kept_tokens(self, degree: int) -> int:
        """Tokens that an instance of a degree holds that keeps the weights of the base degree."""
        known, base = self.limits[degree].kept_tokens, self.limits[self.base_degree].capacity_tokens
        return base * max(degree // self.base_degree, 1) if known is None else known

    def keeps_weights(self, instance: InstanceView) -> bool:
        """It holds less than its degree can: it was merged without releasing weights. Split and merged again, it would
        hold more."""
        return instance.capacity_tokens < self.limits[instance.degree].capacity_tokens

    def has_long(self, instance: InstanceView) -> bool:
        """It runs a long request."""
        return self.is_long(instance.largest)

    def degree_for(self, max_total_tokens: int) -> int | None:
        """The least degree, from the base degree on, whose instances hold a request when empty; None if none does.

        Where it is above the base degree, `merge_to` counts too.
        """
        if max_total_tokens in self._degrees_for:
            return self._degrees_for[max_total_tokens]
        holding = [
            limits.degree
            for limits in self.degrees
            if limits.degree >= self.base_degree and limits.capacity_tokens >= max_total_tokens
        ]
        if not holding or holding[0] == self.base_degree:
            degree = min(holding, default=None)
        else:
            degree = next((degree for degree in holding if degree >= self.merge_to), holding[-1])
        self._degrees_for[max_total_tokens] = degree
        return degree

    def kept_degree_for(self, max_total_tokens: int) -> int | None:
        """The least degree, from the base degree on, whose instances hold a request when empty and weights are kept;
        None if none does."""
        if max_total_tokens not in self._kept_degrees_for:
            holding = (d for d in self.limits if d >= self.base_degree and self.kept_tokens(d) >= max_total_tokens)
            self._kept_degrees_for[max_total_tokens] = min(holding, default=None)
        return self._kept_degrees_for[max_total_tokens]

    @cached_property
    def _degrees_for(self) -> dict[int, int | None]:
        """What `degree_for` has found."""
        return {}

    @cached_property
    def _kept_degrees_for(self) -> dict[int, int | None]:
        """What `kept_degree_for` has found."""
        return {}

    def capacity_to_come(self, instance: InstanceView) -> int:
        """Tokens that an instance will hold when its transition has ended; its own where it is in none."""
        to = instance.transition_to
        if instance.coming_tokens is not None:
            return instance.coming_tokens
        return instance.capacity_tokens if to in (None, instance.degree) else self.limits[to].capacity_tokens

    def groups(self, degree: int) -> tuple[tuple[int, ...], ...]:
        """Devices that may make up an instance of a degree: aligned and contiguous."""
        return _aligned_groups(self.num_devices, degree)

    def free_groups(self, degree: int) -> tuple[tuple[int, ...], ...]:
        """Those of `groups` that `refused` does not have, for that degree."""
        return _free_groups(self.num_devices, degree, self.refused)

    def instances_on(self, devices: Iterable[int]) -> tuple[InstanceView, ...]:
        """Instances that have any of these devices."""
        wanted = set(devices)
        return tuple(instance for instance in self.instances if not wanted.isdisjoint(instance.devices))

    def whole_pages(self, num_tokens: int) -> int:
        """Tokens of the pages that that many tokens take."""
        return -(-num_tokens // self.page_size) * self.page_size
