"""Instances that launch a step when the previous step begins, as the engine does."""

import numpy as np
import pytest

from serving.scheduler import DegreeLimits, Dispatch, Preempt, StaticPolicy, WaitingRequest
from serving.simulator.batching import TokenBudget
from serving.simulator.event_loop import Cluster
from serving.simulator.host_config import HostConfig, Waiting
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.router import OneHost
from serving.simulator.sim_executor import SimExecutor
from serving.simulator.step_cost import StepShape, TableStepCost
from serving.simulator.tally import Records, Tally
from serving.simulator.transformation_cost import FixedTransformation

DECODES = TableStepCost({1: {1: 0.010, 2: 0.010, 8: 0.010}}, {1: {16: 0.020}}, few_rows=8)


def serve(
    arrivals: list[float],
    outputs: list[int],
    ahead: bool,
    latency_s: float = 0.0,
) -> Cluster:
    """Serve prompts of 16 tokens. A prompt step takes 20 ms, and a decode step 10 ms."""
    count = len(arrivals)
    table = RequestTable(
        np.array(arrivals), np.full(count, 16), np.array(outputs), np.array(outputs), np.zeros(count, int)
    )
    host = HostConfig(
        1, (DegreeLimits(1, 4096, 8),), Pricing(DECODES, TokenBudget(64), latency_s=latency_s), FixedTransformation(),
        (1,), launches_ahead=ahead,
    )  # fmt: skip
    cluster = Cluster([(host, StaticPolicy)], table, OneHost())
    cluster.run()
    return cluster


@pytest.mark.parametrize(("ahead", "first_token_s"), [(False, 0.090), (True, 0.100)])
def test_a_request_joins_the_step_after_the_one_that_is_launched(ahead: bool, first_token_s: float):
    """It comes at 65 ms, in the step from 60 to 70 ms. With launching ahead, the step to 80 ms is already launched."""
    records = serve([0.0, 0.065], [50, 5], ahead).records
    assert records.first_token_s[0] == pytest.approx(0.020)
    assert records.first_token_s[1] == pytest.approx(first_token_s)


def test_nothing_is_launched_ahead_where_nothing_is_left_to_compute():
    """The second request arrives in the step that computes the last token of the first."""
    records = serve([0.0, 0.025], [2, 5], True).records
    assert records.end_s[0] == pytest.approx(0.030)
    assert records.first_token_s[1] == pytest.approx(0.050)


def test_latency_is_seen_and_keeps_no_device_busy():
    plain, late = serve([0.0, 0.1], [20, 20], False), serve([0.0, 0.1], [20, 20], False, latency_s=0.004)
    for column in ("first_token_s", "end_s"):
        shift = np.array(getattr(late.records, column)) - np.array(getattr(plain.records, column))
        assert shift == pytest.approx([0.004, 0.004])


def test_all_requests_are_served_the_same_tokens():
    arrivals, outputs = sorted(np.random.default_rng(0).uniform(0, 2, 40).tolist()), [7] * 40
    ahead, plain = serve(arrivals, outputs, True), serve(arrivals, outputs, False)
    assert ahead.tally.generated_tokens == plain.tally.generated_tokens == 280
    late = np.array(ahead.records.first_token_s) - np.array(plain.records.first_token_s)
    assert late.mean() > 0.005


def test_a_step_with_a_prompt_has_rows_for_decodes_already():
    table = TableStepCost(
        {1: {1: 0.010, 8: 0.018, 16: 0.030}}, {1: {16: 0.020, 64: 0.050}}, {1: {16: 0.045}}, few_rows=8
    )
    assert table.fixed_s(1, StepShape(0, 1, 16, 16)) == table.fixed_s(1, StepShape(7, 1, 16, 16)) == 0.020
    assert table.fixed_s(1, StepShape(8, 1, 16, 16)) == pytest.approx(0.020 + 0.012), "all rows"
    assert table.fixed_s(1, StepShape(2, 3, 40, 16)) == 0.045, "four at once"


def test_preempting_a_request_leaves_the_running_step_to_the_others():
    """One of two requests is preempted at 35 ms. The other still gets the token of the step that ends at 40 ms."""
    records = Records(2)
    limits = (DegreeLimits(1, 4096, 8),)
    config = HostConfig(1, limits, Pricing(DECODES, TokenBudget(64)), FixedTransformation(), (1,), strict=True)
    executor = SimExecutor(config, records, Tally(1.0), lambda instance, end_s: None)
    for index in range(2):
        request = WaitingRequest(f"r{index}", 16, 116)
        executor.queue[request.request_id] = Waiting(request, index, 100, 0.0)
        executor.apply(Dispatch(request.request_id, 0))
    (instance,) = executor.instances
    while instance.num_decoding < 2:
        executor.now_s = instance.block.end_s
        executor.end_block(instance)
    start_s = executor.now_s
    executor.now_s = start_s + 0.035
    assert executor.apply(Preempt("r1")).accepted
    assert instance.block.end_s == pytest.approx(start_s + 0.040)
    before = instance.runs["r0"].num_tokens(instance.steps)
    executor.now_s = instance.block.end_s
    executor.end_block(instance)
    assert instance.runs["r0"].num_tokens(instance.steps) == before + 1
    waiting = executor.queue["r1"].request
    assert waiting.started


def test_what_a_request_waited_counts_after_a_preemption():
    config = HostConfig(
        1, (DegreeLimits(1, 4096, 8),), Pricing(DECODES, TokenBudget(64)), FixedTransformation(), (1,), strict=True
    )
    executor = SimExecutor(config, Records(1), Tally(1.0), lambda instance, end_s: None)
    request = WaitingRequest("r", 16, 116)
    executor.queue["r"] = Waiting(request, 0, 100, 0.0)
    executor.now_s = 5.0
    executor.apply(Dispatch("r", 0))
    assert executor.snapshot().instances[0].running[0].queued_s == 5.0
    executor.now_s = 20.0
    executor.apply(Preempt("r"))
    assert executor.queue["r"].request.waited_s(20.0) == pytest.approx(5.0)
