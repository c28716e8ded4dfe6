"""Loaded programs, and what becomes of them when the process cannot hold more."""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

# What is left is for programs that are being compiled at the same time: 8 at most by default (`compile_jobs`).
_FULL_SHARE = 0.92
_DROPPED_SHARE = 0.25
# Reading the list of mappings takes some 20 ms when it is long, compiling a program 100 and more. So it is not read
# before programs have come that could fill it if each took that many times what they take on average: the largest takes
# five times that, with SmolLM2.
_MOST_OF_AVERAGE = 8
# Where it is not these programs that fill it, dropping more of them for each that comes would not help.
_ADDED_WHEN_FULL = 16


class ProgramStore(Generic[T]):
    """Programs by key, of which the least recently used are dropped before there are too many.

    XLA maps the code of each kernel of a CPU program by itself: 100 memory mappings a program, or more. Linux allows a
    process 65,530 (`vm.max_map_count`). Where it has no more, allocations fail, and XLA ends the process
    (measured: at some 900 programs). So, when 92% are in use, a quarter of the programs goes; those that are wanted
    again come from the compile cache. Used by one thread.

    Args:
        num_mappings: counts the process's mappings; None where there is no limit to mind.
        max_mappings: the limit.
    """

    def __init__(self, num_mappings: "Callable[[], int] | None" = None, max_mappings: int | None = None):
        self._programs: OrderedDict[Hashable, T] = OrderedDict()
        self._max_mappings = _max_mappings() if max_mappings is None else max_mappings
        self._num_mappings = num_mappings or _num_mappings
        self._unchecked = 0  # programs that may still come before the mappings are counted
        self.num_added = 0
        """Programs that were taken so far, those counted that are not there any more."""

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The program of `key`, made if there is none."""
        program = self._programs.get(key)
        if program is None:
            program = make()
            self.add(key, program)
        else:
            self._programs.move_to_end(key)
        return program

    def find(self, key: Hashable) -> T | None:
        """The program of `key`, if it is there: that it is asked for counts as use."""
        if key in self._programs:
            self._programs.move_to_end(key)
        return self._programs.get(key)

    def add(self, key: Hashable, program: T) -> None:
        """Take a program, possibly in place of others that were not used for longest."""
        self._programs[key] = program
        self.num_added += 1
        self._unchecked -= 1
        if self._max_mappings is not None and self._unchecked < 0:
            used, full = self._num_mappings(), _FULL_SHARE * self._max_mappings
            if used >= full:
                self._drop(used, self._max_mappings)
                used = self._num_mappings()
            self._unchecked = self._safe_to_add(full - used, used) if used < full else _ADDED_WHEN_FULL

    def _safe_to_add(self, room: float, used: int) -> int:
        """Programs that surely have room, and no more than there are: the first ones say little of those to come."""
        return min(int(room * len(self._programs) / (_MOST_OF_AVERAGE * max(used, 1))), len(self._programs))

    def _drop(self, used: int, max_mappings: int) -> None:
        count = int(_DROPPED_SHARE * len(self._programs))
        for _ in range(count):
            self._programs.popitem(last=False)
        gc.collect()  # they are in reference cycles
        logger.warning(
            "%d programs took %d of the %d memory mappings that a process may have (vm.max_map_count): the %d that "
            "were not used for longest are dropped, and will be loaded again when they are needed. Raise that limit, "
            "or serve with fewer layouts or batch sizes.",
            count + len(self._programs),
            used,
            max_mappings,
            count,
        )

    def __contains__(self, key: Hashable) -> bool:
        return key in self._programs

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[T]:
        return iter(self._programs.values())


def _num_mappings() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def _max_mappings() -> int | None:
    """None where there is no such limit, or it cannot be read: not on Linux."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None
