"""Pages kept after their sequences ended, found again by the tokens they hold.

A page is identified by a hash of all tokens up to its end, so that equal prefixes have equal keys, page by page.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool, SequencePages

_KEY_BYTES = 16


class CachedPage(NamedTuple):
    """A page of a `PrefixCache`.

    Attributes:
        key: of its tokens and all before them.
        parent: key of the page before it; None for the first of a prefix.
        column: its ids, a row of a table each.
    """

    key: bytes
    parent: bytes | None
    column: tuple[int, ...]


class PageKeys:
    """The keys of a growing token sequence's full pages.

    Each is a hash of the page's tokens and the key before it; the first follows a hash of `salt`. Sequences with
    different salts (tenants) never have a key in common.
    """

    def __init__(self, page_size: int, salt: str = "") -> None:
        self.keys: list[bytes] = []
        self._page_size = page_size
        # Hashed under a name of its own, so that no salt can be made to pass for the pages of another tenant.
        root = salt.encode("utf-8", "surrogatepass")
        self._last = hashlib.blake2b(root, digest_size=_KEY_BYTES, person=b"salt").digest()
        self._tail: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far, those after the last full page included."""
        return len(self.keys) * self._page_size + len(self._tail)

    def extend(self, tokens: Iterable[int]) -> None:
        """Takes in the tokens that follow. The cost is that of the new tokens, however long the sequence is."""
        self._tail.extend(tokens)
        size = self._page_size
        num_full = len(self._tail) // size * size
        for start in range(0, num_full, size):
            page = np.array(self._tail[start : start + size], np.int32).tobytes()
            self._last = hashlib.blake2b(self._last + page, digest_size=_KEY_BYTES, person=b"page").digest()
            self.keys.append(self._last)
        del self._tail[:num_full]


class PageLender(Protocol):
    """Others have pages of a pool's allocators, and give some up when they are asked to."""

    def num_free_pages(self) -> int:
        """Pages that the pool would have free if they gave up all that they can."""
        ...

    def make_free(self, num_pages: int) -> None:
        """Give up as few as needed for the pool to have that many pages free, or all that they can."""
        ...


