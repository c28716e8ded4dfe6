"""Free tokens and slots of all instances, while one decision assigns requests to them."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest


class MergeGroup(NamedTuple):
    """Group of instances that could merge into one instance.

    Groups whose instances have equal degrees sort before all other groups. Groups of the same kind sort by the number
    of free tokens after the merge, the highest first.
    """

    mixed: bool
    """Whether the instances have different degrees."""
    minus_free: int
    """Negative number of free tokens of the merged instance."""
    devices: tuple[int, ...]
    members: tuple[InstanceView, ...]


class Room:
    """Free tokens and slots of each instance, reduced by the requests that the current decision has assigned.

    An instance is open if it may get more requests in this decision. It is not open while it merges, splits or drains
    (accepts no new requests), or after a call of `close`.

    Args:
        reserved_growth: tokens to keep free for running requests, as a share of the tokens that they may still
            generate. One page for each request is kept free in addition. 0: as in vLLM, requests are preempted if pages
            run out. 1: pages never run out.

    Attributes:
        merged: instances whose degree is above the base degree.
        unsteady: instances that are merging, splitting or draining.
    """

    def __init__(self, view: ClusterView, reserved_growth: float):
        self._view, self._growth = view, reserved_growth
        self.merged = [i for i in view.instances if len(i.devices) > view.base_degree]
        self.unsteady = [i for i in view.instances if i.transition_to is not None or i.draining]
        self._unsteady_ids = {i.id for i in self.unsteady}
        self._free = {i.id: i.free_tokens - (self.growth(i.running) if i.running else 0) for i in view.instances}
        self._slots = {i.id: i.free_slots for i in view.instances}
        self._new_prompt_tokens = dict.fromkeys(self._free, 0)
        self._closed: set[int] = set()

    @cached_property
    def by_device(self) -> dict[int, InstanceView]:
        """Instance on each device."""
        return {device: instance for instance in self._view.instances for device in instance.devices}

    # Sizes of requests

    def need(self, request: WaitingRequest) -> int:
        """Return the number of free tokens that a request needs to start, in whole pages.

        These are the tokens of its prompt, and the tokens to keep free for its growth (`growth`).
        """
        left = max(request.max_total_tokens - request.prompt_tokens, 0)
        return self._view.whole_pages(
            request.prompt_tokens + min(left, self._view.page_size + int(self._growth * left))
        )

    def growth(self, requests: Iterable[RunningRequest]) -> int:
        """Return the number of tokens to keep free for the growth of running requests, in whole pages.

        For each request, this is one page plus a share (`reserved_growth`) of the tokens that the request may still
        generate. It is never more than all tokens that the request may still generate.
        """
        share, page_size, num_pages = self._growth, self._view.page_size, 0
        for request in requests:
            left = request.max_total_tokens - request.num_tokens
            if left > 0:
                num_pages -= -min(left, page_size + int(share * left)) // page_size
        return num_pages * page_size

    def freed_by(self, request: RunningRequest) -> int:
        """Return the number of tokens of KV cache that become free when a running request ends.

        This includes the tokens that `growth` keeps free for the request.
        """
        return self._view.whole_pages(request.num_tokens) + self.growth((request,))

    def freed_by_long(self, instance: InstanceView) -> int:
        """Return the number of tokens that become free when all long requests of an instance have ended."""
        return sum(self.freed_by(r) for r in instance.running if self._view.is_long(r.max_total_tokens))

    # State of an instance

    def free(self, instance: InstanceView) -> int:
        """Return the number of free tokens of an instance, less the tokens that are assigned or reserved.

        The result is negative if more tokens are reserved than free.
        """
        return self._free[instance.id]

    def has_slot(self, instance: InstanceView) -> bool:
        """Return whether an instance can run one more request."""
        return self._slots[instance.id] > 0

    def load(self, instance: InstanceView) -> float:
        """Return the load of an instance (`InstanceView.load`), with the prompts that this decision has assigned."""
        return instance.load + 2 * self._new_prompt_tokens[instance.id] / instance.capacity_tokens

    def new_prompt_tokens(self, instance: InstanceView) -> int:
        """Return the number of prompt tokens that were assigned to an instance in this decision."""
        return self._new_prompt_tokens[instance.id]

    def is_steady(self, instance: InstanceView) -> bool:
        """Return whether an instance is neither merging, splitting nor draining."""
        return instance.id not in self._unsteady_ids

    def is_open(self, instance: InstanceView) -> bool:
        """Return whether an instance may get more requests in this decision.

        The instance must be steady (`is_steady`), and not closed by `close`.
        """
        return instance.id not in self._closed and instance.id not in self._unsteady_ids

    def has_room(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """Return whether a request can start on an instance now, and would fit there at its maximum length."""
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
        away = self._closed | self._unsteady_ids
        return [instance for instance in self._view.instances if instance.id not in away]

    def with_room(self, request: WaitingRequest) -> list[InstanceView]:
        """Return the instances on which a request can start now (`has_room`), in device order."""
        need, size = self.need(request), request.max_total_tokens
        return [
            i for i in self.open if self._slots[i.id] > 0 and self._free[i.id] >= need and i.capacity_tokens >= size
        ]

    def by_load(self, instances: Iterable[InstanceView]) -> list[InstanceView]:
        """Sort instances: first instances without long requests, and then by load, the lowest first."""
        return sorted(instances, key=lambda i: (self._view.has_long(i), self.load(i), i.id))

    def members(self, devices: Iterable[int]) -> tuple[InstanceView, ...]:
        """Return the instances that use any of these devices."""
        found = {i.id: i for device in devices if (i := self.by_device.get(device)) is not None}
        return tuple(found.values())

    def parts(self, devices: tuple[int, ...]) -> tuple[InstanceView, ...] | None:
        """Return the instances that would merge on these devices, or None if a merge is impossible.

        There must be at least two instances, and they must cover exactly these devices.
        """
        members = self.members(devices)
        whole = len(members) > 1 and sum(i.degree for i in members) == len(devices)
        return members if whole else None

    def merged_free(self, members: Sequence[InstanceView], degree: int) -> int:
        """Return the number of free tokens of the instance that `members` become by a merge to `degree`.

        The merge turns weights that are no longer needed into KV cache. The result is negative if the requests of the
        members use more tokens than the merged instance holds.
        """
        gained = self._view.limits[degree].capacity_tokens - sum(i.capacity_tokens for i in members)
        return gained + sum(self._free[i.id] for i in members)

    def merge_groups(self, degree: int) -> list[MergeGroup]:
        """Return all groups of instances that could merge to `degree`, best first. Closed instances are included."""
        groups = []
        for devices in self._view.groups(degree):
            if (members := self.parts(devices)) is not None:
                mixed = len({i.degree for i in members}) > 1
                groups.append(MergeGroup(mixed, -self.merged_free(members, degree), devices, members))
        return sorted(groups, key=lambda group: group[:3])

    # Changes

    def close(self, instance: InstanceView) -> None:
        """Close an instance to new requests for the rest of this decision."""
        self._closed.add(instance.id)

    def assign(self, instance: InstanceView, request: WaitingRequest) -> None:
        """Assign a request to an instance: reduce the instance's free tokens and slots."""
        self._free[instance.id] -= self.need(request)
        self._slots[instance.id] -= 1
        self._new_prompt_tokens[instance.id] += request.prompt_tokens

    def reserve_for(self, request: WaitingRequest) -> None:
        """Close an instance to later requests, so that they do not take the free tokens for which `request` waits.

        An instance qualifies if it is open, has a free slot, and is large enough for the request. The qualified
        instance with the most free tokens is closed. If no instance qualifies, do nothing.
        """
        size = request.max_total_tokens
        options = [i for i in self.open if self.has_slot(i) and i.capacity_tokens >= size]
        if options:
            self.close(max(options, key=lambda i: (self._free[i.id], -i.id)))

    def reserve_after(self, instance: InstanceView, request: WaitingRequest, freed_tokens: int) -> None:
        """Reserve tokens on an instance for a request that will start there when some running requests have ended.

        The running requests will free `freed_tokens` tokens. If the waiting request needs more, reserve the difference.
        """
        self._free[instance.id] -= max(self.need(request) - freed_tokens, 0)

    def can_join(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """Return whether a short request can start on an instance that is merging or splitting.

        The instance needs a free slot and enough `InstanceView.joinable_tokens`, and must not be closed or draining.
        """
        need = self.need(request)
        has_room = instance.joinable_tokens >= need and self._free[instance.id] >= need
        return has_room and instance.id not in self._closed and not instance.draining and self.has_slot(instance)

    def joinable(self, request: WaitingRequest) -> InstanceView | None:
        """Return a merging or splitting instance on which a short request can start now (`can_join`), or None.

        If there are several, return the instance with the most `joinable_tokens`.
        """
        options = [i for i in self.unsteady if self.can_join(i, request)]
        return max(options, key=lambda i: (i.joinable_tokens, -i.id), default=None)

    def join(self, instance: InstanceView, request: WaitingRequest) -> str:
        """Assign a request to an instance that is merging or splitting. Return the reason, a text for the log.

        Also close the instance, because its `joinable_tokens` still include the tokens of this request.
        """
        self.assign(instance, request)
        self.close(instance)
        return f"it computes prompts as it becomes TP{instance.transition_to}"

    def reserve_in_transition(self, request: WaitingRequest) -> None:
        """Reserve tokens for a waiting request on an instance that is merging or splitting.

        The instance must be large enough for the request after the merge or split. Prefer an instance with enough free
        tokens, then the lowest degree, then the most free tokens. If no instance is large enough, do nothing.
        """
        need, view = self.need(request), self._view
        options = [
            (self._free[i.id] < need, i.transition_to, -self._free[i.id], i.id)
            for i in self.unsteady
            if i.transition_to is not None and not i.draining and view.final_capacity(i) >= request.max_total_tokens
        ]
        if options:
            self._free[min(options)[-1]] -= need
