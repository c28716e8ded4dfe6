"""The split rule that all policies share."""

import pytest
from cluster_views import CAPACITY, TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting

from serving.scheduler import (
    Action,
    AmoebaConfig,
    AmoebaPolicy,
    Dispatch,
    LeastLoadFirstPolicy,
    Policy,
    Preempt,
    RoundRobinPolicy,
    ScaleDown,
    SplitConfig,
)

CONFIG = SplitConfig(linger_s=10)
POLICIES = [
    lambda config: RoundRobinPolicy(splits=config),
    lambda config: LeastLoadFirstPolicy(splits=config),
    lambda config: AmoebaPolicy(AmoebaConfig(config.free_share, config.linger_s, config.partial)),
]


def splits(actions: list[Action]) -> list[tuple[tuple[int, ...], int]]:
    return [(a.devices, a.degree) for a in actions if isinstance(a, ScaleDown)]


def after(policy: Policy, *seen, now_s: float = 100.0) -> list[tuple[tuple[int, ...], int]]:
    """Return the splits at `now_s` if the instances have not changed since 0 s."""
    policy.decide(cluster(*seen, now_s=0))
    return splits(policy.decide(cluster(*seen, now_s=now_s)))


@pytest.mark.parametrize("make", POLICIES)
def test_all_policies_linger_alike(make):
    policy = make(CONFIG)
    merged = instance(0, 4, running("short"))
    assert splits(policy.decide(cluster(instance(0, 4, running("long", TP4_LONG)), now_s=0))) == []
    assert splits(policy.decide(cluster(merged, now_s=9))) == []
    assert splits(policy.decide(cluster(merged, now_s=10))) == [((0, 1, 2, 3), 1)]


@pytest.mark.parametrize("make", POLICIES)
def test_all_policies_wait_until_half_of_the_cache_is_free(make):
    fuller = instance(0, 4, *(running(f"r{n}") for n in range(40)))
    assert after(make(SplitConfig(linger_s=0)), fuller) == []
    assert after(make(SplitConfig(linger_s=0, free_share=0.4)), fuller) == [((0, 1, 2, 3), 1)]


@pytest.mark.parametrize("make", POLICIES)
def test_an_instance_that_is_done_takes_no_new_requests(make):
    """Waiting requests go to other instances."""
    fuller = instance(0, 4, *(running(f"r{n}") for n in range(40)))
    queue = [waiting(f"n{n}", arrival_s=n / 100) for n in range(8)]
    actions = make(SplitConfig(linger_s=0)).decide(cluster(fuller, queue=queue, now_s=1))
    assert sorted({a.instance_id for a in actions if isinstance(a, Dispatch)}) == [4, 5, 6, 7]


@pytest.mark.parametrize("make", POLICIES)
def test_a_long_request_that_tp2_holds_lets_a_tp4_instance_split_in_two(make):
    assert after(make(CONFIG), instance(0, 4, running("long", TP2_LONG))) == [((0, 1, 2, 3), 2)]
    assert after(make(CONFIG), instance(0, 4, running("long", TP2_LONG)), now_s=9) == []
    assert after(make(SplitConfig(linger_s=10, partial=False)), instance(0, 4, running("long", TP2_LONG))) == []


@pytest.mark.parametrize("make", POLICIES)
def test_a_long_request_that_only_tp4_holds_keeps_the_instance(make):
    assert after(make(CONFIG), instance(0, 4, running("long", TP4_LONG))) == []


def test_a_waiting_request_that_needs_tp4_keeps_the_instance():
    policy = AmoebaPolicy(AmoebaConfig(linger_s=0))
    no_slot = instance(0, 4, running("long", TP2_LONG), free_slots=0)
    assert splits(policy.decide(cluster(no_slot, queue=[waiting("next", TP4_LONG)]))) == []
    assert splits(policy.decide(cluster(no_slot, queue=[waiting("next", TP2_LONG)]))) == [((0, 1, 2, 3), 2)]


def test_no_partial_split_below_the_degree_that_merges_go_to():
    """The parts would merge again for the next request."""
    policy = AmoebaPolicy(AmoebaConfig(linger_s=0, merge_to=4))
    assert after(policy, instance(0, 4, running("long", TP2_LONG))) == []


