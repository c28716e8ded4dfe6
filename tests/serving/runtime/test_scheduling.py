"""The scheduler over a real engine: instances merge for a long request and then split. Tokens stay the same."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import engine_of
from serving_checks import TIMEOUT_S
from tiny_models import tiny_model
from transform_cases import Background

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import ConfigError, DeadlineError, RequestError
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.transform.relayout import Relayout
from serving.runtime.jax_executor import EngineScheduler
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig
from serving.scheduler import POLICY_NAMES, UnknownPolicyError

pytestmark = pytest.mark.usefixtures("quick_compile")

CACHE = 64
"""Tokens that an instance of one device holds."""
QUICK = {"linger_s": 0.3, "layers_per_step": 2}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with one instance for each device."""
    with LLM(
        tiny_model("llama2", tmp_path_factory.mktemp("models")),
        num_devices=request.param,
        device_memory="8MiB",
        kv_cache_tokens=CACHE,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        segment_layers=2,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


Schedule = Callable[..., Scheduling]


@pytest.fixture
def schedule(llm: LLM) -> Iterator[Schedule]:
    """Yield a function that starts a scheduler: `schedule(policy=..., ...)`.

    Afterwards, check that the engine is idle and split its instances.
    """
    made = []

    def start(**settings: Any) -> Scheduling:
        made.append(Scheduling(llm, SchedulingConfig(**{**QUICK, **settings}), ServerMetrics()))
        return made[-1]

    yield start
    for scheduling in made:
        scheduling.close()
    # New instances appear shortly before their transformation ends.
    wait_for(lambda: not engine_of(llm).changes.busy)
    assert [(v.running, v.waiting, v.kv_used_pages) for v in llm.instances] == [(0, 0, 0)] * len(llm.instances)
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)


def prompts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 200, (count, length)).tolist()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(outputs: list) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def degrees(llm: LLM) -> list[int]:
    return [view.tensor_parallel_size for view in llm.instances]


def split(llm: LLM) -> bool:
    return set(degrees(llm)) == {1}


def wait_for(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.01)


def undisturbed(llm: LLM, requests: list[list[int]], params: SamplingParams, tp: int) -> list[tuple[int, ...]]:
    """Return the tokens of the engine without a scheduler, for one request at a time."""
    if tp > 1:
        llm.transform(tp)
    outputs = [llm.generate(prompt, params)[0] for prompt in requests]
    if tp > 1:
        llm.transform(1)
    return tokens(outputs)


def test_a_long_request_has_instances_merged_and_split_again(llm: LLM, schedule: Schedule):
    """The long prompt is three times the capacity of one device. Short requests keep running."""
    short, long = prompts(8, 20), prompts(1, 3 * CACHE)
    # Compile the programs of the higher degree here. During compilation, steps are slow, and the scheduler would merge
    # again to meet the TTFT SLO.
    expected = undisturbed(llm, short, greedy(40), 1), undisturbed(llm, long, greedy(24), 2)
    scheduling = schedule(ttft_slo_s=1000.0)
    background = Background(llm, short, greedy(40))
    wait_for(lambda: any(view.running for view in llm.instances))
    assert tokens(llm.generate(long, greedy(24))) == expected[1]
    assert tokens(background.result()) == expected[0]
    wait_for(lambda: split(llm))
    counters = scheduling.counters
    assert (counters.scale_ups, counters.scale_downs, counters.transformations_failed) == (1, 1, 0)
    assert counters.dispatched >= 9


def test_consecutive_long_requests_share_a_merged_instance(llm: LLM, schedule: Schedule):
    long = prompts(4, CACHE + 20)
    expected = undisturbed(llm, long, greedy(16), 2)
    scheduling = schedule(linger_s=30)
    for prompt, wanted in zip(long, expected, strict=True):
        assert tokens(llm.generate(prompt, greedy(16))) == [wanted]
    assert (scheduling.counters.scale_ups, scheduling.counters.scale_downs) == (1, 0)
    assert degrees(llm) == [2] + [1] * (llm.config.num_devices - 2)


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("amoeba", "flying")))
        for name in POLICY_NAMES
        if name != "static"
    ],
)
def test_every_policy_serves_a_mix_with_the_same_tokens(llm: LLM, schedule: Schedule, policy: str):
    short, long = prompts(12, 16), prompts(2, 2 * CACHE)
    expected = undisturbed(llm, short, greedy(24), 1) + undisturbed(llm, long, greedy(8), llm.config.max_tp)
    scheduling = schedule(policy=policy)
    requests = [*short, *long]
    params = [greedy(24)] * len(short) + [greedy(8)] * len(long)
    assert tokens(llm.generate(requests, params)) == expected
    wait_for(lambda: split(llm))
    counters = scheduling.counters
    assert min(counters.scale_ups, counters.scale_downs) > 0
    assert (counters.refused, counters.transformations_failed) == (0, 0)