class PrefixCache:
    """Shares computed pages of one pool between sequences, and keeps those that no sequence uses while there is room.

    A cached page has one reference of the cache, besides those of the sequences that use it. Where it has no other it
    is evictable: it counts as available, and `reserve` takes it when nothing is free. So all sequences of the pool
    must get, copy and give back their pages here (`PagePool.share` is fine: it needs no new page).

    Pages are told apart by their id on rank 0; a page is its whole column of a table, on all ranks.

    Args:
        pool: the pages; used by one thread, as this is.
        enabled: False caches nothing, and everything else works alike.

    Attributes:
        lender: gives up pages of its own before any that are cached here are evicted.
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self._columns: dict[bytes, tuple[int, ...]] = {}
        self._keys: dict[int, bytes] = {}  # by the page's id on rank 0
        self._parents: dict[bytes, bytes | None] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()  # the next to go first
        self.lender: PageLender | None = None

    @property
    def num_cached_pages(self) -> int:
        return len(self._columns)

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that no sequence uses."""
        return len(self._evictable)

    @property
    def num_available_pages(self) -> int:
        """Pages that `reserve` can add right now, all at once: free or evictable."""
        return self._num_free_pages + len(self._evictable)

    @property
    def _num_free_pages(self) -> int:
        return self.pool.num_free_pages if self.lender is None else self.lender.num_free_pages()

    # Prefixes

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """Pages that `match` would return. Takes none and counts nothing."""
        for index, key in enumerate(keys):
            if key not in self._columns:
                return index
        return len(keys)

    def fits(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        """Whether `match(keys)` and then `reserve(..., num_tokens)` would succeed. Takes none and counts nothing.

        Not the same as comparing `num_available_pages`: an evictable page that is matched is no longer available.
        """
        num_cached = self.num_cached(keys)
        revived = sum(key in self._evictable for key in keys[:num_cached])
        return self.pool.geometry.pages_for(num_tokens) - num_cached <= self.num_available_pages - revived

    def match(self, keys: Sequence[bytes]) -> SequencePages:
        """A sequence that begins with the longest cached run of leading pages, with a reference to each.

        To compute the token that follows a prompt, its last token must be computed: ask for the keys of the prompt
        without it.
        """
        hits = keys[: self.num_cached(keys)]
        for key in hits:
            self._evictable.pop(key, None)
        table = self._table([self._columns[key] for key in hits])
        self.pool.share(table)
        return SequencePages(self.pool, table)

    def insert(self, keys: Sequence[bytes], pages: SequencePages, start: int = 0) -> None:
        """Caches pages `start .. len(keys)` of a sequence: page `i` holds the keys and values of `keys[i]`.

        They need not be computed yet, if the programs that do are launched before any that reads them, but nothing
        else may be written to them any more. A key that is cached already keeps its page, and the sequence has a
        duplicate, which is free once the sequence is. Should the cached one go first, inserting again from 0 caches
        the duplicate.

        Raises `ValueError` where the sequence has fewer pages, or a page is cached for other tokens.
        """
        if len(keys) > pages.num_pages:
            raise ValueError(f"{len(keys)} keys for a sequence of {pages.num_pages} pages: a page each at most")
        if not self.enabled:
            return
        columns = pages.table[:, start : len(keys)].T.tolist()
        new = {}
        for index, (key, column) in enumerate(zip(keys[start:], columns, strict=True), start):
            if self._keys.get(column[0], key) != key:
                raise ValueError(f"page {index} of the sequence ({column}) is cached for other tokens")
            if key not in self._columns:
                new[key] = tuple(column)
        self.pool.share(self._table(new.values()))
        self._columns.update(new)
        self._keys.update((column[0], key) for key, column in new.items())
        before = [keys[start - 1] if start else None, *keys[start:]]
        self._parents.update((key, parent) for key, parent in zip(keys[start:], before, strict=False) if key in new)

    # Other pools

    def pages(self) -> list[CachedPage]:
        """All cached pages: those that sequences use, then the evictable ones, the next to go first."""
        used = [key for key in self._columns if key not in self._evictable]
        return [CachedPage(key, self._parents[key], self._columns[key]) for key in (*used, *self._evictable)]

    def adopt(self, pages: Iterable[CachedPage]) -> None:
        """Cache pages that were cached over another pool, and whose place in this one `column` is.

        Takes over a reference to each; that to a page whose key is cached already is dropped. The evictable ones are
        evicted in this order, after those that are here.
        """
        adopted = []
        for page in pages:
            adopted.append(page.key)
            if page.key in self._columns:
                self.pool.free(self._table([page.column]))
                continue
            self._columns[page.key], self._keys[page.column[0]] = page.column, page.key
            self._parents[page.key] = page.parent
        self._make_evictable(self._table([self._columns[key] for key in adopted]))

    def table(self) -> Int32[np.ndarray, "tp pages"]:
        """The columns of all cached pages."""
        return self._table(self._columns.values())

    # Room

    def reserve(self, pages: SequencePages, num_tokens: int) -> int:
        """`SequencePages.reserve`, which evicts as many pages as it needs.

        Raises `OutOfPagesError`, with nothing evicted, where they do not fit even so.
        """
        self._make_room(self.pool.geometry.pages_for(num_tokens) - pages.num_pages)
        return pages.reserve(num_tokens)

    def make_private(
        self, pages: SequencePages, index: int
    ) -> tuple[Int32[np.ndarray, " tp"], Int32[np.ndarray, " tp"]] | None:
        """`SequencePages.copy_on_write`, which evicts a page if it needs one. A cached page counts as shared.

        Raises `OutOfPagesError`, with nothing changed, where there is none, and `IndexError` beyond the table.
        """
        if not pages.is_shared(index):
            return None
        self._make_room(1)
        copied = pages.copy_on_write(index)
        assert copied is not None, "shared, as asked before"
        self._make_evictable(copied[0][:, None])
        return copied

    def release(self, pages: SequencePages) -> None:
        """Drops all pages of a sequence. Those that are cached and that no one else uses become evictable.

        Sequences released earlier are evicted first, and of each its last pages: a prefix without its end is worth
        something, an end without its prefix cannot be found.
        """
        table = pages.table.copy()
        pages.release()
        self._make_evictable(table[:, ::-1])

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` evictable pages, least recently used first. Returns how many."""
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must not be negative")
        num_pages = min(num_pages, len(self._evictable))
        keys = [self._evictable.popitem(last=False)[0] for _ in range(num_pages)]
        self._forget(keys)
        return num_pages

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forgets the pages of these keys, as far as they are cached. Those in use stay their sequences' own, the
        others are free."""
        known = [key for key in dict.fromkeys(keys) if key in self._columns]
        for key in known:
            self._evictable.pop(key, None)
        self._forget(known)

    def clear(self) -> None:
        """Forgets all pages. Those in use stay their sequences' own, the others are free."""
        self._forget(list(self._columns))
        self._evictable.clear()

    def _make_room(self, num_pages: int) -> None:
        """Evicts until `num_pages` are free. Raises `OutOfPagesError`, with nothing evicted, where that cannot be."""
        free = self._num_free_pages
        if num_pages > free + len(self._evictable):
            raise OutOfPagesError(
                f"{num_pages} pages at TP{self.pool.tp} do not fit: {free} are free and {len(self._evictable)} of "
                f"{len(self._columns)} cached ones can be evicted"
            )
        if self.lender is not None and num_pages > self.pool.num_free_pages:
            self.lender.make_free(min(num_pages, free))
        # Exact: an evicted page has no other reference, so it frees one page of this degree on every rank.
        self.evict(max(num_pages - free, 0))

    def _make_evictable(self, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Makes those pages evictable, in this order, of which only the cache's reference is left."""
        if not self._keys:
            return
        table = table[:, [page in self._keys for page in table[0].tolist()]]
        for page, references in zip(table[0].tolist(), self.pool.references(table).tolist(), strict=True):
            if references == 1:
                self._evictable[self._keys[page]] = None

    def _forget(self, keys: list[bytes]) -> None:
        columns = [self._columns.pop(key) for key in keys]
        for key in keys:
            del self._parents[key]
        for column in columns:
            del self._keys[column[0]]
        self.pool.free(self._table(columns))

    def _table(self, columns: Collection[tuple[int, ...]]) -> Int32[np.ndarray, "tp pages"]:
        return np.array(list(columns), np.int32).reshape(len(columns), self.pool.tp).T