def test_no_partial_split_into_parts_that_do_not_hold_the_long_requests():
    """Three requests of 25,000 tokens do not fit on two TP2 instances of 32,000. The instance keeps taking requests."""
    merged = instance(0, 4, *(running(f"long{n}", 25_000) for n in range(3)), free_tokens=CAPACITY[4] * 6 // 10)
    policy = AmoebaPolicy(AmoebaConfig(linger_s=0))
    actions = policy.decide(cluster(merged, queue=[waiting("a")], num_devices=4))
    assert [type(a) for a in actions] == [Dispatch]


def test_short_requests_without_room_end_lingering():
    policy = AmoebaPolicy(AmoebaConfig(linger_s=1_000))
    full = [instance(d, 1, free_slots=0) for d in range(4, 8)]
    view = cluster(instance(0, 4, running("long", TP2_LONG), free_slots=0), *full, queue=[waiting("a")])
    assert splits(policy.decide(view)) == []
    assert splits(policy.decide(view)) == [((0, 1, 2, 3), 2)]


def test_an_instance_does_not_split_while_a_preempted_long_request_is_not_waiting_yet():
    """The long request was preempted for another client's short request, and its last token is in flight. After a
    split, the instance would merge again for the long request."""
    long = running("long", TP4_LONG, beyond_share=True)
    fillers = [instance(device, 1, running(f"r{device}", 12_000), free_tokens=0) for device in range(4, 8)]
    full = instance(0, 4, long, free_tokens=0)
    policy = AmoebaPolicy(AmoebaConfig(linger_s=0))
    preempts = policy.decide(cluster(full, *fillers, queue=[waiting("short")], now_s=1))
    assert [a.request_id for a in preempts if isinstance(a, Preempt)] == ["long"]
    empty = instance(0, 4)
    assert splits(policy.decide(cluster(empty, *fillers, now_s=1.1, hidden_tokens=(TP4_LONG,)))) == []
    back = [waiting("long", TP4_LONG, beyond_share=True)]
    assert splits(policy.decide(cluster(empty, *fillers, queue=back, now_s=1.2))) == []
    ended = AmoebaPolicy(AmoebaConfig(linger_s=0))
    ended.decide(cluster(full, *fillers, queue=[waiting("short")], now_s=1))
    assert splits(ended.decide(cluster(empty, *fillers, now_s=3))) == [((0, 1, 2, 3), 1)], "it was cancelled"


@pytest.mark.parametrize("make", POLICIES)
def test_an_instance_that_serves_no_one_splits_as_soon_as_its_requests_fit(make):
    """An instance over half full takes no requests. It splits anyway if short requests have no other instance."""
    fuller = instance(0, 4, *(running(f"r{n}") for n in range(40)))
    waits = [waiting("n")]
    policy = make(SplitConfig(linger_s=0))
    assert splits(policy.decide(cluster(fuller, queue=waits, num_devices=4, now_s=0))) == []
    assert splits(policy.decide(cluster(fuller, queue=waits, num_devices=4, now_s=1))) == [((0, 1, 2, 3), 1)]
    too_full = instance(0, 4, *(running(f"r{n}") for n in range(48)))
    assert splits(policy.decide(cluster(too_full, queue=waits, num_devices=4, now_s=2))) == []


def test_an_instance_whose_requests_do_not_fit_the_parts_serves_on_where_there_is_no_other():
    too_full = instance(0, 4, *(running(f"r{n}") for n in range(48)))
    view = cluster(too_full, queue=[waiting("n")], num_devices=4)
    policy = AmoebaPolicy(AmoebaConfig(linger_s=0))
    assert policy.decide(view) == []
    (action,) = policy.decide(view)
    assert isinstance(action, Dispatch)
    policy = AmoebaPolicy(AmoebaConfig(linger_s=0))
    other = cluster(too_full, *(filled(device, 1.0) for device in range(4, 8)), queue=[waiting("n")])
    assert policy.decide(other) == policy.decide(other) == [], "others are open, if full"


@pytest.mark.parametrize("make", POLICIES)
def test_an_instance_is_kept_for_a_long_request_that_is_not_shown(make):
    """The engine has preempted the request. It is back in the queue as soon as its last token arrives."""
    policy, merged = make(SplitConfig(linger_s=0)), instance(0, 4, running("short"))
    assert splits(policy.decide(cluster(merged, hidden_tokens=(1_000, TP4_LONG)))) == []
    assert splits(policy.decide(cluster(merged, hidden_tokens=(1_000,), now_s=1))) == [((0, 1, 2, 3), 1)]
