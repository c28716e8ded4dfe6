"""Binding of requests to instances by the baselines."""

import dataclasses
from collections.abc import Mapping

import pytest
from cluster_views import TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting

from serving.scheduler import (
    ClusterView,
    Dispatch,
    InstanceView,
    LeastLoadFirstPolicy,
    RoundRobinPolicy,
    ScaleUp,
    SplitConfig,
)
from serving.scheduler.baselines.binding import BindingPolicy

BASELINES = (RoundRobinPolicy, LeastLoadFirstPolicy)


def dispatched(policy: BindingPolicy, view: ClusterView) -> list[tuple[str, int]]:
    return [(a.request_id, a.instance_id) for a in policy.decide(view) if isinstance(a, Dispatch)]


@pytest.mark.parametrize("make", BASELINES)
def test_requests_of_several_devices_are_served_in_order_by_what_these_merge_into(make: type[BindingPolicy]):
    policy, queue = make(), [waiting(f"r{n}", arrival_s=float(n)) for n in range(6)]
    full = [filled(device, 1.0) for device in range(4)]
    assert dispatched(policy, cluster(*full, queue=queue, num_devices=4)) == []
    merged = cluster(instance(0, 4, running("long", TP4_LONG)), queue=queue, num_devices=4)
    assert dispatched(policy, merged) == [(f"r{n}", 0) for n in range(6)]


@pytest.mark.parametrize("make", BASELINES)
def test_a_member_whose_own_request_is_ahead_is_not_taken_for_a_merge(make: type[BindingPolicy]):
    members = [instance(0), filled(1, 1.0)]
    busy = [instance(device, draining=True) for device in (2, 3)]
    ahead = waiting("ahead", arrival_s=0.0)
    policy = make()
    policy.decide(cluster(instance(0, draining=True), members[1], *busy, queue=[ahead], num_devices=4))
    assert policy.device_of == {"ahead": 1}
    for arrival_s, merges in ((1.0, 0), (-1.0, 1)):
        queue = [ahead, waiting(f"long{arrival_s}", TP2_LONG, arrival_s=arrival_s)]
        kept = dataclasses.replace(members[1], draining=True)
        refused = frozenset({((0, 1), 2)})
        policy.decide(cluster(instance(0), kept, *busy, queue=queue, num_devices=4, refused=refused))
        view = cluster(*members, *busy, queue=queue, num_devices=4)
        policy.decide(dataclasses.replace(view, refused=refused))
        assert sum(isinstance(action, ScaleUp) for action in policy.decide(view)) == merges


@pytest.mark.parametrize("make", BASELINES)
def test_requests_of_an_instance_that_splits_are_bound_again(make: type[BindingPolicy]):
    policy = make(splits=SplitConfig(linger_s=0.0))
    long = running("long", TP4_LONG)
    merged = instance(0, 4, long, free_slots=0)
    policy.decide(cluster(merged, *[instance(d, draining=True) for d in range(4, 8)], queue=[waiting("a")]))
    assert policy.device_of == {"a": 0}
    done = instance(0, 4, running("short"))
    assert dispatched(policy, cluster(done, queue=[waiting("a")])) == [("a", 4)]


def test_a_request_is_not_lost_where_choosing_fails():
    class Failing(RoundRobinPolicy):
        fails = True

        def choose(self, instances: list[InstanceView], waiting_tokens: Mapping[int, int]) -> InstanceView:
            if self.fails:
                raise RuntimeError("injected")
            return super().choose(instances, waiting_tokens)

    policy, view = Failing(), cluster(queue=[waiting("a")])
    with pytest.raises(RuntimeError, match="injected"):
        policy.decide(view)
    policy.fails = False
    assert dispatched(policy, view) == [("a", 0)]


@pytest.mark.parametrize("make", BASELINES)
def test_requests_behind_some_that_wait_for_a_merge_are_served(make: type[BindingPolicy]):
    """The policy looks past a limited number of requests."""
    policy = make()
    others = [instance(device, draining=True) for device in range(1, 4)]
    queue = [waiting(f"long{n}", TP2_LONG, arrival_s=float(n)) for n in range(31)] + [waiting("short", arrival_s=40.0)]
    view = cluster(instance(0), *others, queue=queue, num_devices=4)
    assert dispatched(policy, view) == [("short", 0)]
    more = cluster(instance(0), *others, queue=[*queue, waiting("long31", TP2_LONG, arrival_s=31.0)], num_devices=4)
    assert dispatched(policy, more) == []
