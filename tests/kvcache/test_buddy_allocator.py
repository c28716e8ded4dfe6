"""Buddy allocator, compared with a plain model of the units of each live block."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvcache.allocator import Block, BuddyAllocator, OutOfPagesError

MAX_TP = 4
MAX_ORDER = 2


class AllocatorMachine(RuleBasedStateMachine):
    """Random operations. The model is a dict of live blocks, with the unit ranges of the extents."""

    # One item for each reference to a block, so that consuming an item frees one reference.
    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.allocator = BuddyAllocator(MAX_TP)
        self.extents: dict[int, range] = {}
        self.live: dict[int, tuple[int, int]] = {}  # first unit -> (order, references)

    def occupied(self) -> list[int]:
        return [u for unit, (order, _) in self.live.items() for u in range(unit, unit + 2**order)]

    def free_blocks(self, order: int) -> int:
        """Count the aligned runs of `2**order` free units, unit by unit."""
        occupied = set(self.occupied())
        starts = [u for units in self.extents.values() for u in units if u % 2**order == 0]
        return sum(occupied.isdisjoint(range(u, u + 2**order)) for u in starts)

    @precondition(lambda self: len(self.extents) < 4)
    @rule(num_pages=st.integers(1, 4))
    def add_extent(self, num_pages):
        end = self.allocator.total_units
        start = self.allocator.add_extent(num_pages)
        assert start == end == sum(map(len, self.extents.values()))
        self.extents[start] = range(start, start + num_pages * MAX_TP)

    @rule(target=held, order=st.integers(0, MAX_ORDER), n=st.integers(1, 5))
    def allocate_many(self, order, n):
        if n > self.free_blocks(order):
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate_many(order, n)
            return multiple()
        units = self.allocator.allocate_many(order, n)
        assert len(units) == n
        for unit in units:
            assert not set(range(unit, unit + 2**order)).intersection(self.occupied())
            self.live[unit] = (order, 1)
        return multiple(*units)

    @rule(target=held, order=st.integers(0, MAX_ORDER))
    def allocate(self, order):
        if not self.free_blocks(order):
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(order)
            return multiple()
        unit = self.allocator.allocate(order)
        assert not set(range(unit, unit + 2**order)).intersection(self.occupied())
        self.live[unit] = (order, 1)
        return unit

    @precondition(lambda self: self.extents)
    @rule(target=held, data=st.data(), order=st.integers(0, MAX_ORDER))
    def claim(self, data, order):
        end = max(units.stop for units in self.extents.values())
        unit = data.draw(st.integers(0, end // 2**order)) * 2**order
        block = range(unit, unit + 2**order)
        inside = any(unit in units for units in self.extents.values())
        if not inside or not set(block).isdisjoint(self.occupied()):
            with pytest.raises(ValueError, match=f"the {2**order} units from {unit} are not all free"):
                self.allocator.claim(unit, order)
            return multiple()
        self.allocator.claim(unit, order)
        self.live[unit] = (order, 1)
        return unit

    @rule(target=held, unit=held)
    def share(self, unit):
        self.allocator.share(unit)
        order, references = self.live[unit]
        self.live[unit] = (order, references + 1)
        return unit

    @rule(unit=consumes(held))
    def free(self, unit):
        self.allocator.free(unit)
        order, references = self.live.pop(unit)
        if references > 1:
            self.live[unit] = (order, references - 1)
        else:
            with pytest.raises(ValueError, match=f"unit {unit}:"):
                self.allocator.free(unit)

    @invariant()
    def agrees_with_model(self):
        live = [Block(unit, order, references) for unit, (order, references) in sorted(self.live.items())]
        assert self.allocator.live_blocks() == live
        assert all((self.allocator.order_of(b.unit), self.allocator.references(b.unit)) == b[1:] for b in live)
        assert self.allocator.extents == tuple((u.start, len(u)) for _, u in sorted(self.extents.items()))

    @invariant()
    def blocks_are_aligned_and_disjoint(self):
        assert all(unit % 2**order == 0 for unit, order, _ in self.allocator.live_blocks())
        occupied = self.occupied()
        assert len(set(occupied)) == len(occupied)
        assert set(occupied) <= {u for units in self.extents.values() for u in units}

    @invariant()
    def free_and_live_units_add_up(self):
        assert self.allocator.total_units == sum(len(units) for units in self.extents.values())
        assert self.allocator.free_units + len(self.occupied()) == self.allocator.total_units

    @invariant()
    def num_free_is_truthful(self):
        for order in range(MAX_ORDER + 1):
            num_free = self.allocator.num_free(order)
            # This also checks that freed buddies coalesce, because the model finds every aligned free run.
            assert num_free == self.free_blocks(order)
            trial = copy.deepcopy(self.allocator)
            trial.allocate_many(order, num_free)
            with pytest.raises(OutOfPagesError):
                trial.allocate(order)

    def teardown(self):
        for unit, (_, references) in self.live.items():
            for _ in range(references):
                self.allocator.free(unit)
        assert self.allocator.num_free(MAX_ORDER) * MAX_TP == self.allocator.total_units
        assert self.allocator.total_units == self.allocator.free_units


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_takes_the_smallest_sufficient_block_with_the_lowest_id():
    allocator = BuddyAllocator(4)
    allocator.add_extent(3)
    assert allocator.allocate(2) == 0
    assert allocator.allocate(0) == 4
    # Units 5, 6 and 7 of page 4 are free. They are used before page 8 is split.
    assert allocator.allocate(0) == 5
    assert allocator.allocate(1) == 6
    assert allocator.allocate(1) == 8
    allocator.free(0)
    assert allocator.allocate(1) == 10
    assert allocator.allocate(1) == 0


def test_pages_leave_late_extents_first():
    allocator = BuddyAllocator(4)
    allocator.add_extent(2)
    late = allocator.add_extent(2)
    pages = allocator.allocate_many(2, 4)
    assert pages == [0, 4, 8, 12]
    for page in (pages[0], pages[3]):
        allocator.free(page)
    assert allocator.allocate(2) == 0
    allocator.free(pages[2])
    assert all(block.unit < late for block in allocator.live_blocks())


@pytest.mark.parametrize("method", ["free", "share", "references", "order_of"])
@pytest.mark.parametrize("unit", [1, 4, 99])
def test_unknown_unit_is_named(method, unit):
    allocator = BuddyAllocator(4)
    allocator.add_extent(2)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=f"no live block starts at unit {unit}"):
        getattr(allocator, method)(unit)


def test_out_of_pages_says_what_is_free():
    allocator = BuddyAllocator(4)
    allocator.add_extent(2)
    allocator.allocate(0)
    with pytest.raises(OutOfPagesError, match=r"2 blocks of 4 units.* room for 1 \(7 of 8 units are free\)"):
        allocator.allocate_many(2, 2)
    assert allocator.free_units == 7


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="max_tp is 3"):
        BuddyAllocator(3)
    allocator = BuddyAllocator(4)
    with pytest.raises(ValueError, match="num_pages is 0"):
        allocator.add_extent(0)
    with pytest.raises(ValueError, match="order is 3; it must be between 0 and 2"):
        allocator.allocate(3)
    with pytest.raises(ValueError, match="n is -1"):
        allocator.allocate_many(0, -1)
    with pytest.raises(ValueError, match="order is 3"):
        allocator.claim(0, 3)
    allocator.add_extent(1)
    with pytest.raises(ValueError, match="unit is 2; a block of 4 units starts at a multiple"):
        allocator.claim(2, 2)


def test_claimed_block_is_skipped_and_comes_back_whole():
    allocator = BuddyAllocator(4)
    allocator.add_extent(2)
    allocator.claim(5, 0)
    assert allocator.live_blocks() == [Block(5, 0, 1)]
    with pytest.raises(ValueError, match="the 2 units from 4 are not all free"):
        allocator.claim(4, 1)
    assert [allocator.allocate(0), allocator.allocate(1), allocator.allocate(2)] == [4, 6, 0]
    for unit in (0, 4, 5, 6):
        allocator.free(unit)
    assert allocator.num_free(2) == 2
    allocator.claim(0, 2)
    assert allocator.allocate_many(2, 1) == [4]
