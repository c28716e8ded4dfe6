"""Immutable snapshot of the cluster, the input of policies: instances, queue, and possible degrees.

Token counts are tokens of KV cache. Times are seconds of one monotonic clock, real or virtual.

The *base degree* is the tensor-parallel degree of instances that have not merged. A *long* request exceeds the capacity
of an empty instance of the base degree. All other requests are *short*. A request with a priority below 0 is *urgent*.
A merge either releases weights or keeps all weights. If it releases weights, each device keeps its shard, and the other
shards become KV cache.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from serving.scheduler.actions import Modules
from serving.scheduler.timing import Timing


@dataclass(frozen=True)
class WaitingRequest:
    """Request in the queue."""

    request_id: str
    prompt_tokens: int
    """Number of tokens to compute before the next token is sampled.

    After a preemption, it includes the output so far.
    """
    max_total_tokens: int
    """Maximum length of the request: prompt plus `max_tokens`."""
    priority: int = 0
    """Priority (`SamplingParams.priority`). Lower values go first."""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    """Time after which a waiting request is rejected. None: no deadline."""
    started: bool = False
    """Whether the request was preempted. If so, it is never rejected because the queue is full."""
    waiting_since_s: float | None = None
    """Present time minus the total time that the request has waited. None: it has waited since its arrival.

    Running time is not waiting time.
    """
    ttft_slo_s: float | None = None
    """Limit of this request for the time from arrival to first token. None: the policy's limit."""
    tpot_slo_s: float | None = None
    """Limit of this request for each further token, in seconds. None: the policy's limit."""
    beyond_share: bool = False
    """Whether the client of this request already uses its share of slots or KV cache, while other clients wait.

    Such requests go behind all requests of clients within their shares.
    """
    offloaded: bool = False
    """Whether the KV pages of the request are in host memory (`Offload`).

    If so, the keys and values of `prompt_tokens` are copied back to the device, and nothing is computed again.
    """

    @property
    def since_s(self) -> float:
        """Time since which the request waits: `waiting_since_s`, or the arrival if `waiting_since_s` is None."""
        return self.arrival_s if self.waiting_since_s is None else self.waiting_since_s

    def waited_s(self, now_s: float) -> float:
        """Return how many seconds the request has waited in total."""
        return now_s - self.since_s

    @property
    def rank(self) -> tuple[bool, int]:
        """Rank for preemption, `(beyond_share, priority)`. A request may preempt requests with a higher rank.

        A request beyond its client's fair share has a higher rank than every request within its client's share.
        """
        return self.beyond_share, self.priority


@dataclass(frozen=True)
class RunningRequest:
    """Request that runs on an instance."""

    request_id: str
    num_tokens: int
    """Number of tokens so far, including the prompt. Their KV pages are allocated."""
    max_total_tokens: int
    """Maximum length of the request: prompt plus `max_tokens`."""
    uncomputed_tokens: int = 0
    """Number of tokens to compute before the request decodes. After a preemption, it includes earlier output."""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    beyond_share: bool = False
    """Whether the request is beyond its client's share (`WaitingRequest.beyond_share`).

    If so, it may be preempted for a request of a client within its share.
    """
    queued_s: float = 0.0
    """Total seconds that the request waited before it ran.

    After a preemption, its waiting time continues from this value.
    """

    def waited_s(self, now_s: float) -> float:
        """Return how many seconds the request has waited in total.

        `now_s` is not used, because a running request does not wait.
        """
        return self.queued_s

    @property
    def rank(self) -> tuple[bool, int]:
        """Rank for preemption, as defined by `WaitingRequest.rank`."""
        return self.beyond_share, self.priority


@dataclass(frozen=True)
class PlacementView:
    """Devices that compute the attention and the FFN of each layer of an instance.

    Devices are indices in ascending order. On real devices, they come from `sharding.placement.Placement`.
    """

    attention: tuple[tuple[int, ...], ...]
    """Devices that compute the attention of each layer, and hold its KV cache."""
    ffn: tuple[tuple[int, ...], ...]
    """Devices that compute the FFN of each layer."""

    @cached_property
    def devices(self) -> frozenset[int]:
        """Devices that compute any layer of the instance."""
        return frozenset(device for home in (*self.attention, *self.ffn) for device in home)


