"""Decisions of the policy `flying` on single snapshots, and pauses under other policies."""

import dataclasses
from typing import Any

from cluster_views import TP4_LONG, cluster, instance, running, waiting

from serving.scheduler import (
    Action,
    ClusterView,
    Dispatch,
    FlyingConfig,
    FlyingPolicy,
    InstanceView,
    Outcome,
    Preempt,
    Reject,
    RejectKind,
    ScaleDown,
    ScaleUp,
    Scheduler,
    StaticPolicy,
    Throughput,
    Timing,
)
from serving.scheduler.pausing import misfits, paused_victims

URGENT = waiting("urgent", priority=-1)


def paused_group(*parts: tuple, first: int = 0, **fields: Any) -> InstanceView:
    """Return a TP4 instance with kept weights over TP1 instances with paused requests."""
    used = max(sum(-(-r.num_tokens // 16) * 16 for r in part) for part in parts)
    free = 4 * (12_000 - used)
    values: dict[str, Any] = {"capacity_tokens": 48_000, "free_tokens": free, "paused": parts, "paused_degree": 1}
    return dataclasses.replace(instance(first, 4), **(values | fields))


def decide(view: ClusterView, **config: Any) -> list[Action]:
    return FlyingPolicy(FlyingConfig(**config)).decide(view)


def test_a_group_is_made_where_the_fewest_requests_run():
    view = cluster(instance(0, 1, running("a"), running("b")), instance(5, 1, running("c")), queue=[URGENT])
    (up,) = decide(view)
    assert isinstance(up, ScaleUp)
    assert (up.devices, up.running) == ((4, 5, 6, 7), "pause")


def test_no_request_of_its_rank_pauses_for_an_urgent_one():
    """Running urgent requests migrate to a group. The new request starts at once on one of its instances."""
    others = [instance(device, 1, running(f"r{device}", priority=-1)) for device in range(8)]
    first, up = decide(cluster(*others, queue=[URGENT]))
    assert isinstance(first, Dispatch)
    assert isinstance(up, ScaleUp)
    assert up.running == "migrate"
    assert first.instance_id in up.devices


def test_refused_groups_and_those_in_transition_are_not_asked_for():
    moving = instance(4, 1, transition_to=1)
    (up,) = decide(cluster(moving, instance(0, 1, running("a")), queue=[URGENT]))
    assert isinstance(up, ScaleUp)
    assert up.devices == (0, 1, 2, 3)
    (up,) = decide(cluster(moving, queue=[URGENT], refused=frozenset({((0, 1, 2, 3), 4)})))
    assert isinstance(up, ScaleUp)
    assert up.degree == 2


def test_urgent_requests_beyond_their_clients_share_pause_no_one():
    """They queue behind all other requests, whatever their priority."""
    greedy_one = dataclasses.replace(URGENT, beyond_share=True)
    busy = [instance(device, 1, running(f"r{device}")) for device in range(4)]
    (action,) = decide(cluster(*busy, queue=[greedy_one], num_devices=4))
    assert isinstance(action, Dispatch)
    group = paused_group((running("a"),), (), (), ())
    (down,) = decide(cluster(group, queue=[greedy_one], num_devices=4))
    assert isinstance(down, ScaleDown)


def test_second_urgent_request_waits_for_the_group_that_is_being_made():
    coming = instance(0, 4, transition_to=4, capacity_tokens=48_000)
    assert decide(cluster(coming, queue=[URGENT], num_devices=4)) == []


def test_a_group_of_idle_devices_is_not_split_before_the_urgent_request_runs():
    """In a burst, other requests have filled the remaining devices."""
    policy = FlyingPolicy()
    crowded = [instance(device, 1, *(running(f"{device}-{n}") for n in range(9))) for device in range(2, 8)]
    group = instance(0, 2, capacity_tokens=24_000)
    for now_s in (0.0, 20.0):
        policy.decide(cluster(group, *crowded, now_s=now_s))
    assert policy.load.busy
    (action,) = policy.decide(cluster(group, *crowded, queue=[URGENT], now_s=20.1))
    assert isinstance(action, Dispatch)
    assert action.instance_id == 0
    mixed = instance(0, 2, running("u", priority=-1), running("other"), capacity_tokens=24_000)
    (down,) = policy.decide(cluster(mixed, *crowded, now_s=20.2))
    assert isinstance(down, ScaleDown), "requests would not pause for the next urgent one"


def test_paused_requests_go_on_once_no_urgent_one_is_left():
    group = paused_group((running("a"),), (), (), ())
    (down,) = decide(cluster(group))
    assert (type(down), getattr(down, "degree", None)) == (ScaleDown, 1)
    busy = dataclasses.replace(group, running=(running("u", priority=-1),))
    assert decide(cluster(busy)) == []


def test_after_max_pause_what_fits_beside_them_moves_and_what_does_not_waits_again():
    policy = FlyingPolicy(FlyingConfig(max_pause_s=5.0))
    full = tuple(tuple(running(f"{part}-{n}") for n in range(32)) for part in range(4))  # all slots
    group = paused_group(*full, running=(running("u", priority=-1),))
    assert policy.decide(cluster(group, now_s=0.0)) == []
    (preempt,) = policy.decide(cluster(group, now_s=5.0))
    assert isinstance(preempt, Preempt)
    assert preempt.request_id == "u"
    room = paused_group((running("a"),), (), (), (), running=(running("u", priority=-1),))
    (down,) = policy.decide(cluster(room, now_s=5.1))
    assert isinstance(down, ScaleDown)


def test_requests_that_pause_for_too_long_have_their_devices_back_before_others_take_them():
    policy = FlyingPolicy(FlyingConfig(max_pause_s=5.0, calm_requests=1e-6))
    group = paused_group((running("a"),), (), (), ())
    policy.decide(cluster(group, queue=[URGENT], now_s=0.0, num_devices=4))
    policy.decide(cluster(group, queue=[URGENT], now_s=6.0, num_devices=4))
    again = cluster(instance(0, 1, running("a")), queue=[URGENT], num_devices=4)
    for now_s, expected in ((7.0, Dispatch), (13.9, Dispatch), (14.1, ScaleUp)):
        (action,) = policy.decide(dataclasses.replace(again, now_s=now_s))
        assert type(action) is expected, now_s


def test_where_tp_is_measured_to_be_slower_nothing_binds_for_load():
    policy = policy_that_measured(slow_tp=True)
    assert not any(isinstance(a, ScaleUp) for a in policy.decide(cluster(now_s=100.0)))
    policy = policy_that_measured(slow_tp=False)
    assert all(isinstance(a, ScaleUp) for a in policy.decide(cluster(now_s=100.0)))


def test_groups_stay_in_a_burst_where_they_generate_no_less():
    """Throughputs were measured with equally many requests. Without a measurement at TP1, groups split."""
    busy = cluster(
        instance(0, 4, *(running(f"a{n}") for n in range(32))), instance(4, 4, *(running(f"b{n}") for n in range(32)))
    )
    for low, expected in ((90.0, []), (110.0, [ScaleDown, ScaleDown]), (None, [ScaleDown, ScaleDown])):
        policy = policy_that_measured(slow_tp=False)
        known = {4: Throughput(64, 100.0)} | ({} if low is None else {1: Throughput(64, low)})
        view = dataclasses.replace(busy, now_s=30.0, timing=Timing(throughput=known))
        policy.decide(view)
        actions = policy.decide(dataclasses.replace(view, now_s=60.0))
        assert [type(action) for action in actions] == expected, low
        assert policy.load.busy


def policy_that_measured(slow_tp: bool) -> FlyingPolicy:
    """Return a policy that has measured both degrees under a light load. With `slow_tp`, it does not merge for load."""
    policy = FlyingPolicy(FlyingConfig(dwell_s=1.0))
    high = 0.2 if slow_tp else 0.05
    both = cluster(instance(0, 4, running("a"), step_s=high), instance(4, 1, running("b"), step_s=0.1))
    policy.decide(both)
    for now_s in (0.5, 2.0, 4.0, 6.0):
        policy.decide(dataclasses.replace(both, now_s=now_s))
    assert policy.load.bound != slow_tp
    return policy


def test_paused_requests_behind_an_urgent_one_make_room_for_it():
    parts = tuple((running(f"{part}-old", 11_000), running(f"{part}-new", 900, arrival_s=5.0)) for part in range(4))
    group = paused_group(*parts)
    view = cluster(group, queue=[waiting("urgent", 3_000, priority=-1)], num_devices=4)
    actions = decide(view)
    assert {a.request_id for a in actions if isinstance(a, Preempt)} == {f"{part}-new" for part in range(4)}
    ahead = paused_group(*(tuple(dataclasses.replace(r, priority=-2) for r in part) for part in parts))
    assert paused_victims(view, ahead, view.queue[0], 3_000) == []


def test_what_fits_beside_paused_requests_is_dealt_longest_first():
    parts = ((running("a", 11_900),), (), (), ())
    group = paused_group(*parts, running=tuple(running(f"u{n}", 11_000) for n in range(4)))
    assert [r.request_id for r in misfits(cluster(group), group)] == ["u3"]


def test_requests_beyond_every_instance_are_rejected_with_weights_released():
    actions = decide(cluster(queue=[waiting("huge", 90_000), waiting("long", TP4_LONG)]))
    kinds = {type(a): a for a in actions}
    assert isinstance(rejected := kinds[Reject], Reject)
    assert rejected.kind is RejectKind.NEVER_FITS
    assert isinstance(up := kinds[ScaleUp], ScaleUp)
    assert (up.degree, up.release_weights) == (4, True)


class Recorder:
    """An executor that shows a view and records actions."""

    def __init__(self, view: ClusterView):
        self.view, self.actions = view, []

    def snapshot(self) -> ClusterView:
        return self.view

    def apply(self, action: Action) -> Outcome:
        self.actions.append(action)
        return Outcome(True)


def test_the_scheduler_has_paused_requests_go_on_for_policies_that_know_no_pauses():
    """Before that, it starts no other requests on their devices."""
    view = cluster(paused_group((running("a"),), (), (), ()), queue=[waiting("b")], num_devices=4)
    executor = Recorder(view)
    Scheduler(StaticPolicy(), executor).tick()
    (down,) = executor.actions
    assert (type(down), down.degree) == (ScaleDown, 1)
    executor = Recorder(view)
    Scheduler(FlyingPolicy(), executor).tick()
    assert [type(a) for a in executor.actions] == [ScaleDown], "by its own rule"
