"""Steps that requests share, compared with a reference that advances one step at a time."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler import DegreeLimits, StaticPolicy
from serving.simulator.batching import TokenBudget
from serving.simulator.event_loop import Cluster
from serving.simulator.host_config import HostConfig
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.router import OneHost
from serving.simulator.step_cost import StepShape, prompt_pairs
from serving.simulator.tally import Ending
from serving.simulator.transformation_cost import FixedTransformation

BUDGET, CAPACITY = 64, 4096
moments = st.integers(0, 300).map(lambda n: n * 0.01012347)
"""Arrival times. Some are equal, but none falls on the end of a step."""


@dataclass(frozen=True)
class Linear:
    """Step times that grow linearly with decodes, prompt tokens and context."""

    calls: list[StepShape] = field(default_factory=list)

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        self.calls.append(shape)
        return 0.01 + 0.001 * shape.decodes + 0.0005 * shape.prompt_tokens

    def context_s(self, degree: int) -> float:
        return 1e-5

    def pair_s(self, degree: int) -> float:
        return 1e-6


def run(
    arrivals: list[float], prompts: list[int], outputs: list[int], slots: int = 64, capacity: int = CAPACITY
) -> Cluster:
    order = np.argsort(arrivals, kind="stable")
    table = RequestTable(
        np.array(arrivals)[order], np.array(prompts)[order], np.array(outputs)[order], np.array(outputs)[order],
        np.zeros(len(arrivals), int),
    )  # fmt: skip
    limits = (DegreeLimits(1, capacity, slots),)
    host = HostConfig(1, limits, Pricing(Linear(), TokenBudget(BUDGET)), FixedTransformation(), (1,))
    cluster = Cluster([(host, StaticPolicy)], table, OneHost())
    cluster.run()
    return cluster


def reference(arrivals: list[float], prompts: list[int], outputs: list[int]) -> tuple[list[float], list[float]]:
    """Return the times of the first and last token of each request, for an instance with room for all."""
    cost, now = Linear(), 0.0
    state = [[a, p, 0, o, 0] for a, p, o in sorted(zip(arrivals, prompts, outputs, strict=True), key=lambda r: r[0])]
    first, last = [0.0] * len(state), [0.0] * len(state)
    while any(s[4] < s[3] for s in state):
        here = [i for i, s in enumerate(state) if s[0] <= now + 1e-12 and s[4] < s[3]]
        if not here:
            now = min(s[0] for s in state if s[4] < s[3])
            continue
        decodes = [i for i in here if state[i][2] >= state[i][1]]
        budget, chunks = BUDGET, []
        for i in here:
            left = state[i][1] - state[i][2]
            if left > 0 and budget > 0:
                chunks.append((i, min(left, budget)))
                budget -= chunks[-1][1]
        context = sum(state[i][1] + state[i][4] for i in decodes)
        pairs = sum(prompt_pairs(state[i][2], n) for i, n in chunks)
        now += cost.fixed_s(1, StepShape(len(decodes), len(chunks), sum(n for _, n in chunks)))
        now += 1e-5 * context + 1e-6 * pairs
        for i in decodes:
            state[i][4] += 1
            last[i] = now
        for i, n in chunks:
            state[i][2] += n
            if state[i][2] == state[i][1]:
                state[i][4], first[i], last[i] = 1, now, now
    return first, last


@settings(max_examples=60)
@given(st.lists(st.tuples(moments, st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12))
def test_times_are_those_of_single_steps(requests: list[tuple[float, int, int]]):
    arrivals, prompts, outputs = (list(column) for column in zip(*requests, strict=True))
    first, last = reference(arrivals, prompts, outputs)
    records = run(arrivals, prompts, outputs).records
    assert list(records.first_token_s) == pytest.approx(first, abs=1e-6)
    assert list(records.end_s) == pytest.approx(last, abs=1e-6)


def test_prompts_hold_up_those_that_decode_in_the_same_steps():
    alone = run([0.0], [10], [200]).records
    beside = run([0.0, 0.5], [10, 3000], [200, 1]).records
    prompt_steps = -(-3000 // BUDGET)
    assert beside.end_s[0] - alone.end_s[0] > prompt_steps * 0.0005 * BUDGET * 0.9
    tally = run([0.0, 0.5], [10, 3000], [200, 1]).tally
    assert tally.interference_s > 0.9 * (beside.end_s[0] - alone.end_s[0])


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 300)), min_size=2, max_size=20),
    st.integers(1, 4),
)
def test_every_token_is_generated_once_whatever_is_preempted(requests: list[tuple[float, int, int]], slots: int):
    """The cache holds two of the largest requests."""
    arrivals, prompts, outputs = (list(column) for column in zip(*requests, strict=True))
    cluster = run(arrivals, prompts, outputs, slots, capacity=1216)
    assert list(cluster.records.ending) == [Ending.COMPLETED] * len(requests)
    assert cluster.tally.generated_tokens == sum(outputs)
    assert cluster.tally.prompt_tokens >= sum(prompts)
    ordered = sorted(zip(arrivals, prompts, outputs, strict=True), key=lambda r: r[0])
    assert all(t >= a for t, (a, _, _) in zip(cluster.records.first_token_s, ordered, strict=True))