@dataclass(frozen=True)
class InstanceView:
    """State of an instance (serving replica), as policies see it."""

    id: int
    """Index of the first device. A merged instance has the id of its first member."""
    devices: tuple[int, ...]
    """Devices of the instance. If it has a `placement`, these are the devices of its embedding and head."""
    capacity_tokens: int
    """Number of tokens that the empty instance can hold."""
    free_tokens: int
    """Number of free tokens. Cached prefixes that no request uses count as free."""
    free_slots: int
    """Number of further requests that the instance could run, by its slots."""
    running: tuple[RunningRequest, ...] = ()
    transition_to: int | None = None
    """Degree of the instances on these devices after the present transformation. None: no transformation.

    During a transformation, the instance accepts only requests that fit `joinable_tokens`.
    """
    coming_tokens: int | None = None
    """Capacity in tokens after the transformation. None: `DegreeLimits.capacity_tokens` of `transition_to`."""
    joinable_tokens: int = 0
    """Number of tokens that a new request can use while layers change.

    The request must also fit an instance of the lower degree of the transformation.
    """
    draining: bool = False
    """Whether an operator has stopped new requests to this instance."""
    step_s: float | None = None
    """Median seconds of the instance's recent decode steps. None: no step yet."""
    paused: tuple[tuple[RunningRequest, ...], ...] = ()
    """Requests that are paused while this instance uses their devices. Empty: no request is paused.

    There is one tuple for each instance before the merge, in device order. Paused requests keep their pages and slots,
    which are not in `free_tokens` and `free_slots`.
    """
    paused_degree: int | None = None
    """Degree of the instances before the merge. None: no request is paused.

    A split to this degree resumes the paused requests.
    """
    placement: PlacementView | None = None
    """Devices of the modules, if a module has several homes or is not on `devices`. None: all modules are on `devices`.

    With a placement, the home with the least memory for a token determines `capacity_tokens` and `free_tokens`.
    """
    changes_placement: bool = False
    """Whether a placement change of this instance is in progress. Steps continue, and the instance accepts requests.

    A scale-out of the instance counts. A scale-in counts for both of its instances.
    """
    batch_limit: int | None = None
    """Present limit of the batch (`LimitBatch`). `free_slots` respects it. None: no limit."""

    def homes(self, layer: int, modules: Modules = "layer") -> tuple[tuple[int, ...], ...]:
        """Return the devices that compute a layer of the instance, as one tuple for each module (attention, FFN).

        If the instance has no `placement`, all its devices compute the layer, and the result has one tuple. With a
        placement, the result has two tuples if `modules` is "layer", and one tuple for any other value.
        """
        if self.placement is None:
            return (self.devices,)
        attention, ffn = self.placement.attention[layer], self.placement.ffn[layer]
        return {"layer": (attention, ffn), "ffn": (ffn,)}.get(modules, (attention,))

    @property
    def degree(self) -> int:
        """Tensor-parallel degree: number of devices."""
        return len(self.devices)

    @property
    def used_tokens(self) -> int:
        return self.capacity_tokens - self.free_tokens

    @cached_property
    def largest(self) -> int:
        """Largest `max_total_tokens` of all running requests, or 0 if no request runs."""
        return max([request.max_total_tokens for request in self.running], default=0)

    @cached_property
    def runs_urgent(self) -> bool:
        """Whether the instance runs a request with a priority below 0."""
        return any(request.priority < 0 for request in self.running)

    @property
    def uncomputed_tokens(self) -> int:
        """Number of tokens that are still to be computed for the prompts of all running requests."""
        return sum([request.uncomputed_tokens for request in self.running])

    @cached_property
    def load(self) -> float:
        """Share of the KV cache in use. Prompt tokens that are not computed yet count twice."""
        return (self.used_tokens + self.uncomputed_tokens) / self.capacity_tokens


