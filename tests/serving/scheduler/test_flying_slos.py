"""Decisions of `flying` from measured times: SLOs of requests and SLOs of the server."""

import dataclasses
from typing import Any

import pytest
from cluster_views import SHORT, TP4_LONG, cluster, instance, running, waiting

from serving.scheduler import Action, ClusterView, Dispatch, FlyingConfig, FlyingPolicy, ScaleDown, ScaleUp, Timing

TIMING = Timing(
    {1: 0.04, 2: 0.03, 4: 0.02}, {1: 4_000.0, 2: 7_000.0, 4: 10_000.0}, {(1, 4): 1.0, (4, 1): 0.3}
)  # a short prompt of 1,100 tokens takes 0.275 s at TP1


def decide(view: ClusterView, **config: Any) -> list[Action]:
    return FlyingPolicy(FlyingConfig(**config)).decide(view)


def urgent(**fields: Any):
    return waiting("urgent", priority=-1, **fields)


@pytest.mark.parametrize(
    ("slos", "binds"),
    [
        ({}, True),
        ({"ttft_slo_s": 0.4}, False),
        ({"ttft_slo_s": 0.3}, True),  # prompt and step would take 0.315 s
        ({"tpot_slo_s": 0.04}, False),
        ({"tpot_slo_s": 0.03}, True),
        ({"ttft_slo_s": 0.4, "tpot_slo_s": 0.03}, True),
        ({"ttft_slo_s": 0.3, "tpot_slo_s": 0.04}, True),
    ],
)
def test_nothing_pauses_for_an_urgent_request_whose_slos_are_kept_without_a_group(slos: dict, binds: bool):
    busy = [instance(device, 1, running(f"r{device}")) for device in range(8)]
    (action,) = decide(cluster(*busy, queue=[urgent(**slos)], timing=TIMING))
    assert isinstance(action, ScaleUp if binds else Dispatch)


def test_it_binds_where_nothing_was_measured():
    (action,) = decide(cluster(queue=[urgent(ttft_slo_s=60.0)]))
    assert isinstance(action, ScaleUp)


def test_time_that_it_has_waited_and_prompts_before_it_count():
    request = urgent(ttft_slo_s=0.4)
    (late,) = decide(cluster(queue=[request], now_s=0.1, timing=TIMING))
    assert isinstance(late, ScaleUp)
    prompts = [instance(device, 1, running(f"r{device}", uncomputed_tokens=400)) for device in range(8)]
    (behind,) = decide(cluster(*prompts, queue=[request], timing=TIMING))
    assert isinstance(behind, ScaleUp)


def test_urgent_requests_of_one_decision_are_not_put_behind_each_other():
    """Eight requests are in time on an instance each. The ninth would run behind another request."""
    queue = [dataclasses.replace(urgent(ttft_slo_s=0.4), request_id=f"u{n}") for n in range(9)]
    actions = decide(cluster(queue=queue, timing=TIMING))
    dispatched = [a.instance_id for a in actions if isinstance(a, Dispatch)]
    assert sorted(dispatched) == list(range(8))
    assert [type(a) for a in actions if not isinstance(a, Dispatch)] == [ScaleUp]


def test_others_keep_away_from_steps_that_are_too_long():
    slow, fast = instance(0, 1, step_s=0.2), instance(1, 1, running("r"), step_s=0.02)
    for slo_s, default_s, place in ((None, 0.1, 1), (0.5, 0.1, 0), (0.1, None, 1), (None, None, 0)):
        view = cluster(slow, fast, queue=[waiting("a", tpot_slo_s=slo_s)], num_devices=2)
        assert [a.instance_id for a in decide(view, tpot_slo_s=default_s) if isinstance(a, Dispatch)] == [place]


def bound(now_s: float, *queue: Any) -> ClusterView:
    """Return two TP4 groups without free slots, merged for a light load."""
    full = [
        instance(first, 4, running(f"r{first}"), free_slots=0, capacity_tokens=48_000, free_tokens=40_000)
        for first in (0, 4)
    ]
    return cluster(*full, queue=queue, now_s=now_s, timing=TIMING)


@pytest.mark.parametrize(
    ("slo_s", "split_at_s"),
    [(None, 11.0), (0.8, 10.225), (5.0, 11.0)],  # this leaves 0.3 s for the split and 0.275 s for the prompt
)
def test_groups_split_in_time_for_a_short_request_without_room(slo_s: float | None, split_at_s: float):
    policy = FlyingPolicy(FlyingConfig(dwell_s=0.0))
    policy.decide(cluster(now_s=0.0))
    merges = policy.decide(cluster(now_s=5.0))
    assert [type(a) for a in merges] == [ScaleUp, ScaleUp]
    request = waiting("short", arrival_s=10.0, ttft_slo_s=slo_s)
    assert policy.decide(bound(10.0, request)) == []
    assert policy.decide(bound(split_at_s - 0.01, request)) == []
    splits = [a for a in policy.decide(bound(split_at_s + 0.01, request)) if isinstance(a, ScaleDown)]
    assert [a.degree for a in splits] == [1, 1]


def behind_a_long_one(**fields: Any) -> ClusterView:
    """Return a TP4 instance whose long request needs 20 s for 1,000 tokens, and a request that has waited since 1 s."""
    long = dataclasses.replace(running("long", TP4_LONG), num_tokens=TP4_LONG - 1_000)
    queue = [waiting("next", TP4_LONG, arrival_s=1.0, **fields)]
    return cluster(instance(0, 4, long), queue=queue, now_s=1.0, timing=TIMING)


def test_a_long_request_has_a_group_of_its_own_when_its_wait_would_break_the_slo():
    """Its first token would come after a wait of 20 s and 5 s more. With a merge, it comes after 1 s and 5 s more."""
    (action,) = decide(behind_a_long_one())
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)
    assert decide(behind_a_long_one(), ttft_slo_s=30.0) == []
    assert decide(behind_a_long_one(ttft_slo_s=30.0)) == []
    assert decide(behind_a_long_one(), ttft_slo_s=None) == []
    assert len(decide(behind_a_long_one(ttft_slo_s=20.0), ttft_slo_s=None)) == 1


def test_the_next_long_request_waits_for_the_group_that_comes():
    view = behind_a_long_one()
    third = waiting("third", TP4_LONG, arrival_s=1.0)
    assert len(decide(dataclasses.replace(view, queue=(*view.queue, third)))) == 1


def test_no_group_is_claimed_for_a_long_request_that_can_wait():
    """All other instances are too full to merge at once. Short requests still start on them."""
    view = behind_a_long_one()
    full = tuple(
        instance(d, 1, *(running(f"f{d}-{n}", SHORT) for n in range(9))) if d >= 4 else i
        for d, i in ((i.id, i) for i in view.instances)
    )
    short = waiting("short", 600, arrival_s=1.0)
    actions = decide(dataclasses.replace(view, instances=full, queue=(*view.queue, short)))
    assert [a.request_id for a in actions if isinstance(a, Dispatch)] == ["short"]
    assert not any(isinstance(a, ScaleUp) for a in actions)
