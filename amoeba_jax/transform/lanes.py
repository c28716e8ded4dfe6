"""Divide sequences and cached prefixes among lanes, and move sequences and prefixes from lane to lane.

A lane is a share of an instance's sequences. When a group of devices merges or splits, the sequences move to new lanes.
Until the end of the merge or split, every page has ids in the old layout and ids in the new layout.

In a split, a cached prefix goes to every instance whose sequences use the prefix. A prefix that no sequence uses goes
to the instance with the most free pages. If not all prefixes fit, the least recently used prefixes are dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from kvcache.assignment import assign_down
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import CachedPage
from kvcache.relayout import staying_pieces
from sharding.placement import Home

Requeue = Callable[[Instance, Sequence], None]
"""Function that removes a sequence from an instance and puts the sequence into the queue of waiting sequences.

When the sequence runs again later, it is computed again from its tokens.
"""


@dataclass(frozen=True)
class LanePages:
    """Sequences and cached pages for a new lane, with the page ids in the old layout.

    Attributes:
        sequences: sequences for the new lane.
        cached: cached pages for the new lane, in the order of `PrefixCache.pages`.
        table: page ids, `[tp, pages]`, with one row for each rank of the old layout. A page has one column if it is in
            `cached` or if at least one of the `sequences` uses it. The columns are sorted by the ids on rank 0.
        references: numbers of references, `[pages]`, with one number for each column (page) of `table`: the count of
            `sequences` that use the page, plus 1 if the page is in `cached`.
    """

    sequences: list[Sequence]
    cached: list[CachedPage]
    table: Int32[np.ndarray, "tp pages"]
    references: Int[np.ndarray, " pages"]

    @classmethod
    def of(cls, sequences: list[Sequence], cached: list[CachedPage], tp: int) -> "LanePages":
        """Return a `LanePages` with `sequences` and `cached`. `tp` is the number of ranks of the old layout."""
        if not sequences and not cached:
            return cls([], [], np.empty((tp, 0), np.int32), np.empty(0, np.int64))
        tables = [s.pages.table for s in sequences if s.pages is not None]
        tables.append(np.array([page.column for page in cached], np.int32).reshape(len(cached), tp).T)
        table = np.concatenate(tables, axis=1)
        # No two pages have the same id on rank 0.
        _, first, counts = np.unique(table[0], return_index=True, return_counts=True)
        return cls(sequences, cached, table[:, first], counts)

    @property
    def num_pages(self) -> int:
        return self.table.shape[1]

    def columns(self, ids: Int32[np.ndarray, " pages"]) -> Int[np.ndarray, " pages"]:
        """Return the index of the column in `table` for each page. `ids` has the id of each page on rank 0."""
        return np.searchsorted(self.table[0], ids)


def deal(lane: Lane, room: list[int], limits: list[int]) -> list[LanePages]:
    """Divide the sequences and cached pages of a lane among the new instances of a split.

    Return one `LanePages` for each new instance. Cached pages that do not fit are left out. Raises `OutOfPagesError` if
    the sequences do not fit.

    Args:
        room: list with the number of free pages of each new instance.
        limits: list with the maximum number of sequences of each new instance.
    """
    parts: list[list[Sequence]] = [[] for _ in room]
    if lane.running:
        tables = [s.pages.table for s in lane.running if s.pages is not None]
        staying = [staying_pieces(table, len(room)) for table in tables]
        indices = assign_down([table[0] for table in tables], room, staying=staying, limit=limits)
        for sequence, index in zip(lane.running, indices, strict=True):
            parts[index].append(sequence)
    cached = _deal_prefixes(lane.cache.pages(), parts, room)
    return [LanePages.of(part, own, lane.pages.tp) for part, own in zip(parts, cached, strict=True)]


def dealt(lane: Lane, count: int) -> list[LanePages]:
    """Divide the sequences and cached pages of a lane into `count` parts, one for each new lane.

    The numbers of sequences in two parts differ by at most one. A cached page goes to every part with a sequence that
    uses the page. If no sequence uses the page, the page goes to the first part. There is one exception: such a page is
    left out if the first part does not have the preceding page of the prefix.
    """
    parts: list[list[Sequence]] = [[] for _ in range(count)]
    pages = {s: 0 if s.pages is None else s.pages.num_pages for s in lane.running}
    for sequence in sorted(lane.running, key=lambda s: -pages[s]):
        min(parts, key=lambda part: (len(part), sum(pages[s] for s in part))).append(sequence)
    used = [len({page for s in part if s.pages for page in s.pages.table[0].tolist()}) for part in parts]
    cached = lane.cache.pages()
    given = _deal_prefixes(cached, parts, [used[0] + len(cached), *used[1:]])
    return [LanePages.of(part, own, lane.pages.tp) for part, own in zip(parts, given, strict=True)]


def _deal_prefixes(pages: list[CachedPage], parts: list[list[Sequence]], room: list[int]) -> list[list[CachedPage]]:
    """Divide cached pages among parts. Return a list of cached pages for each part.

    A part gets all cached pages that its sequences use. These are the rules for a page that no sequence uses:

    - The first page of a prefix goes to the part with the most free pages.
    - A later page goes to a part that has the preceding page of the prefix. If no part has the preceding page, the
      later page is left out.
    - If the part to which a page should go has no free pages, the page is left out.

    Args:
        pages: all cached pages.
        parts: list with the sequences of each part.
        room: list with the maximum number of pages of each part. Pages of sequences and cached pages both count.
    """
    used = [{page for s in part if s.pages is not None for page in s.pages.table[0].tolist()} for part in parts]
    left = [free - len(own) for free, own in zip(room, used, strict=True)]
    found: list[set[bytes]] = [{p.key for p in pages if p.column[0] in own} for own in used]
    roots = _roots(pages)
    chosen: dict[bytes, int] = {}
    latest = {roots[page.key][0]: index for index, page in enumerate(pages)}
    # Most recently used prefixes first. In a prefix, earlier pages first: later pages are useless without them.
    in_order = sorted(enumerate(pages), key=lambda it: (-latest[roots[it[1].key][0]], roots[it[1].key][1], -it[0]))
    for _, page in in_order:
        if any(page.key in own for own in found):
            continue
        root, _ = roots[page.key]
        with_parent = [i for i, own in enumerate(found) if page.parent in own]
        index = with_parent[0] if with_parent else chosen.setdefault(root, int(np.argmax(left)))
        if left[index] > 0 and (page.parent is None or page.parent in found[index]):
            left[index] -= 1
            found[index].add(page.key)
    return [[page for page in pages if page.key in own] for own in found]


def _roots(pages: list[CachedPage]) -> dict[bytes, tuple[bytes, int]]:
    """Map the key of each cached page to `(key of the root, distance from the root in pages)`.

    The root of a page is the first cached page of the prefix that ends with this page. A root has distance 0.
    """
    parents = {page.key: page.parent for page in pages}
    roots: dict[bytes, tuple[bytes, int]] = {}
    for page in pages:
        chain, key = [], page.key
        while key not in roots and (parent := parents[key]) in parents and parent is not None:
            chain.append(key)
            key = parent
        root, depth = roots.setdefault(key, (key, 0))
        for number, later in enumerate(reversed(chain), depth + 1):
            roots[later] = root, number
    return roots


def settle_references(pool: PagePool, before: list[CachedPage], parts: Items[LanePages]) -> None:
    """Correct the reference counts of a lane's cached pages, after the lane was divided into parts.

    Before the division, the prefix cache of the lane held one reference to each cached page. Each part gets a prefix
    cache of its own, which needs one reference to each page that the part caches. If no part caches a page, the page
    loses one reference. If n parts cache a page, the page gets n - 1 further references.

    Args:
        pool: page pool of the divided lane.
        before: all pages that were in the prefix cache of the divided lane.
        parts: all parts of the divided lane.
    """
    counts: dict[int, int] = defaultdict(int)
    for part in parts:
        for page in part.cached:
            counts[page.column[0]] += 1
    dropped = [page.column for page in before if not counts[page.column[0]]]
    pool.free(_table(dropped, pool.tp))
    again = [page.column for page in before for _ in range(counts[page.column[0]] - 1)]
    pool.share(_table(again, pool.tp))


def lane_at(
    factory: InstanceFactory,
    part: LanePages,
    places: Mapping[Home, tuple[PagePool, Int32[np.ndarray, "ranks pages"]]],
    max_running: int,
) -> tuple[Lane, list[tuple[Sequence, SequencePages]]]:
    """Create a lane for `part`. Return `(lane, [(sequence, pages of the sequence in the new lane), ...])`.

    The new lane has the cached pages of `part`, but no sequences yet. The caller must add the sequences.

    Args:
        part: sequences and cached pages for the new lane.
        places: `{home: (page pool, page ids)}` for each home of the new lane. The page ids at a home, `[ranks, pages]`,
            have one column for each column of `part.table`, in the same order.
        max_running: maximum number of running sequences of the new lane.
    """
    lane = factory.lane({home: pool for home, (pool, _) in places.items()}, max_running)
    table = np.concatenate([rows for _, rows in places.values()])
    columns = table[:, part.columns(np.array([page.column[0] for page in part.cached], np.int32))].T.tolist()
    lane.cache.adopt(page._replace(column=tuple(column)) for page, column in zip(part.cached, columns, strict=True))
    pages = [
        (s, SequencePages(lane.pages, table[:, part.columns(s.pages.table[0])]))
        for s in part.sequences
        if s.pages is not None
    ]
    return lane, pages


def adopt_prefixes(target: Lane, source: Lane, home: Home) -> None:
    """Move the cached pages of the lane `source` to the prefix cache of the lane `target`.

    The cache of `target` takes over the references to these pages. `home` is the only home of `target`. The ids of the
    pages at other homes are dropped.
    """
    rows = source.ranks[home]
    target.cache.adopt(page._replace(column=page.column[rows]) for page in source.cache.pages())


def move_sequences(
    old: list[Instance], views: list[tuple[Instance, Lane, Sequence, SequencePages]], requeue: Requeue
) -> None:
    """Move the sequences of old instances to new instances.

    If the move fails, the sequences that have sampling state on the device are requeued, because this state may have
    been overwritten. The old instances keep all sequences without sampling state. Then the error is raised.

    Args:
        views: for each sequence, a tuple `(new instance, lane of the new instance, sequence, pages in the new lane)`.
        requeue: function that puts a sequence back into the queue, to be computed again.
    """
    before = [(sequence, sequence.pages, sequence.slot) for _, _, sequence, _ in views]
    try:
        for instance, lane, sequence, pages in views:
            sequence.pages = pages
            instance.add(sequence, lane)
    except BaseException:
        for instance, lane, sequence, _ in views:
            if sequence in lane.running:
                instance.leave(sequence, lane)
        for sequence, pages, slot in before:
            sequence.pages, sequence.slot = pages, slot
        for instance in old:
            for sequence in [s for s in instance.running if s.sampling.uses_state]:
                requeue(instance, sequence)
        raise
    for instance in old:
        for lane in instance.lanes:
            lane.running = []


def regroup(target: Lane, lanes: Iterable[Lane], pools: Mapping[Home, PagePool]) -> None:
    """Move the sequences and cached pages of `lanes` to the lane `target`.

    The sequences and cached pages keep only their page ids at the homes of `target`. Page ids at other homes are
    dropped. If `pools` has such a home, the pages at this home are also freed.

    Args:
        pools: `{home: page pool}` for the homes at which pages are freed if `target` does not have the home.
    """
    for lane in lanes:
        kept = np.concatenate([np.arange(lane.pages.tp)[lane.ranks[home]] for home in target.ranks])
        tables = [s.pages.table.copy() for s in lane.running if s.pages is not None]
        for home in (lane.ranks.keys() - target.ranks.keys()) & pools.keys():
            for table in (*tables, lane.cache.table()):
                pools[home].free(table[lane.ranks[home]])
        for sequence, table in zip(lane.running, tables, strict=True):
            sequence.pages = SequencePages(target.pages, table[kept])
            target.running.append(sequence)
        target.cache.adopt(p._replace(column=tuple(p.column[row] for row in kept)) for p in lane.cache.pages())
        lane.running = []


def _table(columns: list[tuple[int, ...]], tp: int) -> Int32[np.ndarray, "tp pages"]:
    return np.array(columns, np.int32).reshape(len(columns), tp).T