@dataclass(frozen=True)
class DegreeLimits:
    """Size and limits of an instance of one tensor-parallel degree."""

    degree: int
    capacity_tokens: int
    max_requests: int
    """Number of slots: requests that run at once."""
    kept_tokens: int | None = None
    """Capacity in tokens of an instance that was merged with all weights kept.

    None: the sum of the capacities of the instances of the base degree on its devices.
    """
    ready: bool = True
    """Whether the programs of this degree are compiled.

    If not, all groups of the degree are in `ClusterView.refused`.
    """


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer of the model on one device. A policy uses them to choose placement changes."""

    num_layers: int
    """Number of layers of the model."""
    attention_bytes: float
    """Bytes of the attention weights of a layer."""
    ffn_bytes: float
    """Bytes of the FFN weights of a layer."""
    kv_token_bytes: float
    """Bytes of keys and values of one token in a layer."""
    other_bytes: float = 0.0
    """Bytes of all weights outside of layers. A separate instance also needs them (`ScaleOut`)."""
    transition_cost: float = 0.3
    """Time of a move of hidden states between devices, divided by the time of a layer with the whole batch.

    The default holds if the executor has not measured it. See `speedup.transition_cost`.
    """

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of a layer."""
        return self.attention_bytes + self.ffn_bytes


