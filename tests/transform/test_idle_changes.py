"""Changes of idle instances: all layers switch at once, and no page moves without cached prefixes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from harness import ledger_entries
from serving_checks import TIMEOUT_S, forget_prefixes
from transform_cases import requests, tokens

from amoeba_jax import LLM
from amoeba_jax.errors import TransformError
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import disassemble

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@contextmanager
def failing(owner: Any, name: str, number: int) -> Iterator[None]:
    """Make one call of a function fail. The number of the call counts from 1."""
    call, count = getattr(owner, name), 0

    def replaced(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise jax.errors.JaxRuntimeError("injected")
        return call(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replaced)
        yield
    assert count >= number


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(4, 1), pytest.param((4, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_nothing_moves_and_answers_are_the_same(idle: LLM, degrees: tuple[int, ...]):
    """The degrees follow each other, and no ledger changes."""
    prompts, params = requests(8)
    expected = tokens(idle.generate(prompts, params))
    before = ledger_entries(idle)
    for degree in degrees:
        forget_prefixes(idle)
        report = idle.transform(degree, release_weights=False)
        assert report.steps == report.moved_bytes == report.extra_bytes == 0
        assert [i.tensor_parallel_size for i in idle.instances] == [degree] * (4 // degree)
        assert ledger_entries(idle) == before
        assert tokens(idle.generate(prompts, params)) == expected


def test_cached_prefixes_move(idle: LLM):
    prompts, params = requests(4)
    expected = tokens(idle.generate(prompts, params))
    report = idle.transform(4, release_weights=False)
    assert all(group.layers for group in report.groups)
    assert sum(group.prefix_pages_kept for group in report.groups) > 0
    assert tokens(idle.generate(prompts, params)) == expected


def check_weight_views(llm: LLM) -> None:
    """Check that each instance computes with the current buffers of the weights."""
    cluster = llm._engine.cluster
    store, plan = cluster.weights, cluster.plan
    for instance in cluster.instances:
        group = instance.group
        for segment in (*plan.segments, plan.head):
            arrays = instance.site.weights(segment)
            for array, (spec, place, sharded) in zip(arrays, store._segment_leaves(segment, group.tp), strict=True):
                for rank, (device, buffer) in enumerate(
                    zip(group.device_indices, disassemble(group, array), strict=True)
                ):
                    index = spec.shard_indices(group.tp, rank)[place] if sharded else place
                    own = store.shard(device, spec.name, index)
                    assert buffer.unsafe_buffer_pointer() == own.unsafe_buffer_pointer(), (spec.name, index)


@pytest.mark.slow
def test_weights_are_released_and_come_back(idle: LLM):
    prompts, params = requests(8)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    before = ledger_entries(idle)
    idle.transform(4)
    assert ledger_entries(idle) != before
    check_weight_views(idle)
    assert tokens(idle.generate(prompts, params)) == expected
    forget_prefixes(idle)
    idle.transform(1)
    assert ledger_entries(idle) == before
    check_weight_views(idle)
    check_weight_views(idle)  # kept views
    assert tokens(idle.generate(prompts, params)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_release_that_fails_leaves_an_instance_of_the_degree(idle: LLM, number: int):
    """Even after a failed release, the weights of all layers are released."""
    prompts, params = requests(8)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    idle.transform(4)
    released = ledger_entries(idle)
    idle.transform(1)
    with failing(WeightStore, "release", number), pytest.raises(TransformError, match="injected"):
        idle.transform(4)
    assert [i.tensor_parallel_size for i in idle.instances] == [4]
    assert ledger_entries(idle) == released
    assert tokens(idle.generate(prompts, params)) == expected
    forget_prefixes(idle)
    idle.transform(1)
    assert tokens(idle.generate(prompts, params)) == expected


def test_a_merge_that_fails_before_the_first_switch_leaves_all_as_it_was(idle: LLM):
    prompts, params = requests(8)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    before = ledger_entries(idle)
    with failing(InstanceFactory, "new_instance", 1), pytest.raises(TransformError, match="injected"):
        idle.transform(4, release_weights=False)
    assert [i.tensor_parallel_size for i in idle.instances] == [1] * 4
    assert ledger_entries(idle) == before
    assert tokens(idle.generate(prompts, params)) == expected


def test_an_instance_of_the_degree_keeps_the_weights_that_it_has(idle: LLM):
    """`release_weights` has no effect if the degree stays the same."""
    forget_prefixes(idle)
    for release in (False, True):
        idle.transform(4, release_weights=release)
        before = ledger_entries(idle)
        assert not idle.transform(4, release_weights=not release).groups
        assert ledger_entries(idle) == before
        idle.transform(1)
