"""Instances that may merge, in the order in which they are chosen."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from serving.scheduler.view import InstanceView

_FEW = 64
"""From this many groups on that are to be ranked again, sorting all is cheaper than moving each."""


class MergeGroup(NamedTuple):
    """Instances that would merge into one. Groups of one degree come first, then those with most room."""

    mixed: bool
    """Whether instances differ in their degree."""
    minus_free: int
    """Free tokens of the instance that it would be, below zero."""
    devices: tuple[int, ...]
    """No two groups have the same, so that order never depends on `members`."""
    members: tuple[InstanceView, ...]


class LoadedGroup(NamedTuple):
    """Instances that would merge into one. Those with the least load come first."""

    load: float
    """Mean of the instances."""
    devices: tuple[int, ...]
    """As of `MergeGroup`."""
    free: int
    """Free tokens of the instance that it would be."""
    kind: int | None
    """The degree of its instances, 0 if none of them runs anything; None if they differ. Groups of a kind are expected
    to do equally well."""
    members: tuple[InstanceView, ...]


Group = TypeVar("Group", MergeGroup, LoadedGroup)


class MergeGroups(Generic[Group]):
    """All groups of one degree, in order. They are kept from one snapshot to the next: only those that were touched are
    ranked again, and not before they are asked for.

    Args:
        degree: number of devices of each group; the first is a multiple of it.
        num_devices: of the cluster.
        rank: makes the group of some devices; None where no instances would merge there.
    """

    def __init__(self, degree: int, num_devices: int, rank: Callable[[tuple[int, ...]], Group | None]):
        self._degree, self._rank = degree, rank
        self._known: dict[int, Group | None] = dict.fromkeys(range(0, num_devices - degree + 1, degree))
        """By the first device."""
        self._ordered: list[Group] = []
        self._stale = set(self._known)

    def touch(self, devices: Iterable[int]) -> None:
        """Instances on these devices are others, or have other room."""
        self._stale.update([device - device % self._degree for device in devices])

    def __iter__(self) -> Iterator[Group]:
        """To be read before the next `touch`."""
        if self._stale:
            self._rank_again()
        return iter(self._ordered)

    def _rank_again(self) -> None:
        stale = self._stale & self._known.keys()
        new = {first: self._rank(tuple(range(first, first + self._degree))) for first in stale}
        if len(stale) >= _FEW:
            self._known |= new
            self._ordered = sorted(group for group in self._known.values() if group is not None)
            self._stale = set()
            return
        for first, group in new.items():
            if (before := self._known[first]) is not None:
                del self._ordered[bisect_left(self._ordered, before[:-1], key=lambda other: other[:-1])]
            if group is not None:
                insort(self._ordered, group)
            self._known[first] = group
        self._stale = set()
