"""Decisions from measured times: SLOs of requests, second merges and slow instances."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster_views import DEGREES, TP4_LONG, cluster, filled, instance, running, waiting
from policy_runs import simulate

from amoeba_jax.instances.pace import DecodeRate
from amoeba_jax.transform.report import GroupTransform, TransformReport, TransformVariant
from serving.runtime.timings import Timings
from serving.scheduler import (
    Action,
    AmoebaConfig,
    AmoebaPolicy,
    ClusterView,
    Dispatch,
    ScaleUp,
    Throughput,
    Timing,
    WaitingRequest,
    estimates,
)
from serving.scheduler.room import Room

TIMING = Timing({1: 0.04, 2: 0.03, 4: 0.02}, {1: 4_000.0, 2: 7_000.0, 4: 10_000.0}, {(1, 4): 1.0})


def behind_a_long_one(now_s: float = 1.0, timing: Timing = TIMING, **request: Any) -> ClusterView:
    """Return a TP4 instance whose long request needs 20 s for 1,000 tokens, and a request that has waited since 1 s."""
    long = running("long", TP4_LONG)
    long = dataclasses.replace(long, num_tokens=TP4_LONG - 1_000)
    queue = [waiting("next", TP4_LONG, arrival_s=1.0, **request)]
    return cluster(instance(0, 4, long), queue=queue, now_s=now_s, timing=timing)


def test_a_merge_without_measurement_is_estimated_from_merges_only():
    """A split to TP2 took 9 s, and a merge from TP2 to TP4 took 2 s. The time of a merge to TP2 is unknown."""
    timing = dataclasses.replace(TIMING, transformations_s={(4, 2): 9.0, (2, 4): 2.0})
    members = instance(0), instance(1)
    view, request = cluster(*members, timing=timing), waiting("next", 7_000)
    assert estimates.merge_s(view, members, 2, request) is None
    assert estimates.merge_s(view, members, 4, request) == pytest.approx(2.0 + request.prompt_tokens / 10_000.0)


def decide(view: ClusterView, **config: Any) -> list[Action]:
    return AmoebaPolicy(AmoebaConfig(**config)).decide(view)


def test_a_long_request_has_a_second_merge_when_its_wait_would_break_the_slo():
    """Its first token would come after a wait of 20 s and 5 s more. With a merge, it comes after 1 s and 5 s more."""
    (action,) = decide(behind_a_long_one())
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)
    assert "its first token would come after 25.0 s, and here after 6.0 s" in action.reason


@pytest.mark.parametrize(
    ("config", "request_fields"),
    [({"ttft_slo_s": 30.0}, {}), ({"ttft_slo_s": None}, {}), ({}, {"ttft_slo_s": 30.0})],
)
def test_it_waits_where_the_slo_is_met(config: dict[str, Any], request_fields: dict[str, Any]):
    assert decide(behind_a_long_one(**request_fields), **config) == []


def test_a_request_may_have_an_slo_of_its_own():
    assert len(decide(behind_a_long_one(ttft_slo_s=20.0), ttft_slo_s=None)) == 1


def test_time_that_it_has_waited_counts():
    assert decide(behind_a_long_one(now_s=4.0), ttft_slo_s=30.0) == []
    assert len(decide(behind_a_long_one(now_s=7.0), ttft_slo_s=30.0)) == 1


def test_it_waits_while_nothing_was_measured():
    assert decide(behind_a_long_one(timing=Timing())) == []
    no_merge = dataclasses.replace(TIMING, transformations_s={})
    assert decide(behind_a_long_one(timing=no_merge)) == []


def test_it_waits_where_a_merge_would_not_be_sooner():
    slow = dataclasses.replace(TIMING, transformations_s={(1, 4): 21.0})
    assert decide(behind_a_long_one(timing=slow)) == []


def test_no_second_merge_while_short_requests_lack_room():
    """A merge would use the devices that short requests wait for."""
    view = behind_a_long_one()
    full = [instance(d, 1, free_slots=0) for d in range(4, 8)]
    (merged,) = [i for i in view.instances if i.degree == 4]
    merged = dataclasses.replace(merged, free_slots=0)
    short = waiting("short", arrival_s=0.0)
    pressed = cluster(merged, *full, queue=[short, *view.queue], now_s=1.0, timing=TIMING)
    assert decide(pressed) == []


def test_requests_behind_each_other_wait_for_each_other():
    """The third request waits 20 s for the first and 7 s for the second, and then computes its prompt."""
    view = behind_a_long_one()
    queue = (*view.queue, waiting("third", TP4_LONG, arrival_s=1.5))
    both = dataclasses.replace(view, queue=queue, now_s=1.5)
    actions = decide(both, ttft_slo_s=28.0)
    assert len(actions) == 1
    assert actions[0].reason.startswith("third")


def test_wait_is_until_enough_has_ended():
    """Three requests end after 2, 4 and 6 s. A larger request waits for more running requests."""
    ends = [dataclasses.replace(running(f"r{n}", 10_000), num_tokens=10_000 - 100 * n) for n in (1, 2, 3)]
    view = cluster(instance(0, 2, *ends), timing=dataclasses.replace(TIMING, steps_s={2: 0.02}))
    room, (busy, *_) = Room(view, 0.0), view.instances
    assert estimates.wait_s(view, room, busy, 2_000) == 0.0
    assert estimates.wait_s(view, room, busy, 12_000) == pytest.approx(2.0)
    assert estimates.wait_s(view, room, busy, 20_000) == pytest.approx(4.0)
    prompts = dataclasses.replace(busy, running=(dataclasses.replace(ends[0], uncomputed_tokens=7_000), *ends[1:]))
    assert estimates.wait_s(view, room, prompts, 12_000) == pytest.approx(3.0)
    assert estimates.wait_s(cluster(busy), room, busy, 12_000) is None


def test_short_requests_keep_away_from_steps_that_are_too_long():
    """Instance 0 has the smaller load, but decode steps of 0.2 s."""
    slow, fast = instance(0, 1, step_s=0.2), instance(1, 1, running("r"), step_s=0.02)
    view = cluster(slow, fast, queue=[waiting("a")], num_devices=2)
    assert [a.instance_id for a in decide(view) if isinstance(a, Dispatch)] == [1]
    patient = dataclasses.replace(view, queue=(waiting("a", tpot_slo_s=0.5),))
    assert [a.instance_id for a in decide(patient) if isinstance(a, Dispatch)] == [0]
    only_slow = cluster(slow, filled(1, 1.0), queue=[waiting("a")], num_devices=2)
    assert [a.instance_id for a in decide(only_slow) if isinstance(a, Dispatch)] == [0]


def long_ttfts_s(seed: int, ttft_slo_s: float | None) -> tuple[list[float], int]:
    """Return the TTFTs of long requests in 20 minutes of AMOEBA's mix, and the number of merges."""
    rng, now_s = random.Random(seed), 0.0
    arrivals = [(WaitingRequest(f"short{n}", 1_000, 1_500, arrival_s=float(n)), 250) for n in range(1_200)]
    while (now_s := now_s + rng.expovariate(1 / 60)) < 1_200:
        arrivals.append((WaitingRequest(f"long{len(arrivals)}", 50_000, 50_800, arrival_s=now_s), 400))
    policy = AmoebaPolicy(AmoebaConfig(ttft_slo_s=ttft_slo_s))
    ran = simulate(policy, arrivals, 1_300, DEGREES, shows_timing=True)
    first_s = ran.first_token_s
    ttfts_s = [first_s[r.request_id] - r.arrival_s for r, _ in arrivals if r.request_id.startswith("long")]
    return ttfts_s, ran.count(ScaleUp)


