"""New page ids and moves of page pieces for a change of the tensor-parallel degree of a group of devices.

A group of `b` devices holds either one instance of degree `b`, or `k = b / a` instances of degree `a`. Instance `i` of
degree `a` has the devices `range(i*a, (i+1)*a)` of the group.

A *piece* is a sub-page at degree `b`. A sub-page at degree `a` has `k` pieces. If a page has id `n` on a rank of degree
`a`, the ids of its pieces on this rank are `n*k` to `n*k + k - 1`. Piece `m` of rank `j` at degree `a` belongs to rank
`j*k + m` at degree `b`. If both ranks are the same device, the piece can stay in place. For example, if four TP1
instances merge, piece 2 of each page belongs to device 2. If the page was on device 2, this piece can stay in place.

During a change, each page has ids in the *old layout* and in the *new layout*. Each layout has its own allocators and
tables. The functions of this module fill the allocators of the new layout.

A list of tables has one table for each instance of degree `a`. Each table has a column for each page of its instance.
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
    """Allocate pages for a merge of `k` instances of degree `a` to degree `b`. Return a new table for each old table.

    Every piece that can stay in place stays. If one piece moves from device d to device e and another piece moves from
    e to d, the two pieces trade slots. The remaining pieces get slots from `BuddyAllocator.allocate_many`, so new
    extents (KV buffers) are filled last.

    Args:
        tables: `[a, P_i]` page ids on each rank, for the `P_i` pages of each instance `i`. Each page occurs once.
        references: `[P_i]` for each instance: the number of references that each page gets.
        geometry: sizes of the pages.
        allocators: empty allocators for the new degree, one for each of the `b` devices. They have all extents of the
            old layout, and maybe more.

    Raises `OutOfPagesError`, and changes nothing, if the pages do not fit. Raises `LayoutError` if the degrees do not
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
        offered = [
            _offered_slots(device, instance, own, a, k)[: table.shape[1]] for instance, table in enumerate(tables)
        ]
        for table, ids, refs in zip(new_tables, offered, references, strict=True):
            _claim(allocator, ids, refs[: len(ids)], geometry, b)
            table[device, : len(ids)] = ids
        for table, ids, refs in zip(new_tables, offered, references, strict=True):
            units = allocator.allocate_many(order, table.shape[1] - len(ids))
            _add_references(allocator, units, refs[len(ids) :])
            table[device, len(ids) :] = np.array(units, np.int32) // geometry.units_per_page(b)
    return new_tables


def staying_pieces(table: Int32[np.ndarray, "b _"], k: int) -> Int[np.ndarray, " k"]:
    """Return, for each of the `k` instances of a split, how many page pieces of a sequence could stay in place there.

    `table` has the page ids of the sequence before the split, at degree `b`.
    """
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
    """Allocate pages for a split of degree `b` to `k` instances of degree `a`. Return a new table for each instance.

    At most one piece of a page is on the same device before and after the split. If possible, this piece keeps its
    slot, and the page gets the aligned block of `k` slots around this slot. This is possible if the piece has the right
    position in the block, and if the block is free in the new layout. All other pages get the free blocks with the
    fewest pieces of the old layout, so that few moves wait for other moves.

    Args:
        tables: `[b, P_i]` page ids before the split, for the `P_i` pages that each instance `i` gets
            (`kvcache.assignment`). A page may go to several instances.
        references: `[P_i]` for each instance: the number of references that each page gets.
        geometry: sizes of the pages.
        allocators: allocators for the new degree, one for each of the `b` devices. Their extents are the first extents
            of the old layout.

    Raises `OutOfPagesError`, and changes nothing, if the pages do not fit. Raises `LayoutError` if the degrees do not
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
        # Pages in extents that become weights again have ids behind the extents of the new layout.
        occupied = np.unique(np.concatenate([table[device] for table in tables])) // k
        pieces_in = np.bincount(occupied, minlength=len(free))
        blocks = np.flatnonzero(free)
        blocks = blocks[np.argsort(pieces_in[blocks], kind="stable")]
        rest = ids < 0
        ids[rest] = blocks[: np.count_nonzero(rest)]
        _claim(allocator, ids, references[instance], geometry, a)
        new_tables[instance][device % a] = ids
    return new_tables


def moves(
    old_tables: Sequence[Int32[np.ndarray, "_ _"]],
    new_tables: Sequence[Int32[np.ndarray, "_ _"]],
) -> tuple[Int64[np.ndarray, "M 2"], Int64[np.ndarray, "M 2"]]:
    """Return the moves of all pieces that do not stay in place, as inputs `(source, target)` of `plan_phases`.

    Each row is (device in the group, piece id). If a page goes to several instances, its pieces occur several times.

    Args:
        old_tables: `[tp, P_i]` page ids before the change, for each instance `i` of the lower degree.
        new_tables: page ids after the change, for the same pages in the same order: the result of `place_up` or
            `place_down`, updated for pages that were released or reserved since then.

    Raises `LayoutError` if the layouts have different numbers of pages.
    """
    num_pages = [[table.shape[1] for table in tables] for tables in (old_tables, new_tables)]
    if num_pages[0] != num_pages[1]:
        raise LayoutError(
            f"the instances have {num_pages[0]} pages in the old layout, {num_pages[1]} in the new layout"
        )
    empty = np.zeros((0, 2), np.int64)
    if not any(num_pages[0]):
        return empty, empty
    degree = max(len(table) for table in [*old_tables, *new_tables])
    source, target = (
        np.concatenate([empty, *(_pieces(table, i, degree) for i, table in enumerate(tables))])
        for tables in (old_tables, new_tables)
    )
    changed = (source != target).any(axis=1)
    return source[changed], target[changed]


def _pieces(table: Int32[np.ndarray, "tp pages"], instance: int, degree: int) -> Int64[np.ndarray, "pieces 2"]:
    """Return `(device, piece id)` of all pieces in a table, ordered by head and then by page.

    `degree` is the higher degree, `b`. `instance` is the index of an instance of degree `a`. If the table has degree
    `b`, `instance` is ignored, because there is only one instance.
    """
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
    """Return the index (0 to `k - 1`) of the piece of a degree-`a` page that a device has at both degrees, or None."""
    piece = device - device % a * k
    return piece if 0 <= piece < k else None


def _offered_slots(device: int, instance: int, own: Int32[np.ndarray, " P"], a: int, k: int) -> Int32[np.ndarray, " _"]:
    """Return the slots on `device`, as piece ids, in which pieces of `instance` are written in a trade of slots.

    All pieces that `device` gets from `instance` come from one device, maybe from `device` itself. The result has the
    slots of the pieces that `device` sends to that device in return. `own` has the ids of the degree-`a` pages on
    `device`.
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
    """Raise the number of references of each block from 1 to the given number."""
    for unit, number in zip(units, references.tolist(), strict=True):
        for _ in range(number - 1):
            allocator.share(unit)


def _free_blocks(allocator: BuddyAllocator, block_units: int) -> Bool[np.ndarray, " _"]:
    """Return a mask with an entry for each aligned block of `block_units` units: whether the block is free."""
    end = max((start + units for start, units in allocator.extents), default=0)
    free = np.zeros(end, bool)
    for start, units in allocator.extents:
        free[start : start + units] = True
    for unit, order, _ in allocator.live_blocks():
        free[unit : unit + (1 << order)] = False
    return np.asarray(free.reshape(-1, block_units).all(axis=1))
