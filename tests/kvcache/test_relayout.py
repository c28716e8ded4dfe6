"""Changes of the degree of a group: new page ids, moves, and the contents of every page afterwards."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.assignment import assign_down
from kvcache.geometry import PageGeometry
from kvcache.migration import PADDING, plan_phases
from kvcache.pages import PagePool
from kvcache.relayout import moves, place_down, place_up, staying_pieces
from sharding.errors import LayoutError

DEGREES = [(1, 2, 2), (1, 2, 4), (1, 4, 4), (2, 4, 4)]  # (a, b, max_tp)


def geometry_of(max_tp: int) -> PageGeometry:
    return PageGeometry(kv_heads=4, page_size=16, head_dim=8, max_tp=max_tp)


def make_allocators(geometry: PageGeometry, num_devices: int, *extents: int) -> list[BuddyAllocator]:
    allocators = [BuddyAllocator(geometry.max_tp) for _ in range(num_devices)]
    for allocator in allocators:
        for num_pages in extents:
            allocator.add_extent(num_pages)
    return allocators


def pools(geometry: PageGeometry, allocators: list[BuddyAllocator], tp: int) -> list[PagePool]:
    return [PagePool(geometry, allocators[i : i + tp], tp) for i in range(0, len(allocators), tp)]


def scattered(random: np.random.Generator, pool: PagePool, num_pages: int) -> np.ndarray:
    """Return pages at random ids, different on each rank, as after long use."""
    tables = [random.permutation(pool.num_total_pages)[:num_pages] for _ in range(pool.tp)]
    for allocator, ids in zip(pool._allocators, tables, strict=True):
        for page in ids.tolist():
            allocator.claim(page * pool.geometry.units_per_page(pool.tp), pool.geometry.order(pool.tp))
    return np.array(tables, np.int32).reshape(pool.tp, num_pages)


def state(allocators: list[BuddyAllocator]) -> list[tuple]:
    return [(a.live_blocks(), a.free_units) for a in allocators]


class Memory:
    """Memory of one layer of `b` devices: the name of the piece in each slot, `[b, pieces]`."""

    def __init__(self, b: int, num_pieces: int) -> None:
        self.b = b
        self.slots = np.full((b, num_pieces), -1)

    def places(self, table: np.ndarray, instance: int) -> list[list[tuple[int, int]]]:
        """Return the slots of the `b` pieces of each page in the order of heads, counted one by one."""
        tp = len(table)
        k = self.b // tp
        first = 0 if tp == self.b else instance * tp
        return [
            [(first + rank, int(table[rank, page]) * k + m) for rank in range(tp) for m in range(k)]
            for page in range(table.shape[1])
        ]

    def write(self, table: np.ndarray, instance: int, names: np.ndarray) -> None:
        for page, places in zip(names.tolist(), self.places(table, instance), strict=True):
            for piece, place in enumerate(places):
                self.slots[place] = page * self.b + piece

    def holds(self, table: np.ndarray, instance: int, names: np.ndarray) -> bool:
        return all(
            [self.slots[place] for place in places] == [page * self.b + piece for piece in range(self.b)]
            for page, places in zip(names.tolist(), self.places(table, instance), strict=True)
        )

    def move(self, old: list[np.ndarray], new: list[np.ndarray], phase_pieces: int) -> None:
        for phase in plan_phases(*moves(old, new), self.b, phase_pieces):
            before = self.slots.copy()
            for s, *place in np.argwhere(phase.send != PADDING).tolist():
                d = s ^ (place[0] if phase.distance is None else phase.distance)
                self.slots[d, phase.receive[d][tuple(place)]] = before[s, phase.send[s][tuple(place)]]


def change_both(random, pools_of: list, old: list, new: list, names: list, shared: list) -> None:
    """Remove some pages and add some, equally in both layouts. Shared pages (`True`) stay."""
    for i in range(len(old)):
        kept = (random.random(len(names[i])) < 0.7) | shared[i]
        for pool, tables in ((pools_of[0][i], old), (pools_of[1][i], new)):
            pool.free(tables[i][:, ~kept])
            tables[i] = tables[i][:, kept]
        names[i] = names[i][kept]
        num_new = min(int(random.integers(0, 8)), pools_of[0][i].num_free_pages, pools_of[1][i].num_free_pages)
        for pool, tables in ((pools_of[0][i], old), (pools_of[1][i], new)):
            tables[i] = np.concatenate([tables[i], pool.allocate(num_new)], axis=1)
        names[i] = np.concatenate([names[i], 1000 * (i + 1) + np.arange(num_new)])


cases = given(
    degrees=st.sampled_from(DEGREES),
    num_pages=st.integers(1, 12),
    fill=st.sampled_from([0.3, 0.9, 1.0]),
    even=st.booleans(),
    extra=st.lists(st.integers(1, 4), max_size=3),
    phase_pieces=st.integers(2, 12),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=200)
@cases
def test_scale_up_keeps_every_page(degrees, num_pages, fill, even, extra, phase_pieces, seed):
    (a, b, max_tp), random = degrees, np.random.default_rng(seed)
    geometry, k = geometry_of(max_tp), b // a
    old_allocators = make_allocators(geometry, b, num_pages)
    old_pools = pools(geometry, old_allocators, a)
    most = round(old_pools[0].num_total_pages * fill)
    tables = [scattered(random, p, most if even else int(random.integers(0, most + 1))) for p in old_pools]
    references = [random.integers(1, 4, table.shape[1]) for table in tables]

    new_allocators = make_allocators(geometry, b, num_pages, *extra)
    (new_pool,) = pools(geometry, new_allocators, b)
    new = place_up(tables, references, geometry, new_allocators)
    assert [table.shape for table in new] == [(b, table.shape[1]) for table in tables]
    for table, expected in zip(new, references, strict=True):
        np.testing.assert_array_equal(new_pool.references(table), expected)
    together = np.concatenate(new, axis=1)
    assert all(len(set(ids.tolist())) == len(ids) for ids in together)
    # From degree 1, one piece of each page stays in place. From 2 to 4, the first piece of rank 0 and the second of
    # rank 3.
    source, _ = moves(tables, new)
    assert len(source) == together.size - sum(table.shape[1] for table in tables)

    names = [np.arange(table.shape[1]) + 100 * i for i, table in enumerate(tables)]
    old, memory = list(tables), Memory(b, new_pool.num_total_pages)
    if not extra or random.random() < 0.5:
        change_both(random, [old_pools, [new_pool] * k], old, new, names, [r > 1 for r in references])
    for i in range(k):
        memory.write(old[i], i, names[i])
    memory.move(old, new, phase_pieces)
    assert all(memory.holds(new[i], i, names[i]) for i in range(k))


@settings(max_examples=200)
@cases
def test_scale_down_keeps_every_page(degrees, num_pages, fill, even, extra, phase_pieces, seed):
    (a, b, max_tp), random = degrees, np.random.default_rng(seed)
    geometry, k = geometry_of(max_tp), b // a
    old_allocators = make_allocators(geometry, b, num_pages, *extra)
    (old_pool,) = pools(geometry, old_allocators, b)
    new_allocators = make_allocators(geometry, b, num_pages)
    new_pools = pools(geometry, new_allocators, a)
    room = new_pools[0].num_total_pages
    table = scattered(random, old_pool, min(round(room * k * fill), old_pool.num_total_pages))
    split = random.integers(0, k, table.shape[1]) if not even else np.arange(table.shape[1]) % k
    pages = [np.flatnonzero(split == i)[:room] for i in range(k)]
    # Some pages go to all instances with free pages.
    pages = [np.unique(np.concatenate([p, np.arange(min(2, room - len(p), table.shape[1]))])) for p in pages]
    tables = [table[:, p] for p in pages]
    references = [random.integers(1, 4, len(p)) for p in pages]

    new = place_down(tables, references, geometry, new_allocators)
    for pool, placed, expected in zip(new_pools, new, references, strict=True):
        assert placed.shape == (a, len(expected))
        np.testing.assert_array_equal(pool.references(placed), expected)
        assert all(len(set(ids.tolist())) == len(ids) for ids in placed)

    memory = Memory(b, old_pool.num_total_pages)
    for i in range(k):
        memory.write(tables[i], i, pages[i])
    _, target = moves(tables, new)
    assert (target[:, 1] < geometry.sub_pages(b) * num_pages).all()
    memory.move(tables, new, phase_pieces)
    assert all(memory.holds(new[i], i, pages[i]) for i in range(k))


@settings(max_examples=60)
@cases
def test_up_and_down_again_while_sequences_come_and_go(degrees, num_pages, fill, even, extra, phase_pieces, seed):
    (a, b, max_tp), random = degrees, np.random.default_rng(seed)
    geometry, k = geometry_of(max_tp), b // a
    low = pools(geometry, make_allocators(geometry, b, num_pages), a)
    tables = [scattered(random, p, round(p.num_total_pages * fill)) for p in low]
    names = [np.arange(table.shape[1]) + 100 * i for i, table in enumerate(tables)]
    ones = [np.ones(table.shape[1], int) for table in tables]
    high_allocators = make_allocators(geometry, b, num_pages, *extra)
    (high,) = pools(geometry, high_allocators, b)
    new = place_up(tables, ones, geometry, high_allocators)
    memory = Memory(b, high.num_total_pages)
    nothing_shared = [np.zeros(len(n), bool) for n in names]
    change_both(random, [low, [high] * k], tables, new, names, nothing_shared)
    for i in range(k):
        memory.write(tables[i], i, names[i])
    memory.move(tables, new, phase_pieces)

    down_allocators = make_allocators(geometry, b, num_pages)
    down = pools(geometry, down_allocators, a)
    # Each instance gets the pages of another one, so that no page returns to its old block.
    high_tables, names = new[1:] + new[:1], names[1:] + names[:1]
    ones = [np.ones(table.shape[1], int) for table in high_tables]
    low_tables = place_down(high_tables, ones, geometry, down_allocators)
    memory.move(high_tables, low_tables, phase_pieces)
    assert all(memory.holds(low_tables[i], i, names[i]) for i in range(k))
    for pool, table in zip(down, low_tables, strict=True):
        pool.free(table)
    assert state(down_allocators) == state(make_allocators(geometry, b, num_pages))


@pytest.mark.parametrize("b", [2, 4])
def test_merge_of_almost_full_ranks_and_the_split_back_are_swaps(b):
    """Ranks trade in pairs, in the minimum number of phases, for any page ids."""
    geometry, num_pages, used, phase_pieces = geometry_of(4), 100, 96, 8
    tables = [np.random.default_rng(r).permutation(num_pages)[None, :used].astype(np.int32) for r in range(b)]
    ones = [np.ones(used, int)] * b
    high = place_up(tables, ones, geometry, make_allocators(geometry, b, num_pages, 20))
    assert all(ids.max() < num_pages * b for ids in high), "extents that are new stay empty"
    low = place_down(high, ones, geometry, make_allocators(geometry, b, num_pages))
    for old, new in ((tables, high), (high, low)):
        phases = plan_phases(*moves(old, new), b, phase_pieces)
        rooms = used // (b * phase_pieces)
        assert Counter(phase.distance for phase in phases) == dict.fromkeys(range(1, b), rooms)
    np.testing.assert_array_equal(np.concatenate(low), np.concatenate(tables))


def test_scale_up_swaps_pieces_and_keeps_whole_pages_whole():
    geometry = geometry_of(4)
    tables = [np.array([[2, 0]], np.int32), *(np.array([[1]], np.int32) for _ in range(3))]
    allocators = make_allocators(geometry, 4, 3, 2)
    new = place_up(tables, [np.ones(t.shape[1], int) for t in tables], geometry, allocators)
    # Rank 0 keeps pieces 8 and 0. A page of each other instance trades slots with a piece of its page 2. Page 0 of
    # instance 0 has no partner: its pieces go to the first free page, so that the other pages stay whole.
    np.testing.assert_array_equal(new[0], [[8, 0], [4, 0], [4, 0], [4, 0]])
    np.testing.assert_array_equal(new[1], [[9], [5], [5], [5]])
    np.testing.assert_array_equal(new[2], [[10], [6], [6], [6]])
    np.testing.assert_array_equal(new[3], [[11], [7], [7], [7]])
    assert all(ids.max() < 12 for ids in np.concatenate(new, axis=1)), "the new extent is filled last"


def test_scale_down_prefers_blocks_where_a_piece_stays_then_empty_ones():
    geometry = geometry_of(2)
    # Rank 0: the first half of page 0 can stay in block 1. The first half of page 1 is in the second half of block 0,
    # so it moves to the empty block 2.
    table = np.array([[2, 1, 3], [1, 2, 7]], np.int32)
    allocators = make_allocators(geometry, 2, 4)
    tables = [table[:, :2], table[:, 2:]]
    new = place_down(tables, [np.ones(2, int), np.ones(1, int)], geometry, allocators)
    np.testing.assert_array_equal(new[0], [[1, 2]])
    np.testing.assert_array_equal(new[1], [[3]])  # 7 is the second half of block 3


def test_pages_that_do_not_fit_change_nothing():
    geometry = geometry_of(4)
    allocators = make_allocators(geometry, 2, 2)
    tables = [np.array([[0, 1]], np.int32), np.array([[0, 1, 2]], np.int32)]
    ones = [np.ones(2, int), np.ones(3, int)]
    with pytest.raises(OutOfPagesError, match=r"5 pages at TP2 do not fit: the ranks have room for \[4, 4\]"):
        place_up(tables, ones, geometry, allocators)
    with pytest.raises(OutOfPagesError, match=r"\[2, 3\] pages at TP1 do not fit.*room for \[2, 2\]"):
        place_down([table.repeat(2, axis=0) for table in tables], ones, geometry, allocators)
    assert state(allocators) == state(make_allocators(geometry, 2, 2))


def test_degrees_must_match():
    geometry = geometry_of(4)
    page = np.zeros((1, 1), np.int32)
    one = [np.ones(1, int)]
    with pytest.raises(LayoutError, match="4 devices cannot hold 2 instances of degree 1"):
        place_up([page, page], one * 2, geometry, make_allocators(geometry, 4, 1))
    with pytest.raises(LayoutError, match="4 devices cannot hold 3 instances"):
        place_down([page.repeat(4, axis=0)] * 3, one * 3, geometry, make_allocators(geometry, 4, 1))
    with pytest.raises(LayoutError, match=r"\[1, 1\] pages in the old layout, \[2, 0\] in the new layout"):
        moves([page, page], [np.zeros((2, n), np.int32) for n in (2, 0)])


# Assignment of sequences


def used(pages: list[np.ndarray], assignment: np.ndarray, num_instances: int) -> list[int]:
    groups = [[p for p, i in zip(pages, assignment.tolist(), strict=True) if i == n] for n in range(num_instances)]
    return [len(set(np.concatenate([np.zeros(0, int), *group]).tolist())) for group in groups]


def alone(*lengths: int) -> list[np.ndarray]:
    """Return sequences that share no pages."""
    return np.split(np.random.default_rng(0).permutation(sum(lengths)), np.cumsum(lengths)[:-1])


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=12),
    room=st.lists(st.integers(0, 40), min_size=2, max_size=4),
    universe=st.integers(12, 60),
    stay=st.booleans(),
    limit=st.none() | st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_assignment_fits(lengths, room, universe, stay, limit, seed):
    random = np.random.default_rng(seed)
    pages = [random.permutation(universe)[:length] for length in lengths]
    staying = [random.integers(0, 4, len(room)) for _ in lengths] if stay else None
    try:
        assignment = assign_down(pages, room, staying=staying, limit=limit)
    except OutOfPagesError:
        # An assignment always exists if everything fits on one instance.
        fits = len(np.unique(np.concatenate(pages))) <= max(room)
        assert not fits or (limit is not None and len(pages) > limit)
        return
    assert assignment.dtype == np.int32
    assert assignment.shape == (len(lengths),)
    assert limit is None or max(Counter(assignment.tolist()).values(), default=0) <= limit
    assert all(n <= free for n, free in zip(used(pages, assignment, len(room)), room, strict=True))


def test_longest_sequences_go_first_to_the_emptiest_instance():
    assert assign_down(alone(1, 5, 3, 2, 4), [10, 8, 7]).tolist() == [1, 0, 2, 0, 1]
    assert assign_down([], [3, 3]).tolist() == []


def test_sharing_sequences_go_together_where_they_do_not_fit_otherwise():
    prompt = np.arange(100, 104)
    forks = [np.concatenate([prompt, own]) for own in alone(2, 2, 2)]
    # Sequences with a common system prompt use all instances.
    assert assign_down(forks, [20, 20, 20]).tolist() == [0, 1, 2]
    assert assign_down(forks, [10, 3, 3]).tolist() == [0, 0, 0]
    # The longest sequence must not take the only instance that fits the group.
    assert assign_down([*forks, np.arange(200, 207)], [11, 7, 5]).tolist() == [0, 0, 0, 1]
    # A group that fits nowhere is divided. The prompt is on both instances then.
    assignment = assign_down(forks, [9, 8])
    assert used(forks, assignment, 2) == [8, 6]


def test_sequences_return_to_where_they_came_from_unless_that_is_much_fuller():
    geometry, b = geometry_of(4), 4
    tables = [np.arange(6, dtype=np.int32)[None] for _ in range(b)]
    high = place_up(tables, [np.ones(6, int)] * b, geometry, make_allocators(geometry, b, 8))
    parts = [high[i][:, half] for half in (slice(0, 3), slice(3, 6)) for i in (2, 0, 3, 1)]
    staying = [staying_pieces(table, b) for table in parts]
    np.testing.assert_array_equal(staying[:4], 3 * np.eye(4, dtype=int)[[2, 0, 3, 1]])
    pages = [table[0] for table in parts]
    assert assign_down(pages, [8] * 4, staying=staying).tolist() == [2, 0, 3, 1] * 2
    # The order of sequences does not matter.
    homes = [i for i in range(4) for _ in range(4)]
    pages, staying = alone(*[3] * 16), [3 * np.eye(4, dtype=int)[i] for i in homes]
    assert assign_down(pages, [12] * 4, staying=staying).tolist() == homes
    # All pieces are on instance 2. It keeps two sequences, because the others have many more free pages.
    pages, staying = alone(*[3] * 5), [np.array([0, 0, 3, 0])] * 5
    assert sorted(assign_down(pages, [9] * 4, staying=staying).tolist()) == [0, 1, 2, 2, 3]
    assert assign_down(pages[:2], [9, 9, 2, 9], staying=staying[:2]).tolist() == [0, 1]
    # The sequences that lose the fewest staying pieces move.
    staying = [np.array(stays) for stays in ([3, 0], [3, 2], [3, 0], [3, 1])]
    assert assign_down(alone(3, 3, 3, 3), [12, 12], staying=staying).tolist() == [0, 1, 0, 1]


def test_no_instance_gets_more_sequences_than_it_takes():
    pages, staying = alone(*[2] * 8), [np.array([2, 0, 0, 0])] * 8
    assignment = assign_down(pages, [40] * 4, staying=staying, limit=2)
    assert Counter(assignment.tolist()) == {0: 2, 1: 2, 2: 2, 3: 2}
    # Many short sequences would balance the pages of one long sequence.
    pages = alone(20, *[1] * 7)
    assert max(Counter(assign_down(pages, [40] * 2, limit=4).tolist()).values()) == 4
    assert Counter(assign_down(pages, [40] * 2, limit=[7, 1]).tolist()) == {0: 7, 1: 1}
    with pytest.raises(OutOfPagesError, match=r"and for \[3, 3\] sequences"):
        assign_down(pages, [40] * 2, limit=3)


def test_tight_room_is_found():
    assert used(alone(5, 4, 3, 3, 3), assign_down(alone(5, 4, 3, 3, 3), [9, 9]), 2) == [9, 9]


def test_sequences_that_do_not_fit_are_named():
    match = r"3 sequences with 12 pages together, 5 the longest, do not fit into 2 instances with room for \[4, 6\]"
    with pytest.raises(OutOfPagesError, match=match):
        assign_down(alone(5, 4, 3), [4, 6])
