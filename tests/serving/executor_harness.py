"""A common test interface to the simulated executor and to the executor on devices."""

import contextlib
import heapq
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from serving_checks import TIMEOUT_S
from transform_cases import Background

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import QueueFullError
from serving.runtime.jax_executor import EngineScheduler
from serving.scheduler import Action, ClusterView, DegreeLimits, Executor, InstanceView, Outcome, Reject, RejectKind
from serving.simulator.batching import EngineBuckets
from serving.simulator.host_config import HostConfig, Waiting
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.sim_executor import SimExecutor
from serving.simulator.step_cost import RateStepCost
from serving.simulator.tally import Records, Tally
from serving.simulator.transformation_cost import FixedTransformation

CACHE, PAGE, SLOTS = 64, 4, 4
"""Tokens of the KV cache, tokens in a page, and slots of an instance of one device."""


class Silent:
    """Policy without decisions, which leaves paused requests paused."""

    name = "silent"
    pauses = True

    def decide(self, view: ClusterView) -> list[Action]:
        return []


def kept(executor: Executor) -> ClusterView:
    """Return a snapshot with a copy of the queue. On devices, the queue itself is valid for one moment only."""
    view = executor.snapshot()
    return replace(view, queue=tuple(view.queue))


class Harness(Protocol):
    """Two devices with an executor under test."""

    def start(self, requests: list[tuple[int, int]]) -> list[str]:
        """Queue requests with these prompt and output tokens, and return their names in order."""
        ...

    def call(self, what: Callable[[Executor], Any]) -> Any:
        """Call a function with the executor at one moment, as a scheduler does, and return its result."""
        ...

    def until(self, what: Callable[[ClusterView], bool]) -> ClusterView:
        """Advance time until a snapshot meets the condition, and return this snapshot."""
        ...


class SimHarness:
    """Harness in virtual time."""

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
    """Harness over an engine. Calls run on its dispatcher thread."""

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
        """Reject queued requests, wait until running requests end, and split."""

        def clear(executor: Executor) -> int:
            view = kept(executor)
            for request in view.queue:
                executor.apply(Reject(request.request_id, RejectKind.QUEUE_FULL, "the test is over"))
            return sum(len(i.running) for i in view.instances) + len(view.queue)

        while self.call(clear):
            time.sleep(0.01)
        while self._llm._engine.changes.busy:
            time.sleep(0.01)
        for background in self._background:
            with contextlib.suppress(QueueFullError):  # rejected requests
                background.result()
        self._llm.remove_scheduler_hook()
        if any(view.tensor_parallel_size > 1 for view in self._llm.instances):
            self._llm.transform(1)


def apply(harness: Harness, *actions: Action) -> list[Outcome]:
    """Apply actions right after a snapshot, as a scheduler does, and return their outcomes."""

    def all_of_them(executor: Executor) -> list[Outcome]:
        executor.snapshot()
        return [executor.apply(action) for action in actions]

    return harness.call(all_of_them)


def snapshot(harness: Harness) -> ClusterView:
    return harness.call(kept)


def of(view: ClusterView, name: str) -> InstanceView:
    """Return the instance that runs a request."""
    return next(i for i in view.instances if name in {r.request_id for r in i.running})