def test_static_turns_away_what_would_need_a_merge(llm: LLM, schedule: Schedule):
    """The other requests of the same call are served."""
    short, long = prompts(2, 8), prompts(1, CACHE + 8)
    expected = undisturbed(llm, short, greedy(8), 1)
    schedule(policy="static")
    outputs = llm.generate([short[0], *long, short[1]], greedy(8))
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == expected
    assert str(CACHE + 16) in outputs[1].error
    with pytest.raises(RequestError, match=str(CACHE + 16)):
        llm.generate(long, greedy(8))
    assert split(llm)


def test_what_fits_no_layout_is_refused_at_once(llm: LLM, schedule: Schedule):
    schedule()
    limit = llm.max_model_len
    with pytest.raises(RequestError, match=rf"over the limit of {limit}.*TP{llm.config.max_tp}"):
        llm.generate(prompts(1, limit), greedy(8))


def test_a_deadline_passes_in_the_queue(llm: LLM, schedule: Schedule):
    """Running requests use all capacity, and the request with a deadline cannot preempt them."""
    schedule(policy="static")
    background = Background(llm, prompts(10, 8), greedy(CACHE - 8))
    wait_for(lambda: all(view.running for view in llm.instances))

    async def ask() -> None:
        stream = llm.astream(prompts(1, 8)[0], greedy(CACHE - 8), deadline=time.monotonic())
        async for _ in stream:
            pass

    with pytest.raises(DeadlineError, match="deadline"):
        asyncio.run(ask())
    assert all(len(output.outputs[0].token_ids) == CACHE - 8 for output in background.result())


@pytest.mark.slow
def test_a_deadline_passes_in_the_queue_of_an_engine_without_a_scheduler(llm: LLM):
    background = Background(llm, prompts(14, 8), greedy(CACHE - 8))
    wait_for(lambda: any(view.waiting for view in llm.instances))

    async def ask() -> None:
        async for _ in llm.astream(prompts(1, 8)[0], greedy(CACHE - 8), deadline=time.monotonic()):
            pass

    with pytest.raises(DeadlineError, match="while the request was queued"):
        asyncio.run(ask())
    assert any(view.waiting for view in llm.instances), "it is told at once, though others wait before it"
    background.result()


@pytest.mark.slow
def test_siblings_priorities_and_preemption(llm: LLM, schedule: Schedule):
    """The requests exceed the capacity. Preempted requests are computed again and keep their tokens."""
    requests = prompts(8, 30)
    params = [
        SamplingParams(temperature=0.9, seed=index, n=1 + index % 3, max_tokens=30, priority=index % 2, ignore_eos=True)
        for index in range(len(requests))
    ]
    expected = [[c.token_ids for c in llm.generate(r, p)[0].outputs] for r, p in zip(requests, params, strict=True)]
    scheduling = schedule()
    outputs = llm.generate(requests, params)
    assert [[c.token_ids for c in output.outputs] for output in outputs] == expected
    assert scheduling.counters.dispatched >= len(requests)


@pytest.mark.slow
def test_a_cancelled_request_that_waits_for_a_merge_leaves_nothing(llm: LLM, schedule: Schedule):
    schedule()
    # Decoding requests hold all pages, so the long request waits.
    background = Background(llm, prompts(16, 12), greedy(CACHE - 12))
    wait_for(lambda: all(view.running for view in llm.instances))
    long = Background(llm, prompts(1, 3 * CACHE), greedy(8), request_ids=["long"])
    wait_for(lambda: llm.cancel("long"))
    assert long.result()[0].outputs[0].finish_reason == "abort"
    background.result()
    wait_for(lambda: split(llm))


