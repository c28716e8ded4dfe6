"""The policy `flying` on four devices: urgent requests arrive while best-effort requests fill all slots."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import engine_of
from serving_checks import TIMEOUT_S
from tiny_models import tiny_model
from transform_cases import Background

from amoeba_jax import LLM, SamplingParams
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    with LLM(
        tiny_model("llama2", tmp_path_factory.mktemp("models")),
        num_devices=4,
        device_memory="16MiB",
        kv_cache_tokens=1024,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        segment_layers=2,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 200, (count, length)).tolist()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(outputs: list) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def wait_for(what) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.005)


@pytest.mark.slow
def test_urgent_requests_among_saturating_ones_lose_nothing(llm: LLM, caplog: pytest.LogCaptureFixture):
    """All requests get the tokens of a run without pauses. No request is preempted."""
    many, urgent = prompts(20, 16, seed=1), prompts(3, 40, seed=2)
    many_params, urgent_params = greedy(200), greedy(16, priority=-1)
    expected = tokens(llm.generate(many, many_params))
    llm.transform(4, release_weights=False, running="pause")
    urgent_expected = [tokens(llm.generate(prompt, urgent_params))[0] for prompt in urgent]
    llm.transform(1)
    before = llm.stats.preemptions
    settings = SchedulingConfig("flying", calm_requests=1e-6, max_pause_s=60.0, layers_per_step=2)
    with caplog.at_level(logging.INFO, "amoeba.scheduler"):
        scheduling = Scheduling(llm, settings, ServerMetrics())
        background = Background(llm, many, many_params)
        wait_for(lambda: sum(view.running for view in llm.instances) == 16)
        found = []
        for prompt in urgent:
            found += tokens(llm.generate(prompt, urgent_params))
        assert sum(view.running + view.paused for view in llm.instances) > 0, "the others are not through"
        outputs = background.result()
    assert found == urgent_expected
    assert tokens(outputs) == expected
    assert llm.stats.preemptions == before
    assert scheduling.counters.preempted == 0
    decisions = [r.__dict__["decision"] for r in caplog.records if "decision" in r.__dict__]
    ups = [d for d in decisions if d["action"] == "scale_up" and d["outcome"] == "accepted"]
    assert len(ups) == len(urgent)
    assert all((d["degree"], d["running"], d["release_weights"]) == (4, "pause", False) for d in ups)
    assert len([d for d in decisions if d["action"] == "scale_down" and d["outcome"] == "accepted"]) == len(urgent)
    assert not [d for d in decisions if d["outcome"] == "refused"]
    scheduling.close()
    assert not engine_of(llm).num_paused
    assert [view.tensor_parallel_size for view in llm.instances] == [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["soft", pytest.param("sequential", marks=pytest.mark.slow)])
def test_urgent_requests_move_or_wait(llm: LLM, preemption: str):
    """All requests get the tokens of an undisturbed run."""
    many, urgent = prompts(8, 16, seed=3), prompts(2, 40, seed=4)
    expected, urgent_expected = tokens(llm.generate(many, greedy(120))), tokens(llm.generate(urgent, greedy(16)))
    settings = SchedulingConfig("flying", preemption=preemption, calm_requests=1e-6, layers_per_step=2)
    scheduling = Scheduling(llm, settings, ServerMetrics())
    background = Background(llm, many, greedy(120))
    wait_for(lambda: sum(view.running for view in llm.instances) == 8)
    assert tokens(llm.generate(urgent, greedy(16, priority=-1))) == urgent_expected
    assert tokens(background.result()) == expected
    assert scheduling.counters.scale_ups >= 1
    wait_for(lambda: not engine_of(llm).changes.busy and len(llm.instances) == 4)
    scheduling.close()


def test_an_idle_cluster_binds_and_a_burst_releases_it(llm: LLM):
    settings = SchedulingConfig("flying", dwell_s=0.5, load_window_s=0.1, calm_requests=0.5, burst_requests=1.0)
    scheduling = Scheduling(llm, settings, ServerMetrics())
    wait_for(lambda: [view.tensor_parallel_size for view in llm.instances] == [4])
    many = prompts(16, 16, seed=5)
    outputs = Background(llm, many, greedy(230))
    wait_for(lambda: len(llm.instances) == 4)
    found = tokens(outputs.result())
    wait_for(lambda: not engine_of(llm).changes.busy)
    scheduling.close()
    if len(llm.instances) < 4:
        llm.transform(1)
    assert found == tokens(llm.generate(many, greedy(230)))
