"""Rule that decides when a merged instance splits.

Most policies share this rule, so that they differ only in where requests run.
"""

import heapq
from dataclasses import dataclass

from serving.scheduler.actions import ScaleDown
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


def fits_split(view: ClusterView, instance: InstanceView, degree: int) -> bool:
    """Return whether the running requests of an instance would fit the new instances after a split to `degree`.

    Each request needs one free page for its next tokens. Requests are distributed as in the engine: the longest request
    first, each request to the new instance with the most free tokens.
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
    """Return the action that splits a merged instance so that its devices can merge again with more KV cache.

    The instance must have released no weights. In the second merge, weights become KV cache, so that `request` fits.
    The instance is closed to other requests. Return None if its running requests do not fit the new instances yet, or
    if the split was refused recently.
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
    """Settings of `SplitRule`. `linger_s=0` and `partial=False` give the rule "scale-down" of AMOEBA 3.3."""

    free_share: float = 0.5
    """Share of the KV cache that must be free before an instance splits.

    It is ignored if a short request finds no room.
    """
    linger_s: float = 60.0
    """Linger time: seconds that an instance stays merged, and accepts requests, after its last long request has ended.

    The linger time ends early if a short request finds no room, or if less than `free_share` is free.
    """
    partial: bool = True
    """Whether an instance may split before its long requests end, to the lowest degree that holds them."""


class SplitRule:
    """Rule for splitting merged instances whose long requests have ended.

    The rule remembers when a long request last needed each merged instance. A long request needs an instance if it runs
    on this instance, or if it waits and could run there.
    """

    def __init__(self, config: SplitConfig):
        self.config = config
        self._needed_s: dict[tuple[int, ...], dict[int, float]] = {}
        """Last time at which a long request needed more than degree `d`, as `_needed_s[devices][d]`.

        There is a time for the devices of each merged instance and each lower degree `d`.
        """

    def leaving(self, view: ClusterView, room: Room, pressed: bool) -> list[tuple[InstanceView, int]]:
        """Return `(instance, degree)` for each merged instance that should split, and get no more requests until then.

        `degree` is the degree after the split: the lowest degree that can hold each long request that runs on the
        instance, or that waits and could run there. Call this method once in each decision, because it keeps records.

        The conditions for a split depend on the free share of the instance's KV cache:

        - At least `SplitConfig.free_share`: for `linger_s` seconds (the linger time), no long request has needed more
          than `degree`. If `degree` is above the base degree, the running requests fit the new instances.
        - Less: `degree` is the base degree. There is no linger time.

        Args:
            pressed: whether a short request found no room in the last decision. If True, there is no linger time.
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
        """Return the lowest degree to which an instance of degree `degree` may split for a request of `size` tokens.

        If the request needs the whole instance, return `degree`.
        """
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
        """Close the instances in `leaving` to new requests, and return the splits that can start now.

        A split can start if the running requests fit the new instances, and if the split was not refused recently. If
        `pressed` is False, `free_share` of the KV cache must also be free.

        There is an exception to the closing. If `pressed` is True and all open instances are in `leaving`, an instance
        stays open if its requests do not fit the new instances yet. Short requests can then start there.

        Args:
            leaving: result of the method `leaving`.
            pressed: whether a short request found no room in the last decision.
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
