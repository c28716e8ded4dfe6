"""Short requests start on instances in transition if no other instance has room."""

import pytest
from cluster_views import TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting

from serving.scheduler import (
    AmoebaPolicy,
    Dispatch,
    FlyingPolicy,
    InstanceView,
    LeastLoadFirstPolicy,
    Policy,
    RoundRobinPolicy,
    ScaleUp,
    WaitingRequest,
)

POLICIES = [AmoebaPolicy, FlyingPolicy, RoundRobinPolicy, LeastLoadFirstPolicy]


def merging(joinable_tokens: int, *requests, **fields) -> InstanceView:
    """Return an instance that four devices are merging into."""
    return instance(0, 4, *requests, transition_to=4, joinable_tokens=joinable_tokens, **fields)


def places(policy: Policy, *instances: InstanceView, queue, num_devices: int = 4) -> list[tuple[str, int]]:
    """Return the dispatched requests with their instances."""
    actions = policy.decide(cluster(*instances, queue=queue, num_devices=num_devices))
    return [(a.request_id, a.instance_id) for a in actions if isinstance(a, Dispatch)]


def bound(policy: Policy, queue: list[WaitingRequest]) -> Policy:
    """Bind requests of a baseline to the first instance, because baselines bind requests before a transformation."""
    if isinstance(policy, RoundRobinPolicy | LeastLoadFirstPolicy):
        others = [instance(device, draining=True) for device in (1, 2, 3)]
        policy.decide(cluster(instance(0, free_slots=0), *others, queue=queue, num_devices=4))
    return policy


@pytest.mark.parametrize("make", POLICIES)
def test_a_short_request_begins_while_layers_change(make):
    queue = [waiting("a")]
    assert places(bound(make(), queue), merging(4_000), queue=queue) == [("a", 0)]


@pytest.mark.parametrize("make", POLICIES)
def test_it_waits_where_there_is_no_room(make):
    queue = [waiting("a")]
    assert places(bound(make(), queue), merging(1_000), queue=queue) == []
    assert places(bound(make(), queue), merging(0), queue=queue) == []
    assert places(bound(make(), queue), merging(4_000, draining=True), queue=queue) == []
    assert places(bound(make(), queue), merging(4_000, free_slots=0), queue=queue) == []


@pytest.mark.parametrize("make", POLICIES)
def test_one_at_a_time_as_the_parts_have_different_room(make):
    queue = [waiting("a"), waiting("b", arrival_s=1.0)]
    assert places(bound(make(), queue), merging(4_000), queue=queue) == [("a", 0)]


@pytest.mark.parametrize("make", [AmoebaPolicy, FlyingPolicy])
def test_instances_at_rest_come_first(make):
    """They come first even if they are fuller."""
    instances = merging(8_000), *(filled(device, 0.8) for device in range(4, 8))
    assert places(make(), *instances, queue=[waiting("a")], num_devices=8) == [("a", 4)]
    full = [filled(device, 1.0) for device in range(4, 8)]
    assert places(make(), merging(8_000), *full, queue=[waiting("a")], num_devices=8) == [("a", 0)]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize(("free", "expected"), [(51_000, []), (60_000, [("short", 0)])])
def test_room_for_the_long_request_that_waits_for_the_merge_is_kept(make, free: int, expected: list):
    queue = [waiting("long", TP4_LONG), waiting("short", arrival_s=1.0)]
    if make in (RoundRobinPolicy, LeastLoadFirstPolicy):
        expected = []  # baselines serve in order
    policy = bound(make(), queue)
    view = merging(8_000, running("r"), free_tokens=free)
    assert places(policy, view, queue=queue) == expected


@pytest.mark.parametrize("make", [AmoebaPolicy, FlyingPolicy])
def test_a_split_takes_requests_too(make):
    splitting = instance(0, 4, running("r"), transition_to=1, joinable_tokens=4_000)
    assert places(make(), splitting, queue=[waiting("a")]) == [("a", 0)]
    assert places(make(), splitting, queue=[waiting("long", TP4_LONG)]) == []


def test_urgent_requests_come_before_others():
    queue = [waiting("short"), waiting("urgent", arrival_s=1.0, priority=-1)]
    assert places(FlyingPolicy(), merging(8_000), queue=queue) == [("urgent", 0)]


def test_room_is_kept_where_the_long_request_will_have_it():
    """Each of two merges has a request. Room for the smaller request is kept on the instance of the lower degree."""
    high = merging(12_000, free_tokens=60_000)
    low = instance(4, 2, transition_to=2, joinable_tokens=12_000, free_tokens=20_000)
    full = [filled(device, 1.0) for device in (6, 7)]
    queue = [waiting("tp2", TP2_LONG), waiting("tp4", TP4_LONG, arrival_s=1), waiting("short", arrival_s=2)]
    assert places(AmoebaPolicy(), high, low, *full, queue=queue, num_devices=8) == [("short", 0)]
    full_too = merging(12_000, free_tokens=50_500)
    assert places(AmoebaPolicy(), full_too, low, *full, queue=queue, num_devices=8) == []


def test_no_second_group_merges_while_the_first_waits_for_its_steps():
    """The instances of the first group still exist and wait for their merge."""
    waits = [instance(device, transition_to=4) for device in range(4)]
    for policy in (FlyingPolicy(), AmoebaPolicy()):
        actions = policy.decide(cluster(*waits, queue=[waiting("long", TP4_LONG)]))
        assert not any(isinstance(action, ScaleUp) for action in actions), policy.name
    kept = [instance(device, transition_to=4, coming_tokens=48_000) for device in range(4)]
    (up,) = FlyingPolicy().decide(cluster(*kept, queue=[waiting("long", TP4_LONG)]))
    assert isinstance(up, ScaleUp)
    assert up.devices == (4, 5, 6, 7)
