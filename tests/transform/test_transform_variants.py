"""Transformations by other means than in place: slower, larger, and with the same tokens."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import frozen_heap, total_live_bytes
from harness import engine_of, in_dispatcher, registry_of
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import tiny_model
from transform_cases import SHARED, Background, decoding, kv_of, make, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.transform import beginning
from amoeba_jax.transform.movers import CopyMover, HostMover
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.report import TransformVariant
from amoeba_jax.weights import store
from amoeba_jax.weights.store import WeightStore

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, device_memory="16MiB", **SHARED) as llm, frozen_heap():
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The engine as 4 x TP1 without requests, and found so afterwards, with no page or byte lost."""
    before = [dict(ledger.entries) for ledger in llm._engine.cluster.ledgers]
    reserved = [dict(ledger.reserved) for ledger in llm._engine.cluster.ledgers]
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)
    assert [dict(ledger.entries) for ledger in llm._engine.cluster.ledgers] == before
    assert [dict(ledger.reserved) for ledger in llm._engine.cluster.ledgers] == reserved


@pytest.mark.parametrize(
    "chain", [[4, 1], pytest.param([2, 4, 2], marks=pytest.mark.slow)], ids=lambda chain: "-".join(map(str, chain))
)
@pytest.mark.parametrize("variant", ["basic", "host_memory", "restart"])
def test_tokens_do_not_depend_on_the_variant(idle: LLM, variant: str, chain: list[int]):
    running, expected = decoding(idle, 4, requests(8))
    reports = [idle.transform(tp, variant=variant) for tp in chain]
    outputs = running.result()
    assert tokens(outputs) == expected
    recomputed = sum(group.recomputed for report in reports for group in report.groups)
    assert (recomputed > 0) == (variant == "restart")
    assert any(output.metrics.num_preemptions for output in outputs) == (variant == "restart")
    assert all(report.tokens > 0 for report in reports if variant != "restart")


@pytest.mark.parametrize("variant", ["basic", "host_memory"])
@pytest.mark.parametrize("layers_per_step", [pytest.param(1, marks=pytest.mark.slow), 100])
def test_kv_is_the_same_after_a_round_trip(idle: LLM, variant: str, layers_per_step: int):
    prompts, _ = requests(6)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    running = Background(idle, prompts, params, request_ids=[f"kv-{index}" for index in range(6)])
    wait_until_decoding(idle, len(prompts))
    before = kv_of(idle)
    for tp in (4, 1):
        idle.transform(tp, variant=variant, layers_per_step=layers_per_step)
    after = kv_of(idle)
    for name, layers in before.items():
        for then, now in zip(layers, after[name], strict=True):
            np.testing.assert_array_equal(now[: len(then)], then)
    running.result()


@pytest.mark.parametrize("variant", ["basic", "host_memory", "restart"])
def test_weights_are_the_same_afterwards(idle: LLM, monkeypatch: pytest.MonkeyPatch, variant: str):
    """In other buffers, of which there are as many; and while they are replaced, hardly more."""

    def shards() -> dict[Any, np.ndarray]:
        store = idle._engine.cluster.weights
        return {(d, *key): np.array(c) for d, held in enumerate(store._shards) for key, c in held.items()}

    replace, put, num_put = WeightStore.replace, store.put, itertools.count()

    def watched_replace(*arguments: Any) -> Any:
        result = replace(*arguments)
        live.append(total_live_bytes())
        return result

    def watched_put(*arguments: Any) -> Any:
        result = put(*arguments)
        if next(num_put) % 48 == 0:  # to count takes a while
            live.append(total_live_bytes())
        return result

    monkeypatch.setattr(WeightStore, "replace", watched_replace)
    monkeypatch.setattr(store, "put", watched_put)
    prompts, params = requests(4, max_tokens=64)
    before = shards()
    num_bytes, weight_bytes = total_live_bytes(), sum(shard.nbytes for shard in before.values())
    of_others = num_bytes - sum(ledger.live_bytes for ledger in idle._engine.cluster.ledgers)
    for _ in range(2):
        running = Background(idle, prompts, params)
        wait_until_decoding(idle, 2)
        for tp in (4, 1):
            live: list[int] = []
            idle.transform(tp, variant=variant)
            if variant == "restart":
                assert max(live) - of_others < 1.5 * weight_bytes, "with no cache meanwhile"
            else:
                assert live[-1] - live[0] < 0.05 * weight_bytes, "what the first layers had before is still there"
        running.result()
        after = shards()
        assert before.keys() == after.keys()
        for key, shard in before.items():
            np.testing.assert_array_equal(after[key], shard)
        assert total_live_bytes() <= num_bytes


def test_without_release(idle: LLM):
    prompts, params = requests(8, max_tokens=32)
    expected = tokens(idle.generate(prompts, params))
    at_tp1 = idle.instances[0].kv_total_pages
    for variant in ("basic", "host_memory", "restart"):
        running = Background(idle, prompts, params)
        wait_until_decoding(idle, 4)
        idle.transform(4, variant=variant, release_weights=False)
        assert idle.instances[0].kv_total_pages == 4 * at_tp1
        idle.transform(1, variant=variant)
        assert tokens(running.result()) == expected


