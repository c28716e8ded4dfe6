"""Where pages go when the TP degree of a group of devices changes, and the moves that bring them there.

A group of `b` devices holds `k = b / a` instances of degree `a`, instance `i` on devices `i*a .. i*a + a - 1`, or one
instance of degree `b`. A *piece* is a sub-page of degree `b`, and its id its first unit divided by a piece's units.
Piece `m` of local page `n` at degree `a` has id `n*k + m`. Since heads are in order, the pieces of rank `j` of an
instance of degree `a` belong to ranks `j*k .. j*k + k - 1` at degree `b`, and piece `m` of rank `j` to rank `j*k + m`.
Where that is the device on which it lies already, the piece can stay in its place.

While the layers of a group change one after the other, its pages are in two *views*, each with allocators and tables
of its own. The functions here fill the allocators of the view to come. Pages are columns of tables, as in
`kvcache.pages`; a list of tables has one for each instance of degree `a`, with the distinct pages of that instance.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.geometry import PageGeometry
from sharding.errors import LayoutError


def place_up(
    tables: Sequence[Int32[np.ndarray, "a _"]],
    references: Sequence[Int[np.ndarray, " _"]],
    geometry: PageGeometry,
    allocators: Sequence[BuddyAllocator],
) -> list[Int32[np.ndarray, "b _"]]:
    """Places the pages of `k` instances of degree `a` at degree `b`: returns their tables, in the same order.

    Pieces that can stay where they are do. Of the others, one that comes from a device gets the slot of one that goes
    there, so that they change places. What is left is placed by `BuddyAllocator.allocate`: extents that are new are
    filled last.

    Args:
        tables: `[a, P_i]` local page ids of the distinct pages of instance `i`.
        references: `[P_i]` references that each page gets.
        geometry: of the pages.
        allocators: of the view to come, one a device (`b` of them), with nothing live and at least the extents of the
            old view.

    Raises `OutOfPagesError`, with nothing changed, where they do not fit, and `LayoutError` for degrees that do not
    match.
    """
    a, b, k = len(tables[0]), len(allocators), len(tables)
    _check_degrees(a, b, k)
    order = geometry.order(b)
    num_pages = sum(table.shape[1] for table in tables)
    room = [allocator.num_free(order) for allocator in allocators]
    if num_pages > min(room):
        raise OutOfPagesError(f"{num_pages} pages at TP{b} do not fit: the ranks have room for {room} pages")
    new_tables = [np.zeros((b, table.shape[1]), np.int32) for table in tables]
    if not num_pages:
        return new_tables
    for device, allocator in enumerate(allocators):
        own = tables[device // a][device % a]
        given = [_given_slots(device, instance, own, a, k)[: table.shape[1]] for instance, table in enumerate(tables)]
        for table, ids, refs in zip(new_tables, given, references, strict=True):
            _claim(allocator, ids, refs[: len(ids)], geometry, b)
            table[device, : len(ids)] = ids
        for table, ids, refs in zip(new_tables, given, references, strict=True):
            units = allocator.allocate_many(order, table.shape[1] - len(ids))
            _add_references(allocator, units, refs[len(ids) :])
            table[device, len(ids) :] = np.array(units, np.int32) // geometry.units_per_page(b)
    return new_tables


def staying_pieces(table: Int32[np.ndarray, "b _"], k: int) -> Int[np.ndarray, " k"]:
    """How many of a sequence's pieces lie where they could stay, on each of `k` instances that it might go to."""
    a = len(table) // k
    counts = np.zeros(k, np.int64)
    for device, ids in enumerate(table):
        piece = _staying_piece(device, a, k)
        if piece is not None:
            counts[device // a] += np.count_nonzero(ids % k == piece)
    return counts


def place_down(
    tables: Sequence[Int32[np.ndarray, "b _"]],
    references: Sequence[Int[np.ndarray, " _"]],
    geometry: PageGeometry,
    allocators: Sequence[BuddyAllocator],
) -> list[Int32[np.ndarray, "a _"]]:
    """Places pages of degree `b` on `k` instances of degree `a`: returns the instances' tables, in the same order.

    A page gets, on each device, the block in which the piece of it that lies there can stay, if that block is free.
    Otherwise it gets the free block that holds fewest pieces in the old view, so that few moves wait for others.

    Args:
        tables: `[b, P_i]` local page ids of the distinct pages that instance `i` gets, see `kvcache.assignment`. A
            page may go to several instances.
        references: `[P_i]` references that each page gets.
        geometry: of the pages.
        allocators: of the view to come, one a device (`b` of them). Its extents are the first ones of the old view.

    Raises `OutOfPagesError`, with nothing changed, where they do not fit, and `LayoutError` for degrees that do not
    match.
    """
    b, k = len(allocators), len(tables)
    a = b // k
    _check_degrees(a, b, k)
    order = geometry.order(a)
    num_pages = [table.shape[1] for table in tables]
    room = [min(allocator.num_free(order) for allocator in allocators[i * a : (i + 1) * a]) for i in range(k)]
    if any(n > free for n, free in zip(num_pages, room, strict=True)):
        raise OutOfPagesError(f"{num_pages} pages at TP{a} do not fit: the instances have room for {room} pages")
    new_tables = [np.zeros((a, n), np.int32) for n in num_pages]
    if not any(num_pages):
        return new_tables
    for device, allocator in enumerate(allocators):
        instance = device // a
        free = _free_blocks(allocator, geometry.units_per_page(a))
        ids = np.full(num_pages[instance], -1)
        piece = _staying_piece(device, a, k)
        if piece is not None:
            block, place = np.divmod(tables[instance][device], k)
            known = np.minimum(block, len(free) - 1)
            stays = (place == piece) & (block < len(free)) & free[known]
            ids[stays] = block[stays]
            free[ids[stays]] = False
        # Ids beyond the extents of the view to come are those of extents that become weights again.
        occupied = np.unique(np.concatenate([table[device] for table in tables])) // k
        pieces_in = np.bincount(occupied, minlength=len(free))
        blocks = np.flatnonzero(free)
        blocks = blocks[np.argsort(pieces_in[blocks], kind="stable")]
        rest = ids < 0
        ids[rest] = blocks[: np.count_nonzero(rest)]
        _claim(allocator, ids, references[instance], geometry, a)
        new_tables[instance][device % a] = ids
    return new_tables


def place_within(
    table: Int32[np.ndarray, "tp _"],
    references: Int[np.ndarray, " _"],
    geometry: PageGeometry,
    allocators: Sequence[BuddyAllocator],
) -> Int32[np.ndarray, "tp _"]:
    """Places an instance's distinct pages again at the same degree: those that lie in free blocks stay.

    Args:
        table: `[tp, P]` local page ids.
        references: `[P]` references that each page gets.
        allocators: of the view to come, one a rank. Its extents are the first ones of the old view.

    Raises `OutOfPagesError`, with nothing changed, where they do not fit.
    """
    tp, num_pages = table.shape
    room = [allocator.num_free(geometry.order(tp)) for allocator in allocators]
    if num_pages > min(room):
        raise OutOfPagesError(f"{num_pages} pages at TP{tp} do not fit: the ranks have room for {room} pages")
    placed = table.copy()
    for ids, allocator in zip(placed, allocators, strict=True):
        free = _free_blocks(allocator, geometry.units_per_page(tp))
        stays = ids < len(free)
        stays[stays] = free[ids[stays]]
        free[ids[stays]] = False
        ids[~stays] = np.flatnonzero(free)[: np.count_nonzero(~stays)]
        _claim(allocator, ids, references, geometry, tp)
    return placed


def moves(
    old_tables: Sequence[Int32[np.ndarray, "_ _"]],
    new_tables: Sequence[Int32[np.ndarray, "_ _"]],
    *,
    staying: bool = False,
) -> tuple[Int64[np.ndarray, "M 2"], Int64[np.ndarray, "M 2"]]:
    """(rank, piece id) of each piece that changes its place, and of the place that it goes to, for `plan_phases`.

    `old_tables[i]` and `new_tables[i]` are the pages of instance `i` of the lower degree in both views, column by
    column: from `place_up` or `place_down`, with what sequences got and gave back since. A source occurs several times
    where a page goes to several instances. With `staying`, pieces that stay where they are are listed as well.
    """
    num_pages = [[table.shape[1] for table in tables] for tables in (old_tables, new_tables)]
    if num_pages[0] != num_pages[1]:
        raise LayoutError(f"the instances have {num_pages[0]} pages in the old view, {num_pages[1]} in the new one")
    empty = np.zeros((0, 2), np.int64)
    if not any(num_pages[0]):
        return empty, empty
    degree = max(len(table) for table in [*old_tables, *new_tables])
    source, target = (
        np.concatenate([empty, *(_pieces(table, i, degree) for i, table in enumerate(tables))])
        for tables in (old_tables, new_tables)
    )
    changed = (source != target).any(axis=1) | staying
    return source[changed], target[changed]


def _pieces(table: Int32[np.ndarray, "tp pages"], instance: int, degree: int) -> Int64[np.ndarray, "N 2"]:
    """(rank, piece id) of all pieces of an instance's pages: piece by piece, in the order of heads."""
    tp, num_pages = table.shape
    k = degree // tp
    rank, piece = np.divmod(np.arange(degree), k)
    first_device = instance * tp if tp < degree else 0
    devices = np.broadcast_to(first_device + rank[:, None], (degree, num_pages))
    return np.stack([devices, table[rank].astype(np.int64) * k + piece[:, None]], axis=2).reshape(-1, 2)


def _check_degrees(a: int, b: int, k: int) -> None:
    if a * k != b or k < 2:
        raise LayoutError(f"{b} devices cannot hold {k} instances of degree {a}")


def _staying_piece(device: int, a: int, k: int) -> int | None:
    """Which piece of the pages of degree `a` on a device belongs to that device at degree `b` as well, if one does."""
    piece = device - device % a * k
    return piece if 0 <= piece < k else None


def _given_slots(device: int, instance: int, own: Int32[np.ndarray, " P"], a: int, k: int) -> Int32[np.ndarray, " _"]:
    """Slots on a device, whose pages of degree `a` are `own`, for the pieces that come from an instance.

    Those of the pieces that go to the device where they come from: their own, where that is this one. None where
    nothing goes there.
    """
    piece = instance * a + device // k - device % a * k
    return own * k + piece if 0 <= piece < k else own[:0]


def _claim(
    allocator: BuddyAllocator,
    ids: Int[np.ndarray, " _"],
    references: Int[np.ndarray, " _"],
    geometry: PageGeometry,
    tp: int,
) -> None:
    units = (ids * geometry.units_per_page(tp)).tolist()
    for unit in units:
        allocator.claim(unit, geometry.order(tp))
    _add_references(allocator, units, references)


def _add_references(allocator: BuddyAllocator, units: Iterable[int], references: Int[np.ndarray, " _"]) -> None:
    """Gives blocks that have one reference that many."""
    for unit, number in zip(units, references.tolist(), strict=True):
        for _ in range(number - 1):
            allocator.share(unit)


def _free_blocks(allocator: BuddyAllocator, block_units: int) -> Bool[np.ndarray, " _"]:
    """Whether each aligned block of that many units is free, by its first unit divided by them."""
    end = max((start + units for start, units in allocator.extents), default=0)
    free = np.zeros(end, bool)
    for start, units in allocator.extents:
        free[start : start + units] = True
    for unit, order, _ in allocator.live_blocks():
        free[unit : unit + (1 << order)] = False
    return np.asarray(free.reshape(-1, block_units).all(axis=1))
