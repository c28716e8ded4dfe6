"""Baseline movers of transformations: slower, with more memory and the same tokens."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import total_live_bytes
from serving_checks import TIMEOUT_S, check_idle
from transform_cases import SHARED, Background, decoding, kv_of, make, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import RequestError
from amoeba_jax.transform.report import TransformReport
from benchmarks.baselines import movers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.fixture(scope="module")
def device_memory() -> str:
    return "16MiB"


def by(variant: str, llm: LLM, degree: int, **options: Any) -> TransformReport:
    """Transform all devices, in place or by a baseline."""
    with movers.baseline(variant) if variant in movers.MOVERS else nullcontext():
        return llm.transform(degree, variant="in_place", **options)


@pytest.mark.parametrize(
    "chain", [[4, 1], pytest.param([2, 4, 2], marks=pytest.mark.slow)], ids=lambda chain: "-".join(map(str, chain))
)
@pytest.mark.parametrize("variant", [pytest.param("basic", marks=pytest.mark.slow), "host_memory"])
def test_tokens_do_not_depend_on_the_variant(idle: LLM, variant: str, chain: list[int]):
    running, expected = decoding(idle, 4, requests(8))
    reports = [by(variant, idle, tp) for tp in chain]
    outputs = running.result()
    assert tokens(outputs) == expected
    assert not any(output.metrics.num_preemptions for output in outputs)
    assert all(report.tokens > 0 for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["basic", "host_memory"])
@pytest.mark.parametrize("layers_per_step", [1, 100])
def test_kv_is_the_same_after_a_round_trip(idle: LLM, variant: str, layers_per_step: int):
    prompts, _ = requests(6)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    running = Background(idle, prompts, params, request_ids=[f"kv-{index}" for index in range(6)])
    wait_until_decoding(idle, len(prompts))
    before = kv_of(idle)
    for tp in (4, 1):
        by(variant, idle, tp, layers_per_step=layers_per_step)
    after = kv_of(idle)
    for name, layers in before.items():
        for then, now in zip(layers, after[name], strict=True):
            np.testing.assert_array_equal(now[: len(then)], then)
    running.result()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["basic", "host_memory"])
def test_weights_are_the_same_afterwards(idle: LLM, monkeypatch: pytest.MonkeyPatch, variant: str):
    """Old buffers are freed while the weights are replaced, and no memory is lost afterwards."""

    def shards() -> dict[Any, np.ndarray]:
        store = idle._engine.cluster.weights
        return {(d, *key): np.array(c) for d, held in enumerate(store._shards) for key, c in held.items()}

    replace = movers.replace_weights

    def watched_replace(*arguments: Any) -> Any:
        result = replace(*arguments)
        live.append(total_live_bytes())
        return result

    monkeypatch.setattr(movers, "replace_weights", watched_replace)
    prompts, params = requests(4, max_tokens=64)
    before = shards()
    num_bytes, weight_bytes = total_live_bytes(), sum(shard.nbytes for shard in before.values())
    for _ in range(2):
        running = Background(idle, prompts, params)
        wait_until_decoding(idle, 2)
        for tp in (4, 1):
            live: list[int] = []
            by(variant, idle, tp)
            assert live[-1] - live[0] < 0.05 * weight_bytes, "what the first layers had before is still there"
        running.result()
        after = shards()
        assert before.keys() == after.keys()
        for key, shard in before.items():
            np.testing.assert_array_equal(after[key], shard)
        assert total_live_bytes() <= num_bytes


@pytest.mark.slow
def test_without_release(idle: LLM):
    prompts, params = requests(8, max_tokens=32)
    expected = tokens(idle.generate(prompts, params))
    at_tp1 = idle.instances[0].kv_total_pages
    for variant in ("basic", "host_memory"):
        running = Background(idle, prompts, params)
        wait_until_decoding(idle, 4)
        by(variant, idle, 4, release_weights=False)
        assert idle.instances[0].kv_total_pages == 4 * at_tp1
        by(variant, idle, 1)
        assert tokens(running.result()) == expected


@pytest.mark.slow
def test_copying_takes_memory_and_moving_in_place_does_not(idle: LLM):
    """`basic` takes more than the KV cache of one layer. In place takes at most the staging buffer."""
    prompts, params = requests(8)
    plan = idle._engine.cluster.memory_plan
    extra = {}
    for variant in ("in_place", "basic", "host_memory"):
        running = Background(idle, prompts, params)
        wait_until_decoding(idle, 4)
        extra[variant] = by(variant, idle, 4).extra_bytes
        idle.transform(1)
        running.result()
    assert extra["basic"] > plan.num_pages * plan.page_bytes
    assert extra["in_place"] <= plan.staging_bytes
    shard = max(c.spec.num_elements // 4 * 4 for c in idle._engine.cluster.weights.released(0, 4))
    assert extra["host_memory"] == shard


@pytest.mark.slow
def test_copying_is_refused_where_there_is_no_room(directory: Path, compile_cache: str):
    with make(directory, compile_cache, **SHARED | {"device_memory": "2316KiB"}) as llm:
        running, expected = decoding(llm, 2, requests(4))
        with pytest.raises(RequestError, match=r"staging need.*kv_cache_tokens"):
            by("basic", llm, 4)
        assert {view.tensor_parallel_size for view in llm.instances} == {1}
        assert tokens(running.result()) == expected
        check_idle(llm)
