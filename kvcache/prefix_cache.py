"""Prefix cache: full KV pages of earlier sequences, which later prompts can find by their tokens.

The key of a page is a hash of all tokens of its sequence up to the end of the page. Two sequences with an equal prefix
therefore have equal keys for the pages of this prefix.
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
    """Page in a prefix cache.

    Attributes:
        key: hash of the tokens of the page and all tokens before them.
        parent: key of the preceding page; None for the first page of a sequence.
        column: local ids of the page, one for each rank: a column of a block table.
    """

    key: bytes
    parent: bytes | None
    column: tuple[int, ...]


class PageKeys:
    """Keys of the full pages of a growing token sequence.

    Each key is a hash of the previous key and the tokens of the page. For the first page, the previous key is a hash of
    `salt`. Sequences with different salts (tenants) therefore never share a key.
    """

    def __init__(self, page_size: int, salt: str = "") -> None:
        self.keys: list[bytes] = []
        self._page_size = page_size
        # `person` separates salts from pages: no salt can imitate the pages of another tenant.
        root = salt.encode("utf-8", "surrogatepass")
        self._last = hashlib.blake2b(root, digest_size=_KEY_BYTES, person=b"salt").digest()
        self._tail: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including tokens after the last full page."""
        return len(self.keys) * self._page_size + len(self._tail)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, and add the keys of the pages that become full. Earlier tokens are not hashed again."""
        self._tail.extend(tokens)
        size = self._page_size
        num_full = len(self._tail) // size * size
        for start in range(0, num_full, size):
            page = np.array(self._tail[start : start + size], np.int32).tobytes()
            self._last = hashlib.blake2b(self._last + page, digest_size=_KEY_BYTES, person=b"page").digest()
            self.keys.append(self._last)
        del self._tail[:num_full]


class PageLender(Protocol):
    """Object that can free memory for a prefix cache, for example by evicting pages of paused instances.

    The pages that it frees and the pages of the prefix cache come from the same allocators.
    """

    def num_free_pages(self) -> int:
        """Return the number of free pages of the cache's pool, including pages that the lender could free."""
        ...

    def make_free(self, num_pages: int) -> None:
        """Free pages until the cache's pool has `num_pages` free pages, or until the lender can free no more pages."""
        ...


