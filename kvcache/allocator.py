"""Buddy allocator for the KV pages of one device.

The allocator counts in units. A *unit* is one of the `max_tp` equal pieces of a page at TP1 (`kvcache.geometry`). A
block of order `k` has `2**k` units, and its first unit is a multiple of `2**k`.

With `max_tp` 4, a TP1 page is a block of order 2, and a TP4 page is a block of order 0. Pages of all degrees therefore
come from one pool of units. A paused TP1 request can keep its pages while a TP4 request runs.
"""

import heapq
from typing import NamedTuple


class OutOfPagesError(RuntimeError):
    """Error: too few pages are free. Nothing was allocated."""


class Block(NamedTuple):
    """Allocated block of KV cache: its first unit, its order (`2**order` units) and its number of references."""

    unit: int
    order: int
    references: int


class _FreeBlocks:
    """Free blocks of one order, by first unit: a set, and a heap that finds the lowest unit in O(log n).

    `remove` deletes a block from the set, but keeps its heap entry. `pop_lowest` skips the heap entries of blocks that
    are not in the set. `add` pushes a heap entry only if the heap has no entry of the block.
    """

    def __init__(self) -> None:
        self._free: set[int] = set()
        self._heap: list[int] = []
        self._queued: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, unit: int) -> bool:
        return unit in self._free

    def append(self, units: range) -> None:
        """Add free blocks. Their units must be higher than the units of all blocks that this object has ever had."""
        self._free.update(units)
        self._queued.update(units)
        self._heap.extend(units)

    def add(self, unit: int) -> None:
        self._free.add(unit)
        if unit not in self._queued:
            self._queued.add(unit)
            heapq.heappush(self._heap, unit)

    def remove(self, unit: int) -> None:
        self._free.remove(unit)

    def pop_lowest(self) -> int:
        while True:
            unit = heapq.heappop(self._heap)
            self._queued.remove(unit)
            if unit in self._free:
                self._free.remove(unit)
                return unit


