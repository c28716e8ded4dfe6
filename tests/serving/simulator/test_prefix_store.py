"""Prefixes that a simulated instance still has."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import config

from serving.bench.trace_file import Trace, scale_rate
from serving.simulator.prefix_store import PrefixStore, PromptBlocks
from serving.simulator.requests import RequestTable
from serving.simulator.setups import make_setup
from serving.simulator.simulate import simulate

TOKENS = 100


def blocks(*ids: int) -> PromptBlocks:
    return PromptBlocks(ids, TOKENS)


def computed(store: PrefixStore, *ids: int) -> PromptBlocks:
    """Add the prompt of a request that has ended, and return it."""
    prompt = blocks(*ids)
    store.add(prompt)
    store.release(prompt)
    return prompt


def found(store: PrefixStore, *ids: int, prompt_tokens: int = 1 << 20) -> int:
    """Return the tokens that a prompt finds, and release the prompt."""
    prompt = blocks(*ids)
    tokens = store.find(prompt, prompt_tokens)
    store.release(prompt)
    return tokens


def test_a_prompt_finds_its_beginning_but_never_its_last_token():
    store = PrefixStore()
    computed(store, 1, 2, 3)
    assert found(store, 1, 2, 9) == 2 * TOKENS
    assert found(store, 9, 2, 3) == 0
    assert found(store, 1, 2, 3, prompt_tokens=300) == 299


def test_the_ends_of_what_was_used_least_recently_go_first():
    store = PrefixStore()
    computed(store, 1, 2)
    computed(store, 3, 4)
    computed(store, 1, 5)
    store.shrink(3 * TOKENS)
    assert found(store, 3, 4) == TOKENS, "of the two that were left its end"
    assert found(store, 1, 5) == 2 * TOKENS
    assert found(store, 1, 2) == TOKENS
    store.shrink(0)
    assert found(store, 1) == 0
    assert store.idle_tokens == 0


def test_what_a_request_holds_stays():
    store, running = PrefixStore(), blocks(1, 2)
    store.add(running)
    store.shrink(0)
    assert found(store, 1, 2, 3) == 2 * TOKENS
    store.release(running)
    store.shrink(0)
    assert found(store, 1, 2, 3) == 0


def test_instances_that_merge_and_split_keep_their_prefixes():
    members, whole = (PrefixStore(), PrefixStore()), PrefixStore()
    running = blocks(1, 2)
    members[0].add(running)
    computed(members[0], 1, 3)
    computed(members[1], 1, 4)
    computed(members[1], 5)
    whole.take_held(running)
    for member in members:
        whole.take_idle(member)
    assert [found(whole, 1, last) for last in (2, 3, 4)] == [200, 200, 200]
    parts = (PrefixStore(), PrefixStore())
    parts[1].take_held(running)
    whole.deal_idle(parts)
    assert [found(parts[1], 1, last) for last in (2, 3, 4)] == [200, 200, 200], "where the rest of the prompt is"
    assert found(parts[0], 5) == TOKENS, "where least is"
    assert found(parts[1], 5) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 6)), max_size=40))
def test_tokens_of_blocks_add_up(steps: list[tuple[list[int], int]]):
    """Prompts are paths in a trie of blocks, so an id determines all blocks before it."""
    store = PrefixStore()
    for path, room in steps:
        ids = [sum(5**n * (block + 1) for n, block in enumerate(path[: length + 1])) for length in range(len(path))]
        running = blocks(*ids)
        before = store.find(running, 1 << 20)
        assert before == running.num_held * TOKENS
        store.add(running)
        store.shrink(room * TOKENS)
        assert store.idle_tokens <= room * TOKENS
        assert all(block in store for block in ids)
        store.release(running)
        assert store.idle_tokens == TOKENS * len(store._idle)
        assert set(store._before) == set(store._idle)


def alternating(num_blocks: int, block_tokens: int = 512) -> RequestTable:
    """Return requests that alternate between two prompts, one at a time."""
    count, length = 8, num_blocks * block_tokens
    ids = {row: tuple(range(row % 2 * 1000, row % 2 * 1000 + num_blocks)) for row in range(count)}
    ones = np.ones(count, np.int64)
    return RequestTable(
        np.arange(count) * 60.0, ones * length, ones * 4, ones * 4, ones * 0, prefix_blocks=ids,
        prefix_block_tokens=block_tokens,
    )  # fmt: skip


def test_prefixes_take_no_more_room_than_there_is():
    settings = config(num_devices=1)
    capacity = make_setup(settings, "static-tp1").host.limits[0].capacity_tokens
    few, many = simulate(settings, "static-tp1", alternating(10)), simulate(settings, "static-tp1", alternating(30))
    assert few.tally.prefix_tokens == 6 * (10 * 512 - 1)
    assert many.completed.all()
    left = (
        capacity - 30 * 512 - 16
    ) // 512  # blocks of one prompt that fit beside the other prompt and a page for output
    assert 0 < left < 30
    assert many.tally.prefix_tokens == 6 * left * 512


def test_a_prompt_is_not_found_while_it_is_computed():
    table = replace(alternating(2), arrival_s=np.zeros(8))
    result = simulate(config(num_devices=1, max_num_batched_tokens=512), "static-tp1", table)
    assert result.tally.prefix_tokens == 0


def test_blocks_are_shortened_as_prompts_are():
    table = alternating(10, block_tokens=100)
    assert simulate(config(num_devices=1), "static-tp1", table).tally.prefix_tokens == 6 * 999
    assert table.prompt_blocks(0).ids == tuple(range(10))
    assert replace(table, input_len=table.input_len * 0 + 250).prompt_blocks(0).ids == (0, 1, 2)


def test_prefixes_outlive_a_merge_and_a_split():
    lengths = np.array([2048, 60_000, 2048])
    table = RequestTable(
        np.array([0.0, 60.0, 600.0]), lengths, lengths * 0 + 4, lengths * 0 + 4, lengths * 0,
        prefix_blocks={0: (1, 2, 3, 4), 2: (1, 2, 3, 4)},
    )  # fmt: skip
    result = simulate(config(num_devices=4), "amoeba", table)
    assert (result.counters["scale_ups"], result.counters["scale_downs"]) == (1, 1)
    assert result.tally.prefix_tokens in (0, 2047), "the third request may go to another instance"
    one = simulate(replace(config(num_devices=4), degrees=(4,)), "static-tp4", table)
    assert one.tally.prefix_tokens == 2047


def test_copies_of_requests_share_prefixes_with_each_other_alone():
    trace = Trace(np.full(4, 512), np.full(4, 1), np.arange(4) * 100.0, {n: (0, n + 1) for n in range(4)})
    scaled = scale_rate(trace, 2.0, np.random.default_rng(0))
    assert len(scaled.input_tokens) == 8
    ids = list(scaled.prefix_blocks.values())
    assert len(set(ids)) == 8
    assert len({first for first, _ in ids}) == 2


@pytest.mark.parametrize(("scale", "count"), [(0.5, 50), (1.0, 100), (2.25, 225)])
def test_a_rate_has_as_many_requests(scale: float, count: int):
    trace = Trace(np.arange(100), np.full(100, 1), None)
    rows = scale_rate(trace, scale, np.random.default_rng(3)).input_tokens
    assert len(rows) == count
    assert np.bincount(rows, minlength=100).max() <= int(scale) + 1
