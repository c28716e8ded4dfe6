"""Rule for splitting merged instances. Most policies share it, so that they differ only in their placement."""

import heapq
from dataclasses import dataclass

from serving.scheduler.actions import ScaleDown
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


def fits_split(view: ClusterView, instance: InstanceView, degree: int) -> bool:
    """Return whether the running requests fit the instances of `degree` after a split, each with a page for its next
    tokens.

    Requests are distributed as by the engine: longest first, to the part with the most free tokens.
    """
    limits = view.limits[degree]
    if instance.largest > limits.capacity_tokens:
        return False
    num_parts, page_size = instance.degree // degree, view.page_size
    ordered = sorted(instance.running, key=lambda r: (-r.num_tokens, r.request_id))
    needs = [view.whole_pages(min(r.num_tokens + page_size, r.max_total_tokens)) for r in ordered]
    parts = [(-limits.capacity_tokens, part) for part in range(num_parts)]  # a heap: most free tokens first
    slots = [limits.max_requests] * num_parts
    for need in needs:
        minus_free, part = parts[0]
        heapq.heapreplace(parts, (minus_free + need, part))
        slots[part] -= 1
        if minus_free + need > 0 or slots[part] < 0:
            return False
    return True


def split_to_release(
    view: ClusterView, room: Room, instance: InstanceView, request: WaitingRequest
) -> ScaleDown | None:
    """Return the split of a merged instance that still holds all weights, so that a later merge can turn unneeded
    weights into KV cache for `request`.

    None if its running requests do not fit the parts yet, or the split was refused. The instance is closed in `room`
    either way.
    """
    room.close(instance)
    if not fits_split(view, instance, view.base_degree) or (instance.devices, view.base_degree) in view.refused:
        return None
    reason = (
        f"it has not released its weights and holds {instance.capacity_tokens} tokens; "
        f"{request.request_id} may grow to {request.max_total_tokens}"
    )
    return ScaleDown(instance.devices, view.base_degree, reason)


@dataclass(frozen=True)
class SplitConfig:
    """Settings of `SplitRule`. The rule of AMOEBA 3.3, "scale-down", is `linger_s=0, partial=False`."""

    free_share: float = 0.5
    """Share of the KV cache that must be free before an instance splits."""
    linger_s: float = 60.0
    """Seconds after its last long request in which an instance still accepts requests and does not split."""
    partial: bool = True
    """Whether an instance may split to the lowest degree that holds its long requests, before they end."""


class SplitRule:
    """Split of instances whose long requests have ended.

    Remembers the last time at which a long request needed each merged instance: it ran there, or it waited and would
    fit.
    """

    def __init__(self, config: SplitConfig):
        self.config = config
        self._needed_s: dict[tuple[int, ...], dict[int, float]] = {}
        """Last time at which a degree was too low for long requests, by devices of the merged instance and degree."""

    def leaving(self, view: ClusterView, room: Room, pressed: bool) -> list[tuple[InstanceView, int]]:
        """Return the instances that should accept no more requests, with the degree that each will split to.

        Args:
            pressed: whether a short request found no room in the last decision. Instances then do not linger.
        """
        before, self._needed_s = self._needed_s, {}
        leaving = []
        for instance in room.merged:
            if not room.is_steady(instance):
                continue
            degree = instance.degree
            size = max(instance.largest, view.largest_waiting(instance.capacity_tokens))
            needed = self._needed_degree(view, degree, size)
            lower = [d for d in view.limits if view.base_degree <= d < degree]
            needed_s = before.get(instance.devices) or dict.fromkeys(lower, view.now_s)
            for other in needed_s:
                if other < needed:
                    needed_s[other] = view.now_s
            self._needed_s[instance.devices] = needed_s
            if needed < degree and self._is_due(view, instance, needed, pressed):
                leaving.append((instance, needed))
        return leaving

    def _needed_degree(self, view: ClusterView, degree: int, size: int) -> int:
        """Return the lowest degree that an instance of `degree` may split to while a request of `size` tokens needs
        room; `degree` itself if it must not split."""
        if not view.is_long(size):
            return view.base_degree
        if not self.config.partial:
            return degree
        enough = view.degree_for(size)
        return degree if enough is None else min(enough, degree)

    def _is_due(self, view: ClusterView, instance: InstanceView, degree: int, pressed: bool) -> bool:
        if instance.free_tokens < self.config.free_share * instance.capacity_tokens:
            return degree == view.base_degree
        if degree > view.base_degree and not fits_split(view, instance, degree):
            return False  # it would stay closed until its long requests end
        lingered_s = view.now_s - self._needed_s[instance.devices][degree]
        return pressed or lingered_s >= self.config.linger_s

    def split(
        self, view: ClusterView, room: Room, leaving: list[tuple[InstanceView, int]], pressed: bool = False
    ) -> list[ScaleDown]:
        """Close the leaving instances in `room`, and return the splits of instances with enough free cache.

        If `pressed`, an instance splits as soon as its requests fit the parts. If they do not fit and no other instance
        is open, it stays open.
        """
        actions, numbers = [], {instance.id for instance, _ in leaving}
        for instance, degree in leaving:
            fits = fits_split(view, instance, degree)
            if pressed and not fits and all(other.id in numbers for other in room.open):
                continue
            room.close(instance)
            free = instance.free_tokens / instance.capacity_tokens
            if (free < self.config.free_share and not pressed) or not fits:
                continue
            if (instance.devices, degree) not in view.refused:
                done = "its long requests are done" if degree == view.base_degree else f"TP{degree} holds what is left"
                reason = f"{done} and {free:.0%} of its KV cache is free"
                actions.append(ScaleDown(instance.devices, degree, reason))
        return actions