class BuddyAllocator:
    """Allocator of reference-counted blocks of units (equal pieces of pages) on one device.

    `allocate` takes the smallest free block that is large enough, so that large blocks stay whole. Among blocks of
    equal size, it takes the block with the lowest unit.

    The KV buffers of the device (extents, see `kvcache.extents`) consist of the units. An extent that was made from
    weights gets higher units than the existing extents, so it is filled last. It is then likely to be free when it must
    hold weights again.

    Methods with the argument `unit`, except `claim`, raise `ValueError` if no allocated block starts at this unit. Not
    thread-safe: only the engine's thread calls them.
    """

    def __init__(self, max_tp: int) -> None:
        if max_tp < 1 or max_tp & (max_tp - 1):
            raise ValueError(f"max_tp is {max_tp}; it must be a power of two, at least 1")
        self.max_tp = max_tp
        self.max_order = max_tp.bit_length() - 1
        self._extents: list[tuple[int, int]] = []  # (start, units), sorted
        self._free = [_FreeBlocks() for _ in range(self.max_order + 1)]
        # Live blocks, by first unit.
        self._orders: dict[int, int] = {}
        self._references: dict[int, int] = {}

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """`(first unit, number of units)` of each KV buffer (extent), in ascending order."""
        return tuple(self._extents)

    @property
    def total_units(self) -> int:
        return sum(units for _, units in self._extents)

    @property
    def free_units(self) -> int:
        return self.num_free(0)

    def num_free(self, order: int) -> int:
        """Return how many blocks of `2**order` units can be allocated now.

        A larger free block counts as several blocks.
        """
        self._check_order(order)
        return sum(len(self._free[k]) << (k - order) for k in range(order, self.max_order + 1))

    def add_extent(self, num_pages: int) -> int:
        """Add a KV buffer (extent) of `num_pages` TP1 pages after the existing extents. Return its first unit."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; an extent has at least one page")
        start, num_units = self.total_units, num_pages * self.max_tp
        self._extents.append((start, num_units))
        self._free[self.max_order].append(range(start, start + num_units, self.max_tp))
        return start

    def allocate(self, order: int) -> int:
        """Allocate a block of `2**order` units with one reference, and return its first unit.

        Raises `OutOfPagesError` if no free block is large enough.
        """
        self._check_order(order)
        for k in range(order, self.max_order + 1):
            if self._free[k]:
                unit = self._free[k].pop_lowest()
                break
        else:
            raise self._out_of_pages(order, 1)
        while k > order:
            k -= 1
            self._free[k].add(unit + (1 << k))
        self._orders[unit] = order
        self._references[unit] = 1
        return unit

    def allocate_many(self, order: int, n: int) -> list[int]:
        """Allocate `n` blocks of `2**order` units with one reference each, and return their first units.

        Raises `OutOfPagesError`, and allocates nothing, if fewer than `n` blocks are free.
        """
        if n < 0:
            raise ValueError(f"n is {n}; it must not be negative")
        if self.num_free(order) < n:
            raise self._out_of_pages(order, n)
        return [self.allocate(order) for _ in range(n)]

    def claim(self, unit: int, order: int) -> None:
        """Allocate a given free block: the block of `2**order` units that starts at `unit`. It gets one reference.

        Raises `ValueError`, and changes nothing, if `unit` is not aligned or a unit of the block is not free.
        """
        self._check_order(order)
        if unit % (1 << order):
            raise ValueError(f"unit is {unit}; a block of {1 << order} units starts at a multiple of its size")
        # Free buddies always coalesce, so all units of a free block belong to one entry of `_free`.
        for k in range(order, self.max_order + 1):
            block = unit >> k << k
            if block in self._free[k]:
                break
        else:
            raise ValueError(f"the {1 << order} units from {unit} are not all free")
        self._free[k].remove(block)
        while k > order:
            k -= 1
            self._free[k].add((unit >> k << k) ^ (1 << k))  # the half without `unit`
        self._orders[unit] = order
        self._references[unit] = 1

    def share(self, unit: int) -> None:
        """Add a reference to the allocated block that starts at `unit`."""
        self._check_live(unit)
        self._references[unit] += 1

    def free(self, unit: int) -> None:
        """Drop a reference to the allocated block that starts at `unit`.

        If this was the last reference, the block becomes free.
        """
        self._check_live(unit)
        self._references[unit] -= 1
        if self._references[unit]:
            return
        del self._references[unit]
        order = self._orders.pop(unit)
        # Extents start at multiples of the largest block, so both buddies are always in the same extent.
        while order < self.max_order and (buddy := unit ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            unit = min(unit, buddy)
            order += 1
        self._free[order].add(unit)

    def become(self, other: "BuddyAllocator") -> None:
        """Replace the extents and blocks of this allocator by the extents and blocks of `other`.

        All objects that hold this allocator then see the new state of the device. Do not use `other` afterwards.
        """
        if other.max_tp != self.max_tp:
            raise ValueError(f"an allocator of pages split {self.max_tp} ways cannot become one of {other.max_tp}")
        self._extents, self._free = other._extents, other._free
        self._orders, self._references = other._orders, other._references

    def references(self, unit: int) -> int:
        """Return the number of references to the allocated block that starts at `unit`."""
        self._check_live(unit)
        return self._references[unit]

    def order_of(self, unit: int) -> int:
        """Return the order of the allocated block that starts at `unit`."""
        self._check_live(unit)
        return self._orders[unit]

    def live_blocks(self) -> list[Block]:
        """Return all allocated blocks in ascending order of their first unit."""
        return [Block(u, order, self._references[u]) for u, order in sorted(self._orders.items())]

    def _check_order(self, order: int) -> None:
        if not 0 <= order <= self.max_order:
            raise ValueError(f"order is {order}; it must be between 0 and {self.max_order}")

    def _check_live(self, unit: int) -> None:
        if unit not in self._orders:
            raise ValueError(f"no live block starts at unit {unit}: it was freed already or never allocated")

    def _out_of_pages(self, order: int, n: int) -> OutOfPagesError:
        return OutOfPagesError(
            f"{n} blocks of {1 << order} units do not fit: there is room for {self.num_free(order)} "
            f"({self.free_units} of {self.total_units} units are free)"
        )
