"""One suite for both executors: what the simulated one takes on, refuses and shows, the one on devices does too."""

import contextlib
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pytest
from serving_checks import TIMEOUT_S
from tiny_models import tiny_model
from transform_cases import Background

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import QueueFullError
from serving.runtime.jax_executor import EngineScheduler
from serving.scheduler import (
    Action,
    BindGroup,
    ClusterView,
    DegreeLimits,
    Dispatch,
    Executor,
    InstanceView,
    Outcome,
    Preempt,
    PreemptKind,
    Reject,
    RejectKind,
    ScaleDown,
    ScaleUp,
)
from serving.simulator.batching import EngineBuckets
from serving.simulator.host_config import HostConfig, Waiting
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.sim_executor import SimExecutor
from serving.simulator.step_cost import RateStepCost
from serving.simulator.tally import Records, Tally
from serving.simulator.transformation_cost import FixedTransformation

pytestmark = pytest.mark.usefixtures("quick_compile")
CACHE, PAGE, SLOTS = 64, 4, 4
"""Tokens and requests that an instance of one device holds."""


class Silent:
    """Decides nothing."""

    name = "silent"

    def decide(self, view: ClusterView) -> list[Action]:
        return []


def kept(executor: Executor) -> ClusterView:
    """A snapshot that can be read later: that of a queue on devices is of one moment."""
    view = executor.snapshot()
    return replace(view, queue=tuple(view.queue))


class Harness(Protocol):
    """Two devices, and an executor that the tests may ask."""

    def start(self, requests: list[tuple[int, int]]) -> list[str]:
        """Let requests of that many prompt and output tokens wait; their names, in order."""
        ...

    def call(self, what: Callable[[Executor], Any]) -> Any:
        """What a scheduler would ask, at one moment."""
        ...

    def until(self, what: Callable[[ClusterView], bool]) -> ClusterView:
        """Let time go on until a snapshot is so."""
        ...


class SimHarness:
    """Virtual time, moved by the test."""

    def __init__(self, capacity: dict[int, int]):
        rates = RateStepCost(prefill={1: 1e3, 2: 2e3}, decode={1: 100, 2: 150}, decode_each={1: 50, 2: 75})
        limits = tuple(DegreeLimits(d, tokens, SLOTS * d) for d, tokens in capacity.items())
        config = HostConfig(
            2, limits, Pricing(rates, EngineBuckets(SLOTS, 32)), FixedTransformation(1.0, 4), (1, 1), PAGE
        )
        self._events: list[tuple] = []
        self._table: RequestTable | None = None
        self._config = config

    def start(self, requests: list[tuple[int, int]]) -> list[str]:
        prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
        table = RequestTable(np.zeros(len(requests)), prompts, outputs, outputs, np.zeros(len(requests), int))
        self._executor = SimExecutor(self._config, Records(len(table)), Tally(1.0), self._reschedule)
        for index in range(len(table)):
            request = table.waiting(index)
            self._executor.queue[request.request_id] = Waiting(request, index, int(outputs[index]), 0.0)
        return [table.name(index) for index in range(len(table))]

    def _reschedule(self, instance: Any, end_s: float) -> None:
        heapq.heappush(self._events, (end_s, len(self._events), id(instance), instance, instance.version))

    def call(self, what: Callable[[Executor], Any]) -> Any:
        return what(self._executor)

    def until(self, what: Callable[[ClusterView], bool]) -> ClusterView:
        executor = self._executor
        for _ in range(100_000):
            if what(view := kept(executor)):
                return view
            if not self._events or self._events[0][0] > executor.now_s + 0.01:
                executor.now_s += 0.01
                continue
            end_s, _, _, instance, version = heapq.heappop(self._events)
            executor.now_s = end_s
            if instance.version == version:
                (executor.end_block if instance.block is not None else executor.begin)(instance)
        raise AssertionError("it never came to that")


