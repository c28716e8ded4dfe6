"""Decisions of `round_robin`, `least_load_first` and `static` in a given state."""

import pytest
from cluster_views import TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting

from serving.scheduler import (
    POLICY_NAMES,
    Action,
    Dispatch,
    LeastLoadFirstPolicy,
    Reject,
    RejectKind,
    RoundRobinPolicy,
    ScaleDown,
    ScaleUp,
    SplitConfig,
    StaticPolicy,
    UnknownPolicyError,
    make_policy,
)

BASELINES = [RoundRobinPolicy, LeastLoadFirstPolicy]


def dispatched(actions: list[Action]) -> dict[str, int]:
    return {a.request_id: a.instance_id for a in actions if isinstance(a, Dispatch)}


def test_round_robin_takes_instances_in_turn():
    policy = RoundRobinPolicy()
    merged = instance(0, 4, running("long", TP4_LONG))
    view = cluster(merged, queue=[waiting(f"r{n}", arrival_s=n / 10) for n in range(4)], now_s=1)
    assert dispatched(policy.decide(view)) == {"r0": 0, "r1": 4, "r2": 5, "r3": 6}
    following = cluster(merged, queue=[waiting("r4"), waiting("r5", arrival_s=1)])
    assert dispatched(policy.decide(following)) == {"r4": 7, "r5": 0}


def test_least_load_first_takes_the_least_loaded():
    view = cluster(*[filled(d, 0.5) for d in range(8) if d != 6], queue=[waiting("a")])
    assert dispatched(LeastLoadFirstPolicy().decide(view)) == {"a": 6}


@pytest.mark.parametrize("policy", BASELINES)
def test_request_that_does_not_fit_its_instance_makes_the_group_scale_up(policy):
    view = cluster(*[filled(d, 0.5) for d in range(1, 8)], queue=[waiting("long", TP2_LONG)])
    (action,) = policy().decide(view)
    assert isinstance(action, ScaleUp)
    assert (action.devices, action.degree) == ((0, 1), 2)


def test_least_load_first_merges_again_although_a_merged_instance_has_room():
    merged = instance(0, 4, running("long", 30_000))
    (action,) = LeastLoadFirstPolicy().decide(cluster(merged, queue=[waiting("next", 45_000)]))
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)


@pytest.mark.parametrize("policy", BASELINES)
def test_request_goes_to_the_instance_that_was_merged_for_it(policy):
    baseline = policy()
    queue = [waiting("long", TP4_LONG)]
    assert isinstance(baseline.decide(cluster(queue=queue))[0], ScaleUp)
    assert baseline.decide(cluster(instance(0, 4, transition_to=4), queue=queue)) == []
    assert dispatched(baseline.decide(cluster(instance(0, 4), queue=queue))) == {"long": 0}


@pytest.mark.parametrize("policy", BASELINES)
def test_instance_splits_when_it_has_no_long_request(policy):
    assert policy().decide(cluster(instance(0, 4, running("long", TP4_LONG)))) == []
    (action,) = policy(splits=SplitConfig(linger_s=0)).decide(cluster(instance(0, 4, running("short"))))
    assert isinstance(action, ScaleDown)
    assert (action.devices, action.degree) == ((0, 1, 2, 3), 1)


@pytest.mark.parametrize("policy", BASELINES)
def test_requests_that_have_gone_are_forgotten(policy):
    baseline = policy()
    baseline.decide(cluster(queue=[waiting("cancelled", TP4_LONG)]))
    baseline.decide(cluster())
    assert baseline.device_of == {}


def test_static_never_transforms_and_names_the_limit():
    view = cluster(queue=[waiting("long", TP2_LONG), waiting("short")])
    reject, dispatch = StaticPolicy().decide(view)
    assert isinstance(reject, Reject)
    assert reject.kind is RejectKind.NEVER_FITS
    assert "20000 tokens, over the limit of 12000" in reject.reason
    assert "TP1" in reject.reason
    assert isinstance(dispatch, Dispatch)
    assert StaticPolicy().decide(cluster(instance(0, 4))) == []


def test_static_sends_a_long_request_to_the_instance_that_holds_it():
    assert dispatched(StaticPolicy().decide(cluster(instance(4, 4), queue=[waiting("long", TP4_LONG)]))) == {"long": 4}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policies_are_made_by_name(name):
    assert make_policy(name).name == name


def test_unknown_policy_is_refused_with_the_known_names():
    with pytest.raises(
        UnknownPolicyError, match=r"'lifo' is not known.*amoeba, amoeba_paper, flying, cocoserve, round_robin"
    ):
        make_policy("lifo")
