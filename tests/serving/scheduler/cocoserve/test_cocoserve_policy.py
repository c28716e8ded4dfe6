"""The policy `cocoserve` on snapshots: growth, reductions, and merges that come first."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
from placed_views import LAYERS, cluster, instance

from serving.scheduler import (
    Action,
    AmoebaConfig,
    ClusterView,
    CocoServeConfig,
    CocoServePolicy,
    Dispatch,
    Evict,
    LimitBatch,
    Migrate,
    Replicate,
    ScaleIn,
    ScaleOut,
    ScaleUp,
    WaitingRequest,
)
from serving.scheduler.actions import identity

SLOW = AmoebaConfig(tpot_slo_s=0.05)


def after(policy: CocoServePolicy, view: ClusterView, seconds: float, start_s: float = 0.0) -> list[list[Action]]:
    """Return the decisions of each second on an unchanged snapshot."""
    times = range(int(start_s), int(start_s + seconds))
    return [policy.decide(dataclasses.replace(view, now_s=float(now_s))) for now_s in times]


def changes(decisions: Sequence[Sequence[Action]]) -> list[Action]:
    return [action for decision in decisions for action in decision if not isinstance(action, Dispatch)]


def test_without_sizes_of_layers_it_is_amoeba():
    view = dataclasses.replace(cluster(instance(0, 20)), layer=None, devices=())
    assert changes(after(CocoServePolicy(), view, 60)) == []


def test_busy_instance_scales_out_to_an_empty_device_after_the_window():
    decisions = after(CocoServePolicy(), cluster(instance(0, 24), num_devices=2), 8)
    (change,) = changes(decisions)
    assert change == ScaleOut(0, 1, change.reason)
    first = next(number for number, decision in enumerate(decisions) if decision)
    assert 3 <= first <= 8, "the average of the requests needs to rise first"


def test_layers_replicate_where_memory_is_short_for_all():
    view = cluster(instance(0, 24), num_devices=2, free={1: 55e9})
    (change,) = changes(after(CocoServePolicy(), view, 15))
    assert change == Replicate(0, (0, 15), 1, change.reason), "55 GB, and a layer takes 3.5 GB with half of the cache"
    (change,) = changes(
        after(CocoServePolicy(CocoServeConfig(scale_out=False)), cluster(instance(0, 24), num_devices=2), 8)
    )
    assert change == Replicate(0, (0, LAYERS), 1, change.reason)


def test_small_batch_does_not_replicate():
    assert changes(after(CocoServePolicy(), cluster(instance(0, 15), num_devices=2), 60)) == []


def test_busy_device_receives_nothing():
    view = cluster(instance(0, 24), instance(1, 2), num_devices=2, busy={1: 0.6})
    assert changes(after(CocoServePolicy(), view, 60)) == []


def test_one_change_for_each_cool_down():
    decisions = after(CocoServePolicy(CocoServeConfig(cool_down_s=10)), cluster(instance(0, 30)), 60)
    times = [number for number, decision in enumerate(decisions) if decision]
    assert all(len(decision) <= 1 for decision in decisions)
    assert all(two - one >= 10 for one, two in pairwise(times))


def test_reductions_begin_at_the_threshold_and_end_at_half():
    config = CocoServeConfig(violation_threshold=0.5, window_s=1.0, cool_down_s=1.0)
    policy = CocoServePolicy(config, SLOW)
    late = cluster(instance(0, 13, step_s=0.06), num_devices=1)
    assert changes(after(policy, late, 1)) == []
    assert LimitBatch in [type(a) for a in changes(after(policy, late, 10, 1))]
    good = cluster(instance(0, 8, step_s=0.04), num_devices=1)
    after(policy, good, 1, 11)
    assert policy.monitor.violated, "the average falls slowly"
    after(policy, good, 2, 12)
    assert not policy.monitor.violated


def test_limit_of_a_batch_rises_only_when_the_load_has_fallen():
    config = CocoServeConfig(window_s=1.0, cool_down_s=1.0)
    policy = CocoServePolicy(config, SLOW)
    after(policy, cluster(instance(0, 13, step_s=0.06), num_devices=1), 10)
    same = cluster(instance(0, 13, step_s=0.04, batch_limit=13), num_devices=1)
    assert changes(after(policy, same, 30, 10)) == []
    low = cluster(instance(0, 5, step_s=0.04, batch_limit=13), num_devices=1)
    raised = changes(after(policy, low, 5, 40))
    assert raised[0] == LimitBatch(0, 18, raised[0].reason)
    nearly = cluster(instance(0, 5, step_s=0.04, batch_limit=30), num_devices=1)
    assert changes(after(policy, nearly, 3, 50))[0] == LimitBatch(0, None, raised[0].reason)


def test_violation_with_an_empty_device_grows_first():
    policy = CocoServePolicy(CocoServeConfig(window_s=1.0), SLOW)
    (change,) = changes(after(policy, cluster(instance(0, 4, step_s=0.06), num_devices=2), 6))
    assert isinstance(change, ScaleOut)


def test_late_requests_in_the_queue_count():
    policy = CocoServePolicy(CocoServeConfig(window_s=1.0), AmoebaConfig(ttft_slo_s=2.0))
    queue = tuple(WaitingRequest(f"w{n}", 29_000, 29_100) for n in range(5))
    full = cluster(instance(0, 29), num_devices=1, queue=queue)
    after(policy, full, 3)
    assert not policy.monitor.violated
    after(policy, full, 4, 3)
    assert policy.monitor.violated
    assert policy.monitor.violations == pytest.approx(5 / 34, rel=0.2)


def test_own_instances_end_when_few_requests_are_left():
    policy = CocoServePolicy()
    assert isinstance(changes(after(policy, cluster(instance(0, 24), num_devices=2), 8))[0], ScaleOut)
    two = cluster(instance(0, 2), instance(1, 1), num_devices=2)
    (change,) = changes(after(policy, two, 20, 8))
    assert change == ScaleIn(0, 1, change.reason), "the policy started instance 1"
    assert changes(after(CocoServePolicy(), two, 60)) == [], "an operator started it"


# Merges

LONG = WaitingRequest("long", 50_000, 50_100)


def merging(*instances, **fields) -> list[Action]:
    view = cluster(*instances, num_devices=2, queue=(LONG,), **fields)
    return CocoServePolicy().decide(view)


def test_merge_goes_on_if_no_layer_is_elsewhere():
    (merge,) = merging(instance(0, 4), instance(1, 4))
    assert isinstance(merge, ScaleUp)


def test_replicas_are_evicted_before_a_merge():
    (change,) = merging(instance(0, 4, homes={range(0, 8): (0, 1)}), instance(1, 4))
    assert change == Evict(0, (0, 8), 1, change.reason)
    assert "before devices 0-1 merge: long may grow to 50100 tokens" in change.reason


def test_migrated_layers_return_before_a_merge():
    (change,) = merging(instance(0, 4, homes={range(12, 20): (1,)}), instance(1, 4))
    assert change == Migrate(0, (12, 20), 0, change.reason)


def test_guests_of_other_instances_leave_before_a_merge():
    guest = instance(2, 4, homes={range(0, 4): (1, 2), range(8, 10): (2, 3)})
    view = cluster(instance(0), instance(1), guest, instance(3, 20), queue=(LONG,))
    (change,) = CocoServePolicy().decide(view)
    assert change == Evict(2, (0, 4), 1, change.reason), "its replica on device 3 stays"


def test_each_instance_undoes_one_change_at_a_time():
    both = instance(0, homes={range(0, 4): (0, 1)}), instance(1, homes={range(8, 10): (0, 1)})
    assert [(a.instance_id, a.layers) for a in merging(*both) if isinstance(a, Evict)] == [(0, (0, 4)), (1, (8, 10))]


def test_merge_waits_while_a_change_is_in_progress():
    spread = instance(0, 4, homes={range(0, 8): (0, 1)}, changes_placement=True)
    assert merging(spread, instance(1, 4)) == []


def test_merge_is_requested_if_evictions_were_refused():
    """The executor then refuses the merge with the reason, and the scheduler logs it."""
    refused = frozenset([identity(Evict(0, (0, 8), 1))])
    (merge,) = merging(instance(0, 4, homes={range(0, 8): (0, 1)}), instance(1, 4), refused_changes=refused)
    assert isinstance(merge, ScaleUp)


def test_flying_merges_for_urgent_requests_when_the_replicas_have_gone():
    policy = CocoServePolicy(CocoServeConfig(request_policy="flying"))
    urgent = WaitingRequest("urgent", 100, 150, priority=-1)
    spread = instance(0, 4, homes={range(0, 8): (0, 1)})
    (change,) = policy.decide(cluster(spread, instance(1, 4), queue=(urgent,), num_devices=2))
    assert change == Evict(0, (0, 8), 1, change.reason)
    merge, *_ = policy.decide(cluster(instance(0, 4), instance(1, 4), queue=(urgent,), num_devices=2))
    assert isinstance(merge, ScaleUp)
    assert (merge.running, policy.pauses) == ("pause", True)


def test_nothing_grows_on_devices_that_merge():
    view = cluster(
        instance(0, 20, homes={range(0, 8): (0, 1)}, changes_placement=True), instance(1), queue=(LONG,), num_devices=2
    )
    assert changes(after(CocoServePolicy(), view, 30)) == []


def test_refused_growth_leads_to_the_next_device():
    first = ScaleOut(0, 1)
    view = cluster(instance(0, 30), num_devices=3, refused_changes=frozenset([identity(first)]))
    (change,) = changes(after(CocoServePolicy(), view, 9))
    assert change == ScaleOut(0, 2, change.reason)


def test_equal_snapshots_have_equal_decisions():
    view = cluster(instance(0, 30), instance(1, 2), busy={1: 0.1})
    one, two = (after(CocoServePolicy(), view, 40) for _ in range(2))
    assert one == two
