"""The prefix cache against a plain model: what every page holds, who uses it, and which is evicted next."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.allocator import BuddyAllocator, OutOfPagesError
from kvcache.geometry import PageGeometry
from kvcache.pages import PagePool, SequencePages
from kvcache.prefix_cache import PageKeys, PrefixCache

SIZE = 2  # tokens in a page
GEOMETRY = PageGeometry(kv_heads=4, page_size=SIZE, head_dim=8, max_tp=4)

# What a page holds: its tenant's salt and all tokens up to its end, since keys and values depend on all of them.
Content = tuple[str, tuple[int, ...]]
Column = tuple[int, ...]


def make_cache(num_pages: int, tp: int = 1, enabled: bool = True) -> PrefixCache:
    """A cache that has `num_pages` pages, whose ids differ between ranks. All but the last rank have more."""
    allocators = [BuddyAllocator(GEOMETRY.max_tp) for _ in range(tp)]
    for rank, allocator in enumerate(allocators):
        allocator.add_extent(num_pages + tp)
        spare = tp - 1 - rank
        allocator.allocate_many(GEOMETRY.order(tp), (num_pages + tp) * tp - num_pages - spare)
    cache = PrefixCache(PagePool(GEOMETRY, allocators, tp), enabled)
    assert cache.pool.num_free_pages == num_pages
    return cache


def keys_of(tokens: tuple[int, ...] | range, salt: str = "") -> list[bytes]:
    keys = PageKeys(SIZE, salt)
    keys.extend(tokens)
    return keys.keys


def admit(cache: PrefixCache, tokens: range, salt: str = "") -> SequencePages:
    """A sequence of these tokens, computed and cached."""
    keys = keys_of(tokens, salt)
    pages = cache.match(keys)
    cache.reserve(pages, len(tokens))
    cache.insert(keys, pages)
    return pages


def state(cache: PrefixCache) -> tuple:
    blocks = [allocator.live_blocks() for allocator in cache.pool._allocators]
    return blocks, list(cache._evictable), dict(cache._columns), cache.evicted_pages


@dataclass(eq=False)
class Request:
    pages: SequencePages
    salt: str
    tokens: tuple[int, ...]
    keys: PageKeys = field(init=False)

    def __post_init__(self):
        self.keys = PageKeys(SIZE, self.salt)

    def content(self, index: int) -> Content:
        return self.salt, self.tokens[: (index + 1) * SIZE]

    def columns(self) -> list[Column]:
        return [tuple(column) for column in self.pages.table.T.tolist()]


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of operations. `memory` is the devices'; it is written only where a page is the writer's own."""

    def __init__(self):
        super().__init__()
        self.requests: list[Request] = []
        self.cached: dict[Content, Column] = {}
        self.evictable: list[Content] = []  # the next to go first
        self.evicted = 0

    @initialize(tp=st.sampled_from([1, 2, 4]), num_pages=st.integers(4, 12))
    def make(self, tp, num_pages):
        self.cache, self.num_pages = make_cache(num_pages, tp), num_pages
        self.memory: list[dict[int, Content]] = [{} for _ in range(tp)]

    # The model

    def users(self, column: Column) -> int:
        return sum(column in request.columns() for request in self.requests)

    def num_free(self) -> int:
        used = {column for request in self.requests for column in request.columns()}
        return self.num_pages - len(used | set(self.cached.values()))

    def hits(self, salt: str, tokens: tuple[int, ...]) -> int:
        hits = 0
        while (hits + 1) * SIZE <= len(tokens) and (salt, tokens[: (hits + 1) * SIZE]) in self.cached:
            hits += 1
        return hits

    def make_room(self, num_pages: int, num_free: int) -> None:
        for content in self.evictable[: max(num_pages - num_free, 0)]:
            del self.cached[content]
            self.evictable.remove(content)
            self.evicted += 1

    def retire(self, columns: list[Column]) -> None:
        """Columns of which a request just dropped its reference, in that order."""
        contents = {column: content for content, column in self.cached.items()}
        self.evictable += [contents[c] for c in columns if c in contents and not self.users(c)]

    def write(self, request: Request, start: int) -> None:
        """Compute the tokens from `start` on."""
        for index in range(start // SIZE, GEOMETRY.pages_for(len(request.tokens))):
            column = request.columns()[index]
            assert self.users(column) == 1
            assert column not in self.cached.values()
            for rank, page in enumerate(column):
                self.memory[rank][page] = request.content(index)

    def copy_page(self, source: Column, target: Column) -> None:
        for contents, old, new in zip(self.memory, source, target, strict=True):
            contents[new] = contents[old]

    # Operations

    salts = st.sampled_from(["", "tenant"])
    # Mostly alike, so that many are found.
    prompts = st.integers(1, 9).map(lambda n: (0,) * n) | st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(salt=salts, prompt=prompts, num_output=st.integers(0, 4), insert=st.booleans())
    def admit(self, salt, prompt, num_output, insert):
        keys = keys_of(prompt[:-1], salt)
        hits = self.hits(salt, prompt[:-1])
        assert self.cache.num_cached(keys) == hits
        found = [(salt, prompt[: (i + 1) * SIZE]) for i in range(hits)]
        total = len(prompt) + num_output
        need = GEOMETRY.pages_for(total) - hits
        available = self.num_free() + len(set(self.evictable) - set(found))
        fits = need <= available
        assert self.cache.fits(keys, total) == fits
        assert self.cache.fits(keys, (hits + available) * SIZE)
        assert not self.cache.fits(keys, (hits + available) * SIZE + 1)

        before = self.cache.queried_pages, self.cache.hit_pages
        request = Request(self.cache.match(keys), salt, prompt)
        assert (self.cache.queried_pages, self.cache.hit_pages) == (before[0] + len(keys), before[1] + hits)
        assert request.columns() == [self.cached[content] for content in found]
        num_free = self.num_free()
        self.evictable = [content for content in self.evictable if content not in found]
        self.requests.append(request)
        if not fits:
            with pytest.raises(OutOfPagesError):
                self.cache.reserve(request.pages, total)
            self.release(request)
            return
        self.make_room(need, num_free)
        assert self.cache.reserve(request.pages, total) == need
        self.write(request, hits * SIZE)
        if insert:
            self.insert_from(request, 0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.sampled_from([0, 1]))
    def decode(self, data, token):
        request = self.draw(data)
        length = len(request.tokens) + 1
        num_new, num_free = GEOMETRY.pages_for(length) - request.pages.num_pages, self.num_free()
        if num_new > num_free + len(self.evictable):
            before = state(self.cache)
            with pytest.raises(OutOfPagesError, match=f"{num_free} are free and {len(self.evictable)} of"):
                self.cache.reserve(request.pages, length)
            assert state(self.cache) == before
            return
        self.make_room(num_new, num_free)
        self.cache.reserve(request.pages, length)
        if self.privatize(request, (length - 1) // SIZE):
            request.tokens = (*request.tokens, token)
            self.write(request, length - 1)

    @precondition(lambda self: any(r.pages.num_pages for r in self.requests))
    @rule(data=st.data())
    def make_private(self, data):
        request = data.draw(st.sampled_from([r for r in self.requests if r.pages.num_pages]))
        self.privatize(request, data.draw(st.integers(0, request.pages.num_pages - 1)))

    def privatize(self, request: Request, index: int) -> bool:
        source = request.columns()[index]
        num_free = self.num_free()
        if self.users(source) + (source in self.cached.values()) == 1:
            assert self.cache.make_private(request.pages, index) is None
            return True
        if not num_free + len(self.evictable):
            before = state(self.cache)
            with pytest.raises(OutOfPagesError):
                self.cache.make_private(request.pages, index)
            assert state(self.cache) == before
            return False
        self.make_room(1, num_free)
        copied = self.cache.make_private(request.pages, index)
        assert copied is not None
        target = request.columns()[index]
        assert [tuple(column.tolist()) for column in copied] == [source, target]
        assert self.users(target) == 1
        if index < GEOMETRY.pages_for(len(request.tokens)):  # else nothing was written yet
            self.copy_page(source, target)
        self.retire([source])
        return True

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def insert(self, data):
        request = self.draw(data)
        self.insert_from(request, data.draw(st.sampled_from([0, len(request.keys.keys)])))

    def insert_from(self, request: Request, start: int) -> None:
        full = len(request.tokens) // SIZE
        request.keys.extend(request.tokens[request.keys.num_tokens :])
        assert request.keys.keys == keys_of(request.tokens, request.salt)
        self.cache.insert(request.keys.keys, request.pages, start)
        for index, column in enumerate(request.columns()[start:full], start):
            self.cached.setdefault(request.content(index), column)

    @precondition(lambda self: 0 < len(self.requests) < 4)
    @rule(data=st.data())
    def fork(self, data):
        request = self.draw(data)
        self.requests.append(Request(request.pages.fork(), request.salt, request.tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        self.release(self.draw(data))

    def release(self, request: Request) -> None:
        columns = request.columns()
        self.requests.remove(request)
        self.cache.release(request.pages)
        self.retire(columns[::-1])
        assert request.pages.num_pages == 0

    @precondition(lambda self: self.evictable)
    @rule(num_pages=st.integers(0, 3))
    def evict(self, num_pages):
        before = len(self.evictable)
        self.make_room(num_pages, 0)
        assert self.cache.evict(num_pages) == before - len(self.evictable)

    @precondition(lambda self: self.evictable)
    @rule()
    def clear(self):
        self.cache.clear()
        self.cached, self.evictable = {}, []

    def draw(self, data) -> Request:
        return data.draw(st.sampled_from(self.requests))

    # What always holds

    @invariant()
    def counts_agree(self):
        cache, used = self.cache, {column for request in self.requests for column in request.columns()}
        assert cache.pool.num_free_pages == self.num_free()
        assert cache.num_cached_pages == len(self.cached)
        assert cache.num_evictable_pages == len(self.evictable)
        assert cache.evicted_pages == self.evicted
        assert cache.pool.num_free_pages + cache.num_evictable_pages + len(used) == self.num_pages

    @invariant()
    def cached_pages_are_found_and_hold_their_tokens(self):
        for (salt, tokens), column in self.cached.items():
            assert self.cache.num_cached(keys_of(tokens, salt)) == self.hits(salt, tokens)
            assert all(contents[page] == (salt, tokens) for contents, page in zip(self.memory, column, strict=True))
        assert set(self.evictable) == {content for content, column in self.cached.items() if not self.users(column)}

    @invariant()
    def requests_hold_their_tokens(self):
        for request in self.requests:
            columns = request.columns()
            for index in range(GEOMETRY.pages_for(len(request.tokens))):
                held = [contents[page] for contents, page in zip(self.memory, columns[index], strict=True)]
                assert held == [request.content(index)] * len(held)
            expected = [self.users(c) + (c in self.cached.values()) for c in columns]
            assert self.cache.pool.references(request.pages.table).tolist() == expected

    @invariant()
    def pages_go_in_order(self):
        trial = copy.deepcopy(self.cache)
        for salt, tokens in self.evictable:
            last = keys_of(tokens, salt)[-1:]
            assert trial.num_cached(last) == 1
            assert trial.evict(1) == 1
            assert trial.num_cached(last) == 0
        assert trial.evict(1) == 0

    @invariant()
    def available_is_exact(self):
        available = self.cache.num_available_pages
        trial = copy.deepcopy(self.cache)
        before = state(trial)
        pages = SequencePages(trial.pool)
        with pytest.raises(OutOfPagesError):
            trial.reserve(pages, (available + 1) * SIZE)
        assert state(trial) == before
        assert trial.reserve(pages, available * SIZE) == available
        assert trial.num_available_pages == trial.pool.num_free_pages == trial.num_evictable_pages == 0

    def teardown(self):
        if hasattr(self, "cache"):
            for request in list(self.requests):
                self.release(request)
            assert self.cache.num_available_pages == self.num_pages
            self.cache.clear()
            assert self.cache.pool.num_free_pages == self.num_pages


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]), tokens=st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_keys_are_those_of_the_full_pages_however_the_tokens_come(data, page_size, tokens):
    whole, pieces = PageKeys(page_size, "a"), PageKeys(page_size, "a")
    whole.extend(tokens)
    while pieces.num_tokens < len(tokens):
        pieces.extend(tokens[pieces.num_tokens :][: data.draw(st.integers(1, 5))])
    assert pieces.keys == whole.keys
    assert len(set(whole.keys)) == len(whole.keys) == len(tokens) // page_size
    assert {len(key) for key in whole.keys} <= {16}


@settings(max_examples=100, deadline=None)
@given(a=st.lists(st.integers(0, 1), max_size=12), b=st.lists(st.integers(0, 1), max_size=12))
def test_keys_are_common_as_far_as_all_tokens_before_are(a, b):
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    keys_a, keys_b = keys_of(tuple(a)), keys_of(tuple(b))
    assert [x == y for x, y in zip(keys_a, keys_b, strict=False)] == [
        (i + 1) * SIZE <= common for i in range(min(len(keys_a), len(keys_b)))
    ]
    assert set(keys_a).isdisjoint(keys_of(tuple(b), "tenant"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_prefix_is_shared_on_all_ranks(tp):
    cache = make_cache(8, tp)
    first = admit(cache, range(6))
    second = cache.match(keys_of((0, 1, 2, 3, 9, 9)))
    np.testing.assert_array_equal(second.table, first.table[:, :2])
    assert tp == 1 or (first.table[0] != first.table[-1]).any()
    cache.release(first)
    assert (cache.num_evictable_pages, cache.num_available_pages) == (1, 6)
    cache.release(second)
    assert (cache.num_evictable_pages, cache.num_available_pages, cache.pool.num_free_pages) == (3, 8, 5)


def test_oldest_sequences_go_first_and_of_each_its_end():
    cache = make_cache(8)
    a, b = admit(cache, range(0, 6)), admit(cache, range(10, 14))
    cache.release(a)
    cache.release(b)
    cache.release(cache.match(keys_of(range(0, 2))))  # the first page of `a` is used once more
    left = []
    while cache.evict(1):
        left.append((cache.num_cached(keys_of(range(0, 6))), cache.num_cached(keys_of(range(10, 14)))))
    assert left == [(2, 2), (1, 2), (1, 1), (1, 0), (0, 0)]
    assert cache.evicted_pages == 5


def test_tenants_share_nothing():
    cache = make_cache(8)
    cache.release(admit(cache, range(4), "a"))
    assert [cache.num_cached(keys_of(range(4), salt)) for salt in ("a", "b", "", "A", "a ")] == [2, 0, 0, 0, 0]
    admit(cache, range(4), "b")
    assert cache.num_cached_pages == 4


def test_page_computed_twice_is_cached_once():
    cache = make_cache(6)
    keys = keys_of(range(4))
    a, b = cache.match(keys), cache.match(keys)
    for pages in (a, b):
        cache.reserve(pages, 4)
        cache.insert(keys, pages)
    assert cache.num_cached_pages == 2
    first = a.table.copy()
    cache.release(a)
    # The duplicates are the other sequence's own, which replace the first ones where those are gone.
    np.testing.assert_array_equal(cache.match(keys).table, first)
    cache.clear()
    assert cache.num_cached(keys) == 0
    cache.insert(keys, b)
    np.testing.assert_array_equal(cache.match(keys).table, b.table)


def test_released_duplicates_are_free_at_once():
    cache = make_cache(6)
    keys = keys_of(range(4))
    admit(cache, range(4))
    pages = SequencePages(cache.pool)
    cache.reserve(pages, 4)
    cache.insert(keys, pages)
    assert cache.pool.num_free_pages == 2
    cache.release(pages)
    assert (cache.pool.num_free_pages, cache.num_evictable_pages) == (4, 0)


def test_matched_pages_are_no_room_for_the_rest():
    cache = make_cache(4)
    cache.release(admit(cache, range(6)))
    keys = keys_of(range(6))
    assert cache.num_available_pages == 4
    assert cache.fits(keys, 8)
    assert not cache.fits(keys, 10)
    assert cache.fits(keys[:1], 8)
    pages = cache.match(keys)
    assert cache.num_available_pages == 1
    assert cache.reserve(pages, 8) == 1
    assert cache.evicted_pages == 0


def test_pages_of_running_sequences_are_never_evicted():
    cache = make_cache(4)
    running = admit(cache, range(4))
    cache.release(admit(cache, range(10, 14)))
    assert cache.evict(4) == 2
    assert cache.num_cached(keys_of(range(4))) == 2
    assert cache.pool.references(running.table).tolist() == [2, 2]
    cache.clear()
    assert cache.num_cached_pages == 0
    cache.release(running)
    assert cache.pool.num_free_pages == 4


def test_cached_page_is_copied_before_it_is_written():
    cache = make_cache(3, tp=2)
    pages = admit(cache, range(4))
    before = pages.table.copy()
    copied = cache.make_private(pages, 1)
    assert copied is not None
    np.testing.assert_array_equal(np.stack(copied, axis=1), np.stack([before[:, 1], pages.table[:, 1]], axis=1))
    assert cache.make_private(pages, 1) is None
    # The cached one stays to be found. Now it is the room for the next copy.
    assert cache.num_cached(keys_of(range(4))) == 2
    copied = cache.make_private(pages, 0)
    assert copied is not None
    np.testing.assert_array_equal(copied[1], before[:, 1])
    assert (cache.num_cached(keys_of(range(4))), cache.evicted_pages) == (1, 1)


def test_asking_is_not_counted():
    cache = make_cache(8)
    cache.release(admit(cache, range(6)))
    assert (cache.queried_pages, cache.hit_pages) == (3, 0)
    keys = keys_of((0, 1, 2, 3, 9, 9, 9, 9))
    assert cache.num_cached(keys) == 2
    assert cache.fits(keys, 8)
    assert (cache.queried_pages, cache.hit_pages) == (3, 0)
    cache.match(keys)
    assert (cache.queried_pages, cache.hit_pages) == (7, 2)


def test_disabled_cache_passes_through():
    cache = make_cache(4, enabled=False)
    pages = admit(cache, range(6))
    assert cache.num_cached(keys_of(range(6))) == cache.num_cached_pages == 0
    assert cache.match(keys_of(range(6))).num_pages == 0
    child = pages.fork()
    assert cache.make_private(child, 2) is not None
    with pytest.raises(OutOfPagesError, match="0 are free and 0 of 0 cached"):
        cache.reserve(child, 8)
    cache.release(pages)
    cache.release(child)
    assert cache.num_available_pages == cache.pool.num_free_pages == 4


def test_bad_arguments_change_nothing():
    cache = make_cache(6)
    pages = admit(cache, range(4))
    with pytest.raises(ValueError, match="3 keys for a sequence of 2 pages"):
        cache.insert(keys_of(range(6)), pages)
    # A sequence that wrote other tokens to a cached page: not even its first page is cached.
    other = SequencePages(cache.pool, np.concatenate([cache.pool.allocate(1), pages.table[:, 1:]], axis=1))
    before = state(cache)
    with pytest.raises(ValueError, match=r"page 1 of the sequence \(\[2\]\) is cached for other tokens"):
        cache.insert(keys_of(range(20, 24)), other)
    with pytest.raises(ValueError, match="num_pages is -1"):
        cache.evict(-1)
    with pytest.raises(IndexError):
        cache.make_private(pages, 2)
    assert state(cache) == before