def test_copying_takes_memory_and_moving_in_place_does_not(idle: LLM):
    """What `basic` needs for one layer is more than its cache; the staging buffer in place is a small part of that."""
    prompts, params = requests(8)
    plan = idle._engine.cluster.memory_plan
    extra = {}
    for variant in ("in_place", "basic", "host_memory"):
        running = Background(idle, prompts, params)
        wait_until_decoding(idle, 4)
        extra[variant] = idle.transform(4, variant=variant).extra_bytes
        idle.transform(1)
        running.result()
    assert extra["basic"] > plan.num_pages * plan.page_bytes
    assert extra["in_place"] <= plan.staging_bytes
    shard = max(c.spec.num_elements // 4 * 4 for c in idle._engine.cluster.weights.released(0, 4))
    assert extra["host_memory"] == shard


def test_copying_is_refused_where_there_is_no_room(directory: Path, compile_cache: str):
    with make(directory, compile_cache, **SHARED | {"device_memory": "2316KiB"}) as llm:
        running, expected = decoding(llm, 2, requests(4))
        with pytest.raises(RequestError, match=r"basic: staging need.*kv_cache_tokens"):
            llm.transform(4, variant="basic")
        assert {view.tensor_parallel_size for view in llm.instances} == {1}
        assert tokens(running.result()) == expected
        check_idle(llm)


@pytest.mark.parametrize("mover", [CopyMover, HostMover])
@pytest.mark.parametrize(
    ("up", "where"), [(True, "move"), (True, "renew"), (False, "move"), (False, "restore"), (False, "renew")]
)
def test_failure_on_the_way(idle: LLM, monkeypatch: pytest.MonkeyPatch, mover: type, up: bool, where: str):
    """In the second layer: the group ends at the higher degree, and its requests are computed again."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=40), tp=1 if up else 4)
    method, calls = getattr(mover, where), []

    def fails(self: Any, *arguments: Any) -> Any:
        calls.append(where)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return method(self, *arguments)

    variant = "basic" if mover is CopyMover else "host_memory"
    with monkeypatch.context() as patch:
        patch.setattr(mover, where, fails)
        with pytest.raises(TransformError, match=r"injected.*devices \[0, 1, 2, 3\]: .*computed again"):
            idle.transform(4 if up else 1, variant=variant)
    assert [view.tensor_parallel_size for view in idle.instances] == [4]
    assert tokens(running.result()) == expected
    idle.transform(1)
    assert tokens(idle.generate(*running.asked)) == expected


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_restart_whose_weights_cannot_be_read(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """The instances stay as they were, and serve."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=40), tp=1 if up else 4)

    def fails() -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(idle._engine.cluster, "open_weights", fails)
        with pytest.raises(TransformError, match="the disk is gone"):
            idle.transform(4 if up else 1, variant="restart")
    assert {view.tensor_parallel_size for view in idle.instances} == {1 if up else 4}
    assert tokens(running.result()) == expected


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_restart_whose_cache_cannot_be_made(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """After the weights were read: they are brought back to what they were."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=40), tp=1 if up else 4)
    ledgers = idle._engine.cluster.ledgers
    before = [dict(ledger.entries) for ledger in ledgers]
    make_instance, failed = InstanceFactory.empty_instance, []

    def fails_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(arguments)
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return make_instance(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(InstanceFactory, "empty_instance", fails_once)
        with pytest.raises(TransformError, match=r"KV cache cannot be recreated: RESOURCE_EXHAUSTED.*computed again"):
            idle.transform(4 if up else 1, variant="restart")
    assert {view.tensor_parallel_size for view in idle.instances} == {1 if up else 4}
    assert [dict(ledger.entries) for ledger in ledgers] == before
    assert tokens(running.result()) == expected
    idle.transform(1 if not up else 4)
    assert tokens(idle.generate(*running.asked)) == expected


def test_restart_of_the_second_group_is_not_begun_when_the_first_failed(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """The caller is told of what happened to the first, and not that nothing did."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=40))
    calls = []

    def fails() -> Any:
        calls.append("read")
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(idle._engine.cluster, "open_weights", fails)
        with pytest.raises(TransformError, match=r"the disk is gone.*devices \[0, 1\]: .*computed again\)"):
            idle.transform(2, variant="restart")
    assert calls == ["read"]
    assert tokens(running.result()) == expected


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_refused_before_it_began_leaves_nothing(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """What was set aside for it is free again, and prefixes are kept as before."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=40), tp=1 if up else 4)
    ledgers = idle._engine.cluster.ledgers
    before = [dict(ledger.reserved) for ledger in ledgers]

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(beginning, "place_up" if up else "place_down", fails)
        with pytest.raises(RuntimeError, match="injected") as raised:
            idle.transform(4 if up else 1, variant="basic")
    assert raised.value.__cause__ is not raised.value
    assert [dict(ledger.reserved) for ledger in ledgers] == before
    assert all(instance.lane.cache.enabled for instance in idle._engine.instances)
    assert tokens(running.result()) == expected


@pytest.mark.parametrize("variant", list(TransformVariant))
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_prompts_that_come_after_the_transition_has_begun(idle: LLM, variant: TransformVariant, busy: bool):
    """However many pages they bring, also where there was none to move: each variant brings them to their places."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 200, length).tolist() for length in (4, 90, 80, 70, 60)]
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    made = [registry_of(idle).make(p, params, lambda _: None, None, None) for p in prompts]
    first, late = ([request.sequences[0] for request in part] for part in (made[:busy], made[busy:]))

    def drive() -> None:
        engine = engine_of(idle)
        engine.submit(first)
        while not all(sequence.output for sequence in first):
            engine.advance()
            engine.drain()
        done = engine.transform(TransformOptions(4, (0, 1, 2, 3), variant, layers_per_step=1))
        engine.submit(late)
        engine.end_transformations()
        done.result()
        while engine.has_requests:
            engine.advance()
            engine.drain()

    in_dispatcher(idle, drive)
    assert [[tuple(sequence.output)] for sequence in (*first, *late)] == expected
    registry_of(idle).end(made)