class JaxHarness:
    """An engine, whose dispatcher thread is asked."""

    def __init__(self, llm: LLM):
        self._llm = llm
        hook = llm.use_scheduler_hook(lambda engine: EngineScheduler(engine, Silent()))
        self._executor = hook.scheduler.executor
        self._background: list[Background] = []

    def start(self, requests: list[tuple[int, int]]) -> list[str]:
        names: list[str] = []
        for number, (prompt, output) in enumerate(requests):
            tokens = np.random.default_rng(number).integers(3, 200, (1, prompt)).tolist()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            self._background.append(Background(self._llm, tokens, params))
            view = self.until(lambda view, wanted=number + 1: len(view.queue) == wanted)
            names += [r.request_id for r in view.queue if r.request_id not in names]
        return names

    def call(self, what: Callable[[Executor], Any]) -> Any:
        return self._llm._dispatcher.call(what, self._executor).result()

    def until(self, what: Callable[[ClusterView], bool]) -> ClusterView:
        give_up = time.monotonic() + TIMEOUT_S
        while not what(view := self.call(kept)):
            assert time.monotonic() < give_up, "it never came to that"
            time.sleep(0.01)
        return view

    def close(self) -> None:
        """Reject what waits, let the rest end, and split."""

        def clear(executor: Executor) -> int:
            view = kept(executor)
            for request in view.queue:
                executor.apply(Reject(request.request_id, RejectKind.QUEUE_FULL, "the test is over"))
            return sum(len(i.running) for i in view.instances) + len(view.queue)

        while self.call(clear):
            time.sleep(0.01)
        while self._llm._engine.transformations.busy:
            time.sleep(0.01)
        for background in self._background:
            with contextlib.suppress(QueueFullError):  # those that the tests rejected
                background.result()
        self._llm.remove_scheduler_hook()
        if any(view.tensor_parallel_size > 1 for view in self._llm.instances):
            self._llm.transform(1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    with LLM(
        tiny_model("llama2", tmp_path_factory.mktemp("models")),
        num_devices=2,
        device_memory="8MiB",
        kv_cache_tokens=CACHE,
        page_size=PAGE,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=32,
        segment_layers=2,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.fixture(params=["simulated", "jax"])
def harness(request: pytest.FixtureRequest, llm: LLM) -> Iterator[Harness]:
    if request.param == "simulated":
        yield SimHarness({tp: llm._engine.capacity_tokens(tp) for tp in (1, 2)})
        return
    jax = JaxHarness(llm)
    yield jax
    jax.close()


def apply(harness: Harness, *actions: Action) -> list[Outcome]:
    """Actions at one moment, behind a snapshot as a scheduler takes it."""

    def all_of_them(executor: Executor) -> list[Outcome]:
        executor.snapshot()
        return [executor.apply(action) for action in actions]

    return harness.call(all_of_them)


def snapshot(harness: Harness) -> ClusterView:
    return harness.call(kept)


def of(view: ClusterView, name: str) -> InstanceView:
    """The instance that runs a request."""
    return next(i for i in view.instances if name in {r.request_id for r in i.running})


def test_snapshot_shows_instances_degrees_and_the_queue(harness: Harness):
    names = harness.start([(8, 4), (6, 10)])
    view = snapshot(harness)
    assert [i.devices for i in view.instances] == [(0,), (1,)]
    assert all((i.free_tokens, i.free_slots, i.transition_to) == (CACHE, SLOTS, None) for i in view.instances)
    assert [(d.degree, d.max_requests) for d in view.degrees] == [(1, SLOTS), (2, 2 * SLOTS)]
    assert view.limits[2].capacity_tokens > 2 * CACHE, "weights are released"
    queue = {r.request_id: (r.prompt_tokens, r.max_total_tokens, r.started) for r in view.queue}
    assert queue == {names[0]: (8, 12, False), names[1]: (6, 16, False)}


def test_dispatched_request_runs_to_its_end(harness: Harness):
    (name,) = harness.start([(8, 12)])
    assert apply(harness, Dispatch(name, 1))[0].accepted
    view = snapshot(harness)
    assert not view.queue
    assert of(view, name).id == 1
    view = harness.until(lambda view: view.instances[1].free_slots == SLOTS)
    assert view.instances[1].free_tokens == CACHE


def test_what_cannot_be_is_refused_with_nothing_changed(harness: Harness):
    short, long = harness.start([(8, 4), (CACHE, 8)])
    before = snapshot(harness)
    actions: list[Action] = [
        Dispatch("no such request", 0),
        Dispatch(short, 7),
        Dispatch(long, 0),
        Preempt(short),
        Reject("no such request", RejectKind.DEADLINE, "late"),
        Preempt(short, PreemptKind.HARD),
        BindGroup((0, 1), 2),
        ScaleUp((1, 0), 2),
        ScaleUp((0,), 2),
        ScaleUp((0, 1), 3),
        ScaleUp((0, 1, 2, 3), 4),
    ]
    for action, outcome in zip(actions, apply(harness, *actions), strict=True):
        assert not outcome.accepted, action
        assert outcome.detail
    after = snapshot(harness)
    assert (after.instances, after.queue) == (before.instances, before.queue)


def test_no_more_requests_run_than_there_are_slots(harness: Harness):
    names = harness.start([(4, 12)] * (SLOTS + 1))
    outcomes = apply(harness, *(Dispatch(name, 0) for name in names))
    assert [outcome.accepted for outcome in outcomes] == [True] * SLOTS + [False]


def test_no_request_is_taken_without_room_for_its_prompt(harness: Harness):
    first, second = harness.start([(40, 8), (32, 8)])
    outcomes = apply(harness, Dispatch(first, 0), Dispatch(second, 0), Dispatch(second, 1))
    assert [outcome.accepted for outcome in outcomes] == [True, False, True]


def test_preempted_request_waits_again_with_its_output_as_prompt(harness: Harness):
    (name,) = harness.start([(8, 40)])
    apply(harness, Dispatch(name, 0))
    harness.until(lambda view: any(r.num_tokens > 12 for i in view.instances for r in i.running))
    assert apply(harness, Preempt(name))[0].accepted
    view = harness.until(lambda view: bool(view.queue))
    (waiting,) = view.queue
    assert waiting.started
    assert 12 < waiting.prompt_tokens < 48
    assert waiting.max_total_tokens == 48
    assert view.instances[0].free_tokens == CACHE


def test_rejected_request_is_gone(harness: Harness):
    names = harness.start([(8, 4), (8, 4)])
    assert apply(harness, Reject(names[0], RejectKind.QUEUE_FULL, "too many"))[0].accepted
    assert [r.request_id for r in snapshot(harness).queue] == names[1:]


def test_instances_merge_and_split_while_a_request_runs(harness: Harness):
    (name,) = harness.start([(8, 50)])
    apply(harness, Dispatch(name, 1))
    up = apply(harness, ScaleUp((0, 1), 2), ScaleUp((0, 1), 2), Dispatch(name, 0))
    assert [outcome.accepted for outcome in up] == [True, False, False]
    view = harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert [i.devices for i in view.instances] == [(0, 1)]
    assert of(view, name).capacity_tokens == view.limits[2].capacity_tokens
    assert [o.accepted for o in apply(harness, ScaleDown((0, 1), 1), Preempt(name))] == [True, False]
    view = harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert [i.devices for i in view.instances] == [(0,), (1,)]


def test_long_request_runs_where_instances_have_merged(harness: Harness):
    (name,) = harness.start([(CACHE + 20, 8)])
    assert apply(harness, ScaleUp((0, 1), 2))[0].accepted
    harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert apply(harness, Dispatch(name, 0))[0].accepted
    harness.until(lambda view: all(not i.running for i in view.instances) and not view.queue)
