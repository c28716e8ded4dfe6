"""Requests that lack pages while others are paused: the order in which they take pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import engine_of, in_dispatcher, registry_of
from pausing_cases import (
    done,
    expected_of,
    expected_of_group,
    greedy,
    options,
    outputs,
    prompt,
    steps,
    submit,
    transform,
)
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_model
from transform_cases import make

from amoeba_jax import LLM

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def small(directory: Path, compile_cache: str) -> Iterator[LLM]:
    """Provide an engine with 64 tokens of KV cache on each device."""
    settings = {"kv_cache_tokens": 64, "device_memory": "8MiB", "max_num_seqs": 4}
    with make(directory, compile_cache, **settings) as llm:
        yield llm


@pytest.mark.slow
def test_requests_that_lack_pages_take_those_that_are_served_last(small: LLM):
    """Cached prefixes are evicted first. Then each device preempts the paused request with the lowest priority."""
    asked = [(prompt(24, 20 + i), greedy(6, priority=1 + i // 4)) for i in range(8)]
    long = prompt(112, 30), greedy(8, priority=2)
    expected, long_expected = expected_of(small, asked), expected_of_group(small, [long])
    small.generate([prompt(20, 60 + i) for i in range(4)], greedy(2))  # leave cached prefixes

    def drive() -> None:
        engine = engine_of(small)
        requests = submit(small, asked)
        steps(small, lambda: all(r.sequences[0].output for r in requests))
        assert all(len(instance.running) == 2 for instance in engine.instances)
        transform(small, options(4, "pause"))
        later = submit(small, [long])
        steps(small, lambda: done(later))
        assert outputs(later) == long_expected
        assert [request.sequences[0].num_preemptions for request in requests] == [0] * 4 + [1] * 4
        transform(small, options(1))
        steps(small, lambda: done(requests))
        assert outputs(requests) == expected
        registry_of(small).end([*requests, *later])

    in_dispatcher(small, drive)
    check_idle(small)


def test_paused_requests_of_higher_priority_keep_their_pages(small: LLM):
    """A request of lower priority waits."""
    asked = [(prompt(36, 40 + i), greedy(8, priority=-1)) for i in range(4)]
    expected = expected_of(small, asked)

    def drive() -> None:
        engine = engine_of(small)
        requests = submit(small, asked)
        steps(small, lambda: all(r.sequences[0].output for r in requests))
        transform(small, options(4, "pause"))
        later = submit(small, [(prompt(112, 50), greedy(4))])
        for _ in range(20):
            engine.advance()
            engine.drain()
        assert not later[0].sequences[0].output
        assert not any(r.sequences[0].num_preemptions for r in requests)
        engine.sequences.finish(later[0].sequences, "abort")
        transform(small, options(1))
        steps(small, lambda: done(requests))
        assert outputs(requests) == expected
        registry_of(small).end([*requests, *later])

    in_dispatcher(small, drive)
    check_idle(small)


@pytest.mark.slow
def test_requests_of_the_group_that_grow_take_pages_of_paused_ones(small: LLM):
    """The request starts while enough pages are free, and preempts paused requests as it grows."""
    asked = [(prompt(36, 70 + i), greedy(8, priority=1)) for i in range(4)]
    growing = prompt(60, 80), greedy(60, priority=1)
    expected, growing_expected = expected_of(small, asked), expected_of_group(small, [growing])

    def drive() -> None:
        requests = submit(small, asked)
        steps(small, lambda: all(r.sequences[0].output for r in requests))
        transform(small, options(4, "pause"))
        later = submit(small, [growing])
        steps(small, lambda: bool(later[0].sequences[0].output))
        assert not any(r.sequences[0].num_preemptions for r in requests)
        steps(small, lambda: done(later))
        assert outputs(later) == growing_expected
        assert later[0].sequences[0].num_preemptions == 0
        assert all(r.sequences[0].num_preemptions == 1 for r in requests)
        transform(small, options(1))
        steps(small, lambda: done(requests))
        assert outputs(requests) == expected
        registry_of(small).end([*requests, *later])

    in_dispatcher(small, drive)
    check_idle(small)


def test_cached_prefixes_of_paused_instances_make_room_for_requests_that_move_beside_them(small: LLM):
    """The group's requests move while they run, although the instances are full of cached prefixes."""
    small.generate([prompt(56, 90 + i) for i in range(4)], greedy(2))
    asked = [(prompt(6, 100 + i), greedy(8, priority=1)) for i in range(4)]
    urgent = prompt(38, 110), greedy(6)
    expected, urgent_expected = expected_of(small, asked), expected_of_group(small, [urgent])
    small.generate([prompt(56, 90 + i) for i in range(4)], greedy(2))

    def drive() -> None:
        engine = engine_of(small)
        requests = submit(small, asked)
        steps(small, lambda: all(r.sequences[0].output for r in requests))
        transform(small, options(4, "pause"))
        later = submit(small, [urgent])
        steps(small, lambda: bool(later[0].sequences[0].output))
        (group,) = engine.instances
        assert all(member.lane.cache.num_evictable_pages for member in group.paused)
        transform(small, options(1))
        steps(small, lambda: done([*requests, *later]))
        assert (outputs(requests), outputs(later)) == (expected, urgent_expected)
        assert not any(r.sequences[0].num_preemptions for r in [*requests, *later])
        registry_of(small).end([*requests, *later])

    in_dispatcher(small, drive)
    check_idle(small)
