"""When merged instances split: the same rule for all policies that split, so that they differ in nothing else."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serving.scheduler.actions import ScaleDown
from serving.scheduler.instance_facts import fits_split
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView


@dataclass(frozen=True)
class SplitConfig:
    """What can be tuned. AMOEBA 3.3, "scale-down", is `linger_s` 0 and `free_share` 0.5, without partial splits."""

    free_share: float = 0.5
    """An instance that takes no new requests splits once this share of its KV cache is free."""
    linger_s: float = 60.0
    """It takes new requests for this long after its last long request."""
    partial: bool = True
    """It splits to the least degree that its long requests need, and need not wait for their end."""


class SplitRule:
    """Decides which instances are done with the long requests that they were merged for.

    Its only memory is when each merged instance was last wanted by a request that needs it: one that runs there, or one
    that waits and that it can hold.
    """

    def __init__(self, config: SplitConfig):
        self.config = config
        self._wanted_s: dict[tuple[int, ...], dict[int, float]] = {}
        """By devices, and the degree that would not have been enough."""

    def leaving(
        self, view: ClusterView, merged: Iterable[InstanceView], largest: Callable[[int], int], pressed: bool
    ) -> list[tuple[InstanceView, int]]:
        """Instances that take no new requests, and the degree that each of them splits to.

        Args:
            merged: instances above the base degree; others may be among them.
            largest: gives the size of the largest request that waits and has at most that many tokens; 0 for none.
            pressed: a short request found no room when decisions were last made: no instance lingers.
        """
        before, self._wanted_s = self._wanted_s, {}
        now_s, leaving = view.now_s, []
        waiting: dict[int, int] = {}  # the largest by capacity: many instances have the same
        needs: dict[tuple[int, int], int] = {}  # by degree and size
        lower = {degree: [d for d in view.limits if view.base_degree <= d < degree] for degree in view.limits}
        for instance in merged:
            degree = instance.degree
            if degree <= view.base_degree or instance.transition_to is not None or instance.draining:
                continue
            if (capacity := instance.capacity_tokens) not in waiting:
                waiting[capacity] = largest(capacity)
            size = max(instance.largest, waiting[capacity])
            if (needed := needs.get((degree, size))) is None:
                needed = needs[degree, size] = self._needed(view, degree, size)
            # As long as a degree is needed, it is wanted to split to none below it.
            wanted_s = before.get(instance.devices) or dict.fromkeys(lower[degree], now_s)
            for other in wanted_s:
                if other < needed:
                    wanted_s[other] = now_s
            self._wanted_s[instance.devices] = wanted_s
            if needed < degree and self._ends(view, instance, needed, pressed):
                leaving.append((instance, needed))
        return leaving

    def _needed(self, view: ClusterView, degree: int, size: int) -> int:
        """The degree that an instance of a degree is still needed at, for a request of that many tokens."""
        if not view.is_long(size):
            return view.base_degree
        if not self.config.partial:
            return degree
        enough = view.degree_for(size)
        return degree if enough is None else min(enough, degree)

    def _ends(self, view: ClusterView, instance: InstanceView, degree: int, pressed: bool) -> bool:
        """It has lingered long enough, or others need what it splits into."""
        if instance.free_tokens < self.config.free_share * instance.capacity_tokens:
            return degree == view.base_degree
        if degree > view.base_degree and not fits_split(view, instance, degree):
            return False  # its long requests run on, and it would be closed for as long as they do
        lingered_s = view.now_s - self._wanted_s[instance.devices][degree]
        return pressed or lingered_s >= self.config.linger_s

    def split(
        self, view: ClusterView, room: Room, leaving: Iterable[tuple[InstanceView, int]], pressed: bool = False
    ) -> list[ScaleDown]:
        """Close the instances that take no new requests, and split those that are empty enough: where `pressed`, all
        whose requests fit the parts, as a closed instance serves no one. If they do not, and no other is open, it
        serves on."""
        actions, leaving = [], list(leaving)
        numbers = {instance.id for instance, _ in leaving}
        for instance, degree in leaving:
            fits = room.facts.fits_split(instance, degree)
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
