"""Free tokens and slots of all instances while one decision assigns requests to them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest


class MergeGroup(NamedTuple):
    """Instances that could merge into one. Groups whose instances have equal degrees sort first, then groups with more
    free tokens after the merge."""

    mixed: bool
    """Whether the instances have different degrees."""
    minus_free: int
    """Free tokens of the merged instance, negated."""
    devices: tuple[int, ...]
    members: tuple[InstanceView, ...]


class Room:
    """Free tokens and slots of each instance, reduced by the assignments of the current decision.

    An instance is open if it may receive more requests in this decision. It is not open during a transformation, while
    it is draining, and after `close`.

    Args:
        reserved_growth: share of the tokens that running requests may still generate, for which KV cache is kept free.
            With 0, requests are admitted as in vLLM, and preempted if pages run out. With 1, no request is ever
            preempted for pages.

    Attributes:
        by_device: instances by device.
        merged: instances above the base degree.
        unsteady: instances that are being transformed or drained.
    """

    def __init__(self, view: ClusterView, reserved_growth: float):
        self._view, self._growth = view, reserved_growth
        self.by_device = {device: instance for instance in view.instances for device in instance.devices}
        self.merged = [i for i in view.instances if i.degree > view.base_degree]
        self.unsteady = [i for i in view.instances if i.transition_to is not None or i.draining]
        self._unsteady_ids = {i.id for i in self.unsteady}
        self._free = {i.id: i.free_tokens - self.growth(i.running) for i in view.instances}
        self._slots = {i.id: i.free_slots for i in view.instances}
        self._new_prompt_tokens = dict.fromkeys(self._free, 0)
        self._closed: set[int] = set()

    # Sizes of requests

    def need(self, request: WaitingRequest) -> int:
        """Return the tokens that must be free for a request to start, in whole pages."""
        left = max(request.max_total_tokens - request.prompt_tokens, 0)
        return self._view.whole_pages(
            request.prompt_tokens + min(left, self._view.page_size + int(self._growth * left))
        )

    def growth(self, requests: Iterable[RunningRequest]) -> int:
        """Return the tokens to keep free for the growth of running requests, in whole pages.

        For each request these are one page and the reserved share of its remaining tokens, but at most its remaining
        tokens.
        """
        share, page_size, num_pages = self._growth, self._view.page_size, 0
        for request in requests:
            left = request.max_total_tokens - request.num_tokens
            if left > 0:
                num_pages -= -min(left, page_size + int(share * left)) // page_size
        return num_pages * page_size

    def freed_by(self, request: RunningRequest) -> int:
        """Return the tokens that the end of a running request would free: its pages, and the tokens that `growth` keeps
        free for it."""
        return self._view.whole_pages(request.num_tokens) + self.growth((request,))

    def freed_by_long(self, instance: InstanceView) -> int:
        """Return the tokens that the end of all long requests of an instance would free."""
        return sum(self.freed_by(r) for r in instance.running if self._view.is_long(r.max_total_tokens))

    # State of an instance

    def free(self, instance: InstanceView) -> int:
        """Return the free tokens that are neither assigned nor reserved; negative if more are reserved than free."""
        return self._free[instance.id]

    def has_slot(self, instance: InstanceView) -> bool:
        """Return whether an instance can run one more request."""
        return self._slots[instance.id] > 0

    def load(self, instance: InstanceView) -> float:
        """Return `InstanceView.load` including the prompts that were assigned in this decision."""
        return instance.load + 2 * self._new_prompt_tokens[instance.id] / instance.capacity_tokens

    def new_prompt_tokens(self, instance: InstanceView) -> int:
        """Return the prompt tokens assigned to an instance in this decision."""
        return self._new_prompt_tokens[instance.id]

    def is_steady(self, instance: InstanceView) -> bool:
        """Return whether an instance is neither being transformed nor drained."""
        return instance.id not in self._unsteady_ids

    def is_open(self, instance: InstanceView) -> bool:
        """Return whether an instance may receive requests in this decision: steady and not closed."""
        return instance.id not in self._closed and instance.id not in self._unsteady_ids

    def has_room(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """Return whether a request can start on an instance now, and fits there even at its maximum length."""
        return (
            instance.capacity_tokens >= request.max_total_tokens
            and self.free(instance) >= self.need(request)
            and self.is_open(instance)
            and self.has_slot(instance)
        )

    # Sets of instances

    @property
    def open(self) -> list[InstanceView]:
        """Open instances in device order."""
        return [instance for instance in self._view.instances if self.is_open(instance)]

    def with_room(self, request: WaitingRequest) -> list[InstanceView]:
        """Return the instances that `has_room` accepts, in device order."""
        need, size = self.need(request), request.max_total_tokens
        return [
            i for i in self.open if self._slots[i.id] > 0 and self._free[i.id] >= need and i.capacity_tokens >= size
        ]

    def by_load(self, instances: Iterable[InstanceView]) -> list[InstanceView]:
        """Sort instances: without long requests first, then by load."""
        return sorted(instances, key=lambda i: (self._view.has_long(i), self.load(i), i.id))

    def members(self, devices: Iterable[int]) -> tuple[InstanceView, ...]:
        """Return the instances that use any of these devices."""
        found = {i.id: i for device in devices if (i := self.by_device.get(device)) is not None}
        return tuple(found.values())

    def parts(self, devices: tuple[int, ...]) -> tuple[InstanceView, ...] | None:
        """Return the instances that would merge on these devices. None if there is only one instance, or if the
        instances do not cover exactly these devices."""
        members = self.members(devices)
        whole = len(members) > 1 and sum(i.degree for i in members) == len(devices)
        return members if whole else None

    def merged_free(self, members: Sequence[InstanceView], degree: int) -> int:
        """Return the free tokens of the instance of `degree` into which `members` would merge and release weights;
        negative if they use more than its capacity."""
        gained = self._view.limits[degree].capacity_tokens - sum(i.capacity_tokens for i in members)
        return gained + sum(self._free[i.id] for i in members)

    def merge_groups(self, degree: int) -> list[MergeGroup]:
        """Return all groups that could merge to a degree, best first. Some members may be closed."""
        groups = []
        for devices in self._view.groups(degree):
            if (members := self.parts(devices)) is not None:
                mixed = len({i.degree for i in members}) > 1
                groups.append(MergeGroup(mixed, -self.merged_free(members, degree), devices, members))
        return sorted(groups, key=lambda group: group[:3])

    # Changes

    def close(self, instance: InstanceView) -> None:
        """Close an instance: it receives no more requests in this decision."""
        self._closed.add(instance.id)

    def assign(self, instance: InstanceView, request: WaitingRequest) -> None:
        """Reduce the free tokens and slots of an instance by the needs of a request."""
        self._free[instance.id] -= self.need(request)
        self._slots[instance.id] -= 1
        self._new_prompt_tokens[instance.id] += request.prompt_tokens

    def reserve_for(self, request: WaitingRequest) -> None:
        """Close an instance, so that no later request takes the tokens that a request waits for.

        The instance is open, has a free slot, can hold the request when empty, and has the most free tokens of such
        instances. If there is none, nothing changes.
        """
        size = request.max_total_tokens
        options = [i for i in self.open if self.has_slot(i) and i.capacity_tokens >= size]
        if options:
            self.close(max(options, key=lambda i: (self._free[i.id], -i.id)))

    def reserve_after(self, instance: InstanceView, request: WaitingRequest, freed_tokens: int) -> None:
        """Reserve the tokens that a request needs in addition to `freed_tokens`, which running requests will free
        before it starts."""
        self._free[instance.id] -= max(self.need(request) - freed_tokens, 0)

    def can_join(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """Return whether a short request can start on an instance in transformation, while its layers change.

        The request needs a free slot, and must fit `InstanceView.joinable_tokens`. The instance must not be closed or
        draining.
        """
        need = self.need(request)
        has_room = instance.joinable_tokens >= need and self._free[instance.id] >= need
        return has_room and instance.id not in self._closed and not instance.draining and self.has_slot(instance)

    def joinable(self, request: WaitingRequest) -> InstanceView | None:
        """Return the instance in transformation that a short request can join (`can_join`), with the most
        `joinable_tokens`; None if there is none."""
        options = [i for i in self.unsteady if self.can_join(i, request)]
        return max(options, key=lambda i: (i.joinable_tokens, -i.id), default=None)

    def join(self, instance: InstanceView, request: WaitingRequest) -> str:
        """Assign a request to an instance in transformation, close the instance, and return the reason for the log. The
        instance is closed because `joinable_tokens` would be too high for a second request."""
        self.assign(instance, request)
        self.close(instance)
        return f"it computes prompts as it becomes TP{instance.transition_to}"

    def reserve_in_transition(self, request: WaitingRequest) -> None:
        """Reserve tokens on an instance that can hold a request after its present transformation. Prefer instances with
        enough free tokens, then a low degree, then many free tokens. If there is no such instance, nothing changes."""
        need, view = self.need(request), self._view
        options = [
            (self._free[i.id] < need, i.transition_to, -self._free[i.id], i.id)
            for i in self.unsteady
            if i.transition_to is not None and not i.draining and view.final_capacity(i) >= request.max_total_tokens
        ]
        if options:
            self._free[min(options)[-1]] -= need
