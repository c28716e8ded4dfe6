"""Loaded programs in memory. They are evicted before the process runs out of memory mappings."""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The rest is for programs that are compiled at the same time: at most 8 by default (`compile_jobs`).
_FULL_SHARE = 0.92
_EVICTED_SHARE = 0.25
# Counting a long list of mappings takes some 20 ms; compiling a program takes 100 ms and more. So the mappings are
# counted again only after enough programs were added to fill the list if each took 8 times the average. With SmolLM2
# the largest program takes 5 times the average.
_LARGEST_TO_AVERAGE = 8
# If something else fills the list, evicting programs for each new program would not help.
_ADDED_WHEN_FULL = 16


class ProgramStore(Generic[T]):
    """Programs by key. The least recently used programs are evicted before the process runs out of memory mappings.

    XLA:CPU maps the code of each kernel separately: a program takes 100 memory mappings or more. Linux allows a process
    65,530 mappings (`vm.max_map_count`). At the limit, allocations fail and XLA aborts the process. In a measurement, a
    process reached the limit with about 900 programs.

    When 92% of the mappings are in use, a quarter of the programs is evicted. An evicted program is loaded again from
    the compile cache. Not thread-safe.

    Args:
        num_mappings: function that counts the mappings of this process. None: count them as Linux reports them.
        max_mappings: maximum number of mappings. None: the limit of Linux, or no limit on other systems.
    """

    def __init__(self, num_mappings: "Callable[[], int] | None" = None, max_mappings: int | None = None):
        self._programs: OrderedDict[Hashable, T] = OrderedDict()
        self._max_mappings = _max_mappings() if max_mappings is None else max_mappings
        self._num_mappings = num_mappings or _num_mappings
        self._unchecked = 0  # programs that may be added before the mappings are counted again
        self.num_added = 0
        """Number of programs added since the start, including evicted programs."""

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the program of `key` and mark it as used. If there is none, call `make` and add the result."""
        program = self._programs.get(key)
        if program is None:
            program = make()
            self.add(key, program)
        else:
            self._programs.move_to_end(key)
        return program

    def find(self, key: Hashable) -> T | None:
        """Return the program of `key` and mark it as used. Return None if there is none."""
        if key in self._programs:
            self._programs.move_to_end(key)
        return self._programs.get(key)

    def add(self, key: Hashable, program: T) -> None:
        """Add a program. Evict the least recently used programs if 92% of the memory mappings are then in use."""
        self._programs[key] = program
        self.num_added += 1
        self._unchecked -= 1
        if self._max_mappings is not None and self._unchecked < 0:
            used, full = self._num_mappings(), _FULL_SHARE * self._max_mappings
            if used >= full:
                self._evict(used, self._max_mappings)
                used = self._num_mappings()
            self._unchecked = self._safe_to_add(full - used, used) if used < full else _ADDED_WHEN_FULL

    def _safe_to_add(self, room: float, used: int) -> int:
        """Estimate how many programs can be added before the memory mappings must be counted again.

        The estimate is at most the number of programs in the store.

        Args:
            room: number of mappings that may still be added before an eviction.
            used: number of mappings in use.
        """
        return min(int(room * len(self._programs) / (_LARGEST_TO_AVERAGE * max(used, 1))), len(self._programs))

    def _evict(self, used: int, max_mappings: int) -> None:
        count = int(_EVICTED_SHARE * len(self._programs))
        for _ in range(count):
            self._programs.popitem(last=False)
        gc.collect()  # programs are in reference cycles
        logger.warning(
            "%d programs took %d of the %d memory mappings that a process may have (vm.max_map_count). The %d least "
            "recently used programs are evicted and will be loaded again when needed. Raise the limit, or serve with "
            "fewer layouts or batch sizes",
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
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None
