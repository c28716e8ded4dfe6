"""Instances by what policies look for, kept up to date by what changes."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from typing import Any

from serving.scheduler.instance_facts import InstanceFacts
from serving.scheduler.view import ClusterView, InstanceView

_ONE_IN = 16
"""Where fewer than one in this many instances have changed, moving each in the tables is cheaper than sorting these."""


class InstanceTables:
    """The instances of the last snapshot. Only those whose views have changed cost much at an update.

    Args:
        reserved_growth: as of `Room`.
    """

    def __init__(self, view: ClusterView, reserved_growth: float):
        self._view, self._instances = view, ()
        self.facts = InstanceFacts(view, reserved_growth)
        self.home: dict[int, InstanceView] = {}
        """By device."""
        self.uncommitted: dict[int, int] = {}
        """Free tokens, less those kept for what runs, by the id of the instance."""
        self.by_free: list[tuple[int, int]] = []
        """`uncommitted` and the id, below zero, of instances that take requests and have a slot; in order."""
        self.by_load: list[tuple[bool, float, int]] = []
        """The same instances by whether they run a long request, load and id; in order."""
        self.by_room_to_come: list[tuple[int, int]] = []
        """`room_to_come`, below zero, and id of instances above the base degree; in order."""
        self.merged: dict[int, InstanceView] = {}
        """Instances above the base degree by id, in the order of devices."""
        self.unsteady: dict[int, InstanceView] = {}
        """Instances that are in transition or draining, by id."""
        self.num_requests = 0
        """Requests of all instances, paused ones included."""
        self._num_steady: Counter[tuple[bool, bool]] = Counter()
        """Instances that are in no transition, by whether they have the base degree, and a free slot."""

    @property
    def instances(self) -> tuple[InstanceView, ...]:
        """All, in the order of devices."""
        return self._instances

    @property
    def most_have_slots(self) -> bool:
        """At least half of the instances of the base degree, or of all where there is none, have slots; of those that
        are in no transition."""
        count = self._num_steady
        with_slots, full = count[True, True], count[True, False]
        if not with_slots + full:
            with_slots, full = count[False, True], count[False, False]
        return with_slots >= full

    def update(self, view: ClusterView) -> list[InstanceView]:
        """Take over the instances of a snapshot. Returns the views that are gone and those that are new: an instance
        that has changed is there with both."""
        before, now = self._instances, view.instances
        self._view, self._instances, self.facts.view = view, now, view
        if len(before) == len(now):
            pairs = [(old, new) for old, new in zip(before, now, strict=True) if old is not new]
            gone, changed = [old for old, _ in pairs], [new for _, new in pairs]
        else:
            known, present = dict(zip(map(id, before), before, strict=True)), dict(zip(map(id, now), now, strict=True))
            gone = [known[i] for i in known.keys() - present.keys()]
            changed = [present[i] for i in present.keys() - known.keys()]
        few = _ONE_IN * len(changed) < len(now)
        for instance in gone:
            self._remove(instance)
        for instance in changed:
            self._add(instance, insort if few else list.append)
        if not few:
            self.by_free.sort()
            self.by_load.sort()
            self.by_room_to_come.sort()
        self.merged = dict(sorted(self.merged.items()))
        return gone + changed

    def room_to_come(self, instance: InstanceView) -> int:
        """Free tokens, less those kept for what runs, once an instance's long requests are done."""
        return self.uncommitted[instance.id] + self.facts.freed_by_long(instance)

    def _remove(self, instance: InstanceView) -> None:
        number = instance.id
        if self.merged.pop(number, None) is not None:
            discard(self.by_room_to_come, (-self.room_to_come(instance), number))
        free = self.uncommitted.pop(number)
        for device in instance.devices:
            del self.home[device]
        self.num_requests -= _num_requests(instance)
        if instance.transition_to is None:
            self._num_steady[instance.degree == self._view.base_degree, instance.free_slots > 0] -= 1
        if self.unsteady.pop(number, None) is None and instance.free_slots > 0:
            discard(self.by_free, (free, -number))
            discard(self.by_load, (self._view.has_long(instance), instance.load, number))

    def _add(self, instance: InstanceView, put: Callable[[list, Any], None]) -> None:
        number, base_degree = instance.id, self._view.base_degree
        free = self.uncommitted[number] = instance.free_tokens - self.facts.growth(instance.running)
        for device in instance.devices:
            self.home[device] = instance
        if instance.degree > base_degree:
            self.merged[number] = instance
            put(self.by_room_to_come, (-self.room_to_come(instance), number))
        self.num_requests += _num_requests(instance)
        if instance.transition_to is None:
            self._num_steady[instance.degree == base_degree, instance.free_slots > 0] += 1
        if instance.transition_to is not None or instance.draining:
            self.unsteady[number] = instance
        elif instance.free_slots > 0:
            put(self.by_free, (free, -number))
            put(self.by_load, (self._view.has_long(instance), instance.load, number))


def discard(entries: list, entry: tuple) -> None:
    """Take an entry out of a list in order, which has it."""
    place = bisect_left(entries, entry)
    if place == len(entries) or entries[place] != entry:
        raise LookupError(f"{entry} is not listed")
    del entries[place]


def _num_requests(instance: InstanceView) -> int:
    return len(instance.running) + sum(map(len, instance.paused))
