"""What follows from the views of single instances."""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

from serving.scheduler.queue_order import Key, QueueOrder
from serving.scheduler.view import ClusterView, InstanceView, RunningRequest

T = TypeVar("T")
Victims = tuple[list[Key], list[int], list[RunningRequest]]


class InstanceFacts:
    """Facts of instances, each found once as long as the executor shows the same view of an instance.

    Args:
        view: the present snapshot; to be set for the next one.
        reserved_growth: as of `Room`.
    """

    def __init__(self, view: ClusterView, reserved_growth: float):
        self.view, self._growth = view, reserved_growth
        self._known: dict[Hashable, dict[int, tuple[InstanceView, Any]]] = {}
        self._fits: dict[int, dict[int, tuple[InstanceView, bool]]] = {}
        self._settled: dict[int, tuple[InstanceView, Hashable]] = {}

    def growth(self, requests: Iterable[RunningRequest]) -> int:
        """Tokens kept free for running requests: each a page, and the reserved share of what may come."""
        share, page_size, num_pages = self._growth, self.view.page_size, 0
        for request in requests:  # thousands in a decision: no call for each
            left = request.max_total_tokens - request.num_tokens
            if left > 0:
                kept = page_size + int(share * left)
                num_pages -= -(left if left < kept else kept) // page_size
        return num_pages * page_size

    def freed_by(self, request: RunningRequest) -> int:
        """Tokens that the end of a running request would free."""
        return self.view.whole_pages(request.num_tokens) + self.growth((request,))

    def endings(self, instance: InstanceView) -> tuple[list[int], list[int]]:
        """Return what an instance's requests may still generate, in tokens, the fewest first, and the tokens that each
        and those before it free when they end. Found once for the view of an instance."""

        def find() -> tuple[list[int], list[int]]:
            ordered = sorted(instance.running, key=lambda r: r.max_total_tokens - r.num_tokens)
            freed = list(itertools.accumulate(self.freed_by(request) for request in ordered))
            return [request.max_total_tokens - request.num_tokens for request in ordered], freed

        return self._remembered("endings", instance, find)

    def freed_by_long(self, instance: InstanceView) -> int:
        """Tokens that an instance has more once its long requests are done."""
        view = self.view
        if not view.has_long(instance):
            return 0
        return self._remembered(
            "freed_by_long",
            instance,
            lambda: sum(self.freed_by(r) for r in instance.running if view.is_long(r.max_total_tokens)),
        )

    def fits_split(self, instance: InstanceView, degree: int) -> bool:
        """See `fits_split`; found once for the view of an instance."""
        known = self._fits.setdefault(degree, {})  # asked of every merged instance in each decision
        seen = known.get(instance.id)
        if seen is None or seen[0] is not instance:
            seen = known[instance.id] = instance, fits_split(self.view, instance, degree)
        return seen[1]

    def settle(self, instance: InstanceView, state: Hashable) -> None:
        """Remember that nothing is to be done about an instance while it and something else are as they are."""
        self._settled[instance.id] = instance, state

    def is_settled(self, instance: InstanceView, state: Hashable) -> bool:
        """Whether `settle` was last called with the same view of an instance, and the same state."""
        seen = self._settled.get(instance.id)
        return seen is not None and seen[0] is instance and seen[1] == state

    def victims(self, instance: InstanceView, rank: tuple[bool, int], order: QueueOrder) -> Victims:
        """Running requests that may be preempted for one of a rank, the last in the queue first.

        Returns their places in the queue, the tokens that they and those before them would free, and themselves.
        """

        def find() -> Victims:
            now_s = self.view.now_s  # a request that runs does not begin to starve
            lower = [r for r in instance.running if r.rank > rank and not order.starves(r, now_s)]
            lower.sort(key=order.due_key, reverse=True)
            freed = list(itertools.accumulate(self.freed_by(request) for request in lower))
            return [order.due_key(request) for request in lower], freed, lower

        return self._remembered(("victims", rank), instance, find)

    def _remembered(self, name: Hashable, instance: InstanceView, find: Callable[[], T]) -> T:
        """What follows from the view of an instance alone, found once as long as the executor shows the same one."""
        known = self._known.setdefault(name, {})
        seen, value = known.get(instance.id, (None, None))
        if seen is not instance:
            value = find()
            known[instance.id] = instance, value
        return cast(T, value)


def fits_split(view: ClusterView, instance: InstanceView, degree: int) -> bool:
    """An instance's requests fit the instances of `degree` that it would fall into, each with a page for its next
    tokens; dealt as the engine does, longest first to where most is free."""
    limits = view.limits[degree]
    if instance.largest > limits.capacity_tokens:
        return False
    num_parts, page_size = instance.degree // degree, view.page_size
    ordered = sorted(instance.running, key=lambda r: (-r.num_tokens, r.request_id))
    needs = [view.whole_pages(min(r.num_tokens + page_size, r.max_total_tokens)) for r in ordered]
    if sum(needs) > num_parts * limits.capacity_tokens:
        return False
    parts = [(-limits.capacity_tokens, part) for part in range(num_parts)]  # that with most room first
    slots = [limits.max_requests] * num_parts
    for need in needs:
        minus_free, part = parts[0]
        heapq.heapreplace(parts, (minus_free + need, part))
        slots[part] -= 1
        if minus_free + need > 0 or slots[part] < 0:
            return False
    return True