class PrefixCache:
    """Cache of computed pages of one pool. Sequences share these pages. Unused pages stay until their memory is needed.

    The cache holds one reference to each cached page. Every sequence that uses the page holds another reference. A page
    to which only the cache has a reference is *evictable*: the page counts as available, and `reserve` evicts it if no
    page is free. All sequences of the pool must therefore reserve, copy and release their pages through the cache.
    `PagePool.share` may be called directly, because it needs no new page.

    A page is identified by its id on rank 0. Not thread-safe, like the pool.

    Args:
        pool: pool of the pages.
        enabled: whether `insert` caches pages. If False, all other methods work the same.

    Attributes:
        lender: object that can free pages outside this cache, or None. If too few pages are free, `reserve` first calls
            the lender, and then evicts cached pages.
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self._columns: dict[bytes, tuple[int, ...]] = {}
        self._keys: dict[int, bytes] = {}  # by the page's id on rank 0
        self._parents: dict[bytes, bytes | None] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self.lender: PageLender | None = None

    @property
    def num_cached_pages(self) -> int:
        return len(self._columns)

    @property
    def num_evictable_pages(self) -> int:
        """Number of cached pages that no sequence uses."""
        return len(self._evictable)

    @property
    def num_available_pages(self) -> int:
        """Number of pages that `reserve` can add now: free pages, pages that `lender` can free, and evictable pages."""
        return self._num_free_pages + len(self._evictable)

    @property
    def _num_free_pages(self) -> int:
        return self.pool.num_free_pages if self.lender is None else self.lender.num_free_pages()

    # Prefixes

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """Return the number of pages in the longest cached prefix of a sequence with the page keys `keys`."""
        for index, key in enumerate(keys):
            if key not in self._columns:
                return index
        return len(keys)

    def fits(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        """Return whether `match(keys)` and then `reserve(..., num_tokens)` would succeed. Changes nothing.

        `num_available_pages` alone is too high for this check: it includes the evictable pages of the cached prefix.
        After `match`, the sequence uses these pages, and they are not available.
        """
        num_cached = self.num_cached(keys)
        revived = sum(key in self._evictable for key in keys[:num_cached])
        return self.pool.geometry.pages_for(num_tokens) - num_cached <= self.num_available_pages - revived

    def match(self, keys: Sequence[bytes]) -> SequencePages:
        """Return the block table of a new sequence: the pages of the longest cached prefix.

        The sequence gets a reference to each of these pages. `keys` must not cover the last token of the prompt,
        because a step must compute at least this token to predict the next token.
        """
        hits = keys[: self.num_cached(keys)]
        for key in hits:
            self._evictable.pop(key, None)
        table = self._table([self._columns[key] for key in hits])
        self.pool.share(table)
        return SequencePages(self.pool, table)

    def insert(self, keys: Sequence[bytes], pages: SequencePages, start: int = 0) -> None:
        """Cache the pages `range(start, len(keys))` of a sequence. Page `i` gets the key `keys[i]`.

        `keys` has the keys of all pages from the first page of the sequence on (`PageKeys.keys`). Does nothing if the
        cache is disabled.

        If the cache has another page with the same key, the other page stays, and the page of this sequence is not
        cached. After the other page is evicted, a call with `start=0` caches the page of this sequence.

        The programs that compute the pages may still be running. They must be launched before all programs that read
        the pages. No later program may write to the pages.

        Raises `ValueError` if the sequence has fewer pages than keys, or if one of its pages is cached under another
        key.
        """
        if len(keys) > pages.num_pages:
            raise ValueError(
                f"{len(keys)} keys for a sequence of {pages.num_pages} pages: at most one key for each page"
            )
        if not self.enabled:
            return
        columns = pages.table[:, start : len(keys)].T.tolist()
        new = {}
        for index, (key, column) in enumerate(zip(keys[start:], columns, strict=True), start):
            if self._keys.get(column[0], key) != key:
                raise ValueError(f"page {index} of the sequence (ids {column}) is cached for other tokens")
            if key not in self._columns:
                new[key] = tuple(column)
        self.pool.share(self._table(new.values()))
        self._columns.update(new)
        self._keys.update((column[0], key) for key, column in new.items())
        before = [keys[start - 1] if start else None, *keys[start:]]
        self._parents.update((key, parent) for key, parent in zip(keys[start:], before, strict=False) if key in new)

    # Other pools

    def pages(self) -> list[CachedPage]:
        """Return all cached pages: first the pages in use, then the evictable pages (least recently used first)."""
        used = [key for key in self._columns if key not in self._evictable]
        return [CachedPage(key, self._parents[key], self._columns[key]) for key in (*used, *self._evictable)]

    def adopt(self, pages: Iterable[CachedPage]) -> None:
        """Add pages that the prefix cache of another pool had. `CachedPage.column` must hold the ids in this pool.

        The caller must hold a reference to each page. The cache takes over this reference. If the key is cached
        already, the cache drops the reference and does not add the page. If no sequence uses an added page, the page
        becomes evictable. Added pages are evicted in the given order, after all pages that were evictable before.
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
        """Return a table with the ids of all cached pages, in the order in which they were cached."""
        return self._table(self._columns.values())

    # Allocation

    def reserve(self, pages: SequencePages, num_tokens: int) -> int:
        """Add pages to a sequence until it holds `num_tokens` tokens. Return the number of new pages.

        If too few pages are free, first ask `lender` to free pages, and then evict cached pages. Raises
        `OutOfPagesError`, and changes nothing, if this cannot free enough pages.
        """
        self._make_free(self.pool.geometry.pages_for(num_tokens) - pages.num_pages)
        return pages.reserve(num_tokens)

    def make_private(
        self, pages: SequencePages, index: int
    ) -> tuple[Int32[np.ndarray, " tp"], Int32[np.ndarray, " tp"]] | None:
        """Make sure that a sequence may write to its page `index`: if the page is shared, replace it by a new page.

        A cached page counts as shared. If no page is free, first ask `lender` to free pages. If still no page is free,
        evict a cached page.

        Return `(old, new)`, the ids `[tp]` of both pages, or None if the page is not shared. The caller must copy the
        contents to the new page, in the launch order that `SequencePages.copy_on_write` requires.

        Raises `OutOfPagesError`, and changes nothing, if no page is available. Raises `IndexError` if page `index` does
        not exist.
        """
        if not pages.is_shared(index):
            return None
        self._make_free(1)
        copied = pages.copy_on_write(index)
        assert copied is not None, "the page is shared"
        self._make_evictable(copied[0][:, None])
        return copied

    def release(self, pages: SequencePages) -> None:
        """Drop all pages of a sequence. Cached pages that no other sequence uses become evictable.

        Eviction begins with the sequence that was released first. Within a sequence, it begins with the last page,
        because `match` finds a page only if all pages before it are cached.
        """
        table = pages.table.copy()
        pages.release()
        self._make_evictable(table[:, ::-1])

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` pages, least recently used first. Return the number of evicted pages."""
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must not be negative")
        num_pages = min(num_pages, len(self._evictable))
        keys = [self._evictable.popitem(last=False)[0] for _ in range(num_pages)]
        self._forget(keys)
        return num_pages

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the pages with these keys from the cache. Unknown keys are ignored.

        Sequences keep the pages that they use. Pages that no sequence uses are freed.
        """
        known = [key for key in dict.fromkeys(keys) if key in self._columns]
        for key in known:
            self._evictable.pop(key, None)
        self._forget(known)

    def clear(self) -> None:
        """Remove all pages from the cache. Pages that no sequence uses are freed."""
        self._forget(list(self._columns))
        self._evictable.clear()

    def _make_free(self, num_pages: int) -> None:
        """Ask `lender` to free pages, then evict pages, until `num_pages` pages are free.

        Raises `OutOfPagesError`, and changes nothing, if this cannot free enough pages.
        """
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
        """Mark the cached pages of a table as evictable, in order. Skip pages that a sequence uses."""
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