@dataclass(frozen=True)
class DeviceView:
    """Memory and utilization of one device."""

    id: int
    """Index of the device."""
    memory_bytes: float
    """Bytes that KV cache and copies of layers could use on the device if no request ran.

    This is the memory budget less the weights on the device and temporaries. On real devices, it is
    `MemoryReport.unused_bytes` plus the bytes of the KV cache.
    """
    free_bytes: float
    """Part of `memory_bytes` that no running or paused request uses. Cached prefixes that no request uses are free.

    On real devices, it is `MemoryReport.unused_bytes` plus the bytes of free pages.
    """
    utilization: float = 0.0
    """Share of the latest second in which the device computed, from 0 to 1.

    Real devices report it by NVML or step times.
    """

    @property
    def vacancy(self) -> float:
        """Vacancy rate of the device (CoCoServe), from 0 to 1.

        This is the smaller of two shares: the free share of memory, and the free share of computing time.
        """
        return max(min(self.free_bytes / max(self.memory_bytes, 1.0), 1 - self.utilization), 0.0)


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
    """Maximum number of tokens of prompt plus output. None: only the KV capacity limits it."""
    merge_to: int = 1
    """Lowest degree after a merge, if the cluster has this degree. The policy sets it, not the executor."""
    refused: frozenset[tuple[tuple[int, ...], int]] = frozenset()
    """Transformations, as (devices, degree), that a policy must not request now.

    They were refused or failed recently, or their programs are being compiled.
    """
    timing: Timing = field(default_factory=Timing)
    """Measured durations of steps and transformations."""
    hidden_tokens: tuple[int, ...] = ()
    """Maximum length (`max_total_tokens`) of each waiting request that is not in `queue` because it cannot start yet.

    After a preemption, a request cannot start before its last token in flight arrives. A request can also wait for the
    compilation of a program. An instance that can hold one of these requests should not split.
    """
    layer: LayerSizes | None = None
    """Sizes of a layer. None: the executor refuses placement changes."""
    devices: tuple[DeviceView, ...] = ()
    """All devices in order, including devices without an instance. Empty if `layer` is None."""
    refused_changes: frozenset[tuple[object, ...]] = frozenset()
    """Placement changes that were refused or failed recently, given by their identities (`actions.identity`).

    The scheduler sets them, not the executor.
    """

    @cached_property
    def _by_id(self) -> dict[int, InstanceView]:
        return {instance.id: instance for instance in self.instances}

    def instance(self, instance_id: int) -> InstanceView | None:
        """Return the instance with this id, or None if there is none."""
        return self._by_id.get(instance_id)

    def guests(self, device: int) -> tuple[InstanceView, ...]:
        """Return the instances that compute layers on `device` without owning it (`InstanceView.devices`)."""
        return tuple(
            i for i in self.instances if i.placement and device in i.placement.devices and device not in i.devices
        )

    @cached_property
    def limits(self) -> dict[int, DegreeLimits]:
        """Entries of `degrees` (size and limits of instances), by tensor-parallel degree."""
        return {limits.degree: limits for limits in self.degrees}

    @cached_property
    def longest(self) -> DegreeLimits:
        """Limits of the degree whose instances have the largest capacity."""
        return max(self.degrees, key=attrgetter("capacity_tokens"))

    def is_long(self, max_total_tokens: int) -> bool:
        """Return whether a request is long: it exceeds the capacity of an empty instance that has not merged."""
        return max_total_tokens > self._base_tokens

    def has_long(self, instance: InstanceView) -> bool:
        """Return whether an instance runs a long request."""
        return instance.largest > self._base_tokens

    @cached_property
    def _base_tokens(self) -> int:
        return self.limits[self.base_degree].capacity_tokens

    @cached_property
    def _waiting_sizes(self) -> list[int]:
        return sorted([*[request.max_total_tokens for request in self.queue], *self.hidden_tokens])

    def largest_waiting(self, limit_tokens: int) -> int:
        """Return the size of the largest waiting request with at most `limit_tokens` tokens, or 0 if there is none."""
        place = bisect_right(self._waiting_sizes, limit_tokens)
        return self._waiting_sizes[place - 1] if place else 0

    def kept_tokens(self, degree: int) -> int:
        """Return the capacity in tokens of an instance of `degree` if all weights stay resident."""
        known, base = self.limits[degree].kept_tokens, self.limits[self.base_degree].capacity_tokens
        return base * max(degree // self.base_degree, 1) if known is None else known

    def keeps_weights(self, instance: InstanceView) -> bool:
        """Return whether a merged instance kept all its weights.

        If so, its devices can have more KV cache: after a split, a second merge can turn weights into KV cache.
        """
        return instance.capacity_tokens < self.limits[instance.degree].capacity_tokens

    def degree_for(self, max_total_tokens: int) -> int | None:
        """Return the degree of the instance that should serve a request, or None if no degree can hold the request.

        If the base degree can hold the request, return the base degree. If it cannot, return the lowest degree, at
        least `merge_to`, that can hold the request. If there is none, return the highest degree that can hold it.
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
        """Return the lowest tensor-parallel degree at which an instance can hold a request with all weights resident.

        Return None if there is no such degree.
        """
        holding = (d for d in self.limits if d >= self.base_degree and self.kept_tokens(d) >= max_total_tokens)
        return min(holding, default=None)

    def final_capacity(self, instance: InstanceView) -> int:
        """Return the number of tokens that an instance can hold after the merge or split that is in progress.

        Without a merge or split, return the present capacity.
        """
        to = instance.transition_to
        if instance.coming_tokens is not None:
            return instance.coming_tokens
        return instance.capacity_tokens if to in (None, instance.degree) else self.limits[to].capacity_tokens

    def groups(self, degree: int) -> list[tuple[int, ...]]:
        """Return the groups of devices that can form an instance of `degree`. Each group is contiguous and aligned."""
        starts = range(0, self.num_devices - degree + 1, degree)
        return [tuple(range(start, start + degree)) for start in starts]

    def instances_on(self, devices: Iterable[int]) -> tuple[InstanceView, ...]:
        """Return the instances that use any of these devices."""
        wanted = set(devices)
        return tuple(instance for instance in self.instances if not wanted.isdisjoint(instance.devices))

    def whole_pages(self, num_tokens: int) -> int:
        """Round a number of tokens up to whole pages."""
        return -(-num_tokens // self.page_size) * self.page_size