@pytest.mark.slow
def test_second_merges_shorten_the_longest_waits_of_a_mix():
    """If both groups are busy, a third long request still waits."""
    late = {10.0: 0, None: 0}
    for seed in (2, 3, 4):
        with_slo, merges = long_ttfts_s(seed, 10.0)
        without, fewer = long_ttfts_s(seed, None)
        print(f"\nseed {seed}: worst TTFT {max(with_slo):.1f} s for {max(without):.1f} s; merges {merges} for {fewer}")
        assert max(with_slo) < 0.7 * max(without)
        late[10.0] += sum(ttft_s > 10.0 for ttft_s in with_slo)
        late[None] += sum(ttft_s > 10.0 for ttft_s in without)
    assert late[10.0] <= late[None] / 4


def test_timings_are_medians_and_remembered():
    timings = Timings()

    def at(tp: int, step_s: float | None, rate: float | None) -> Any:
        pace = SimpleNamespace(step_s=step_s, prompt_tokens_per_s=rate, decode_rate=None)
        return SimpleNamespace(tp=tp, pace=pace, running=[], transition=None)

    first = timings.take([at(1, 0.1, 50.0), at(1, 0.3, None), at(1, 0.2, 70.0), at(4, None, None)])
    assert first == Timing({1: 0.2}, {1: 60.0}, {})
    for seconds in (9.0, 2.0, 3.0):
        group = GroupTransform((0, 1, 2, 3), 1, 4, seconds, (), 0, 0, 0, 0)
        timings.transformed(TransformReport(TransformVariant.IN_PLACE_OVERLAPPED, 4, seconds, 0.0, (group,)))
    merged = timings.take([cast(Any, at(4, 0.05, 90.0))])
    assert merged == Timing({1: 0.2, 4: 0.05}, {1: 60.0, 4: 90.0}, {(1, 4): 3.0})


def test_throughput_is_the_highest_of_all_devices_at_one_degree():
    timings = Timings()

    def at(tp: int, *rate: float, busy: bool = True, transition: object = None) -> Any:
        pace = SimpleNamespace(step_s=1.0, prompt_tokens_per_s=None, decode_rate=DecodeRate(*rate) if rate else None)
        return SimpleNamespace(tp=tp, pace=pace, running=[0] if busy else [], transition=transition)

    assert timings.take([at(1, 4, 40.0), at(1, 2, 30.0)]).throughput == {1: Throughput(6, 70.0)}
    for others in (
        [at(1, 4, 90.0), at(1, 2, 90.0, busy=False)],
        [at(1, 4, 90.0), at(1)],
        [at(1, 4, 90.0), at(2, 2, 90.0)],
        [at(1, 4, 90.0), at(1, 2, 90.0, transition=object())],
        [at(1, 4, 30.0), at(1, 2, 30.0)],
    ):
        assert timings.take(others).throughput == {1: Throughput(6, 70.0)}
    assert timings.take([at(2, 9, 60.0)]).throughput == {1: Throughput(6, 70.0), 2: Throughput(9, 60.0)}


@pytest.mark.parametrize(
    ("high", "low", "more"),
    [
        (Throughput(16, 100.0), Throughput(16, 90.0), True),
        (Throughput(16, 100.0), Throughput(16, 110.0), False),
        (Throughput(16, 100.0), Throughput(4, 90.0), False),  # measured with few sequences only
        (None, Throughput(16, 90.0), False),
        (Throughput(16, 100.0), None, False),
    ],
)
def test_throughputs_compare_where_they_were_measured_alike(
    high: Throughput | None, low: Throughput | None, more: bool
):
    known = {degree: found for degree, found in ((4, high), (1, low)) if found is not None}
    assert Timing(throughput=known).generates_more(4, 1, 16) == more
    assert not Timing(throughput=known).generates_more(4, 1, 40), "it was not seen with as many"
