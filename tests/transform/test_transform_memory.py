"""Device memory during transformations: only the owners of buffers change."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import frozen_heap, total_live_bytes
from harness import engine_of, in_dispatcher
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_model
from transform_cases import Background, after_each_switch, make, requests, tokens

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.engine import Engine

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]

# Inputs and outputs of steps come and go.
SLACK = 64 << 10
PROMPT, NEW_TOKENS = 120, 128


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    """Provide an engine with room for two requests on each device, and a budget for the copies of `basic`."""
    room = {"kv_cache_tokens": 2 * (PROMPT + NEW_TOKENS), "max_model_len": PROMPT + NEW_TOKENS, "max_num_seqs": 2}
    with make(directory, compile_cache, device_memory="16MiB", prefix_caching=False, **room) as llm, frozen_heap():
        yield llm
        check_idle(llm)


@pytest.mark.slow
def test_memory_in_use_does_not_change(llm: LLM):
    """Live bytes and ledgers are the same before and after."""
    expected = tokens(llm.generate(*requests(4)))

    def live() -> int:
        llm._dispatcher.call(llm._engine.drain).result(TIMEOUT_S)
        return total_live_bytes()

    llm.transform(4), llm.transform(1)
    before, ledgers = live(), [dict(ledger.entries) for ledger in llm._engine.cluster.ledgers]
    for _ in range(3):
        llm.transform(4)
        released = llm._engine.cluster.ledgers[0].entries
        assert released[(0, "kv cache")] > ledgers[0][(0, "kv cache")]
        assert sum(released.values()) == sum(ledgers[0].values())
        llm.transform(1)
    assert [dict(ledger.entries) for ledger in llm._engine.cluster.ledgers] == ledgers
    assert abs(live() - before) <= SLACK
    assert tokens(llm.generate(*requests(4))) == expected, "restored weights are what they were"


@pytest.mark.first_by_default
@pytest.mark.parametrize("variant", ["in_place_overlapped", pytest.param("in_place", marks=pytest.mark.slow)])
def test_what_is_allocated_on_the_way(llm: LLM, monkeypatch: pytest.MonkeyPatch, variant: str):
    """The cache is 90% full. In place, programs allocate only their temporaries, which fit in the staging buffer."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 200, PROMPT).tolist() for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    expected = tokens(llm.generate(prompts, params))
    peaks: list[int] = []
    after_each_switch(monkeypatch, lambda _: peaks.append(total_live_bytes()))
    running = Background(llm, prompts, params)
    while not engine_of(llm).has_requests:
        time.sleep(0.002)
    use = in_dispatcher(llm, run_until_full, engine_of(llm))
    before = llm._dispatcher.call(total_live_bytes).result(TIMEOUT_S)
    reports: list[Any] = [llm.transform(tp, variant=variant) for tp in (4, 1)]
    assert tokens(running.result()) == expected
    assert use < 1
    assert sum(report.moved_bytes for report in reports) > 0
    plan = llm._engine.cluster.memory_plan
    growth = max(peaks) - before
    assert growth <= SLACK
    assert all(0 < report.extra_bytes <= plan.staging_bytes for report in reports)


def run_until_full(engine: Engine) -> float:
    """Step all instances together until the KV cache is 90% full. Return the share in use."""
    while True:
        pages = [instance.page_counts() for instance in engine.instances]
        use = 1 - sum(counts.available for counts in pages) / sum(counts.total for counts in pages)
        if use >= 0.9:
            return use
        assert engine.has_requests
        engine.advance()
        engine.drain()
