"""Prefix cache, compared with a plain model: contents and users of every page, and the order of eviction."""

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_cache_cases import GEOMETRY, SIZE, forked, keys_of, make_cache, state

from kvcache.allocator import OutOfPagesError
from kvcache.pages import SequencePages
from kvcache.prefix_cache import PageKeys

# Contents of a page: the salt of its tenant and all tokens up to its end, because its keys and values depend on them.
Content = tuple[str, tuple[int, ...]]
Column = tuple[int, ...]


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
    """Random operations. `memory` is device memory. A sequence writes only to pages that it does not share."""

    def __init__(self):
        super().__init__()
        self.requests: list[Request] = []
        self.cached: dict[Content, Column] = {}
        self.evictable: list[Content] = []  # least recently used first

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

    def retire(self, columns: list[Column]) -> None:
        """Record columns whose reference a request just dropped, in this order."""
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
    # Mostly equal prompts, so that many prefixes are found.
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

        request = Request(self.cache.match(keys), salt, prompt)
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
        if index < GEOMETRY.pages_for(len(request.tokens)):  # otherwise nothing was written yet
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
        self.requests.append(Request(forked(request.pages), request.salt, request.tokens))

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

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data):
        """Forget any pages, also pages in use."""
        contents = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True))
        self.cache.forget([keys_of(tokens, salt)[-1] for salt, tokens in contents])
        for content in contents:
            del self.cached[content]
        self.evictable = [content for content in self.evictable if content in self.cached]

    @precondition(lambda self: self.evictable)
    @rule()
    def clear(self):
        self.cache.clear()
        self.cached, self.evictable = {}, []

    def draw(self, data) -> Request:
        return data.draw(st.sampled_from(self.requests))

    # Invariants

    @invariant()
    def counts_agree(self):
        cache, used = self.cache, {column for request in self.requests for column in request.columns()}
        assert cache.pool.num_free_pages == self.num_free()
        assert cache.num_cached_pages == len(self.cached)
        assert cache.num_evictable_pages == len(self.evictable)
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
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=40)