def test_a_transformation_that_fails_is_tried_again_later(
    llm: LLM, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
):
    scheduling = schedule()
    real, calls = Relayout.switch_layers, []

    def fail_once(self: Relayout, step: StepPlan | None = None) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise RuntimeError("injected")
        real(self, step)

    monkeypatch.setattr(Relayout, "switch_layers", fail_once)
    short, long = prompts(4, 8), prompts(1, 2 * CACHE)
    background = Background(llm, short, greedy(56))
    wait_for(lambda: any(view.running for view in llm.instances))
    assert len(llm.generate(long, greedy(8))[0].outputs[0].token_ids) == 8
    background.result()
    assert scheduling.counters.transformations_failed == 1
    assert scheduling.counters.scale_ups == 2


def test_short_requests_begin_while_layers_change(
    llm: LLM, schedule: Schedule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """No layer switches until three requests that arrived during the merge have ended.

    Decisions depend on events, not on time.
    """
    monkeypatch.setattr(EngineScheduler, "interval_s", TIMEOUT_S)
    count = llm.config.num_devices
    short, long, later = prompts(count, 8), prompts(1, CACHE + 20), prompts(3, 4, seed=9)
    expected = undisturbed(llm, later, greedy(4), 1)
    caplog.set_level("INFO", "amoeba.scheduler")
    schedule(merge_to=count)
    real, calls, ended = Relayout.switch_layers, [], threading.Event()

    def held(self: Relayout, step: StepPlan | None = None) -> None:
        calls.append(self)
        if ended.is_set() or len(calls) > 10_000:
            real(self, step)

    monkeypatch.setattr(Relayout, "switch_layers", held)
    background = Background(llm, short, greedy(40))
    wait_for(lambda: all(view.running for view in llm.instances))
    merging = Background(llm, long, greedy(4))
    wait_for(lambda: bool(calls))
    assert tokens(llm.generate(later, greedy(4))) == expected
    assert calls[0].num_switched == 0
    ended.set()
    merging.result()
    background.result()
    assert sum("it computes prompts as it becomes" in line for line in caplog.messages) == 3


def test_policies_are_replaced_while_serving(llm: LLM, schedule: Schedule):
    scheduling = schedule(policy="static")
    background = Background(llm, prompts(8, 12), greedy(50))
    wait_for(lambda: any(view.running for view in llm.instances))
    assert scheduling.set_policy("amoeba") == "static"
    assert len(llm.generate(prompts(1, 2 * CACHE), greedy(4))[0].outputs[0].token_ids) == 4
    with pytest.raises(UnknownPolicyError, match="no one"):
        scheduling.set_policy("no one")
    assert scheduling.policy_name == "amoeba"
    background.result()
    wait_for(lambda: split(llm))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "best"}, "'best'.*amoeba"),
        ({"linger_s": -1}, "linger_s=-1"),
        ({"linger_s": float("nan")}, "linger_s=nan"),
        ({"merge_again_after_s": "soon"}, "merge_again_after_s='soon'"),
        ({"split_free_share": 1.5}, "split_free_share=1.5"),
        ({"reserved_growth": True}, "reserved_growth=True"),
        ({"vacancy_threshold": 1.1}, "vacancy_threshold=1.1 must be from 0 to 1"),
        ({"violation_threshold": 0}, "violation_threshold=0 must be above 0"),
        ({"window_s": 0.0}, "window_s=0.0 must be above 0"),
        ({"window_s": float("nan")}, "window_s=nan must be seconds"),
        ({"cool_down_s": -1.0}, "cool_down_s=-1.0 must be seconds"),
        ({"split_batch": 0}, "split_batch=0 must be a positive integer"),
        ({"scale_out": 1}, "scale_out=1 must be true or false"),
        ({"migrated_share": 0.0}, "migrated_share=0.0 must be above 0 and at most 1"),
        ({"batch_step": 2.5}, "batch_step=2.5 must be a positive integer"),
        ({"layers_per_step": 0}, "layers_per_step=0"),
        ({"merge_to": 3}, "merge_to=3"),
        ({"lookahead": 0}, "lookahead=0"),
        ({"starving_s": -1}, "starving_s=-1"),
        ({"ttft_slo_s": float("inf")}, "ttft_slo_s=inf"),
        ({"partial_splits": 1}, "partial_splits=1"),
        ({"preemption": "gentle"}, "preemption='gentle'.*hard, soft, sequential"),
        ({"max_pause_s": -1}, "max_pause_s=-1"),
        ({"calm_requests": 3.0, "burst_requests": 4.0}, "burst_requests=4.0 must be at least twice calm_requests=3.0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SchedulingConfig(**settings)
