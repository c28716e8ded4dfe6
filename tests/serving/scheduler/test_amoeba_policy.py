"""Decisions of the `amoeba` policy in a given state."""

import dataclasses

from cluster_views import CAPACITY, SHORT, TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting

from serving.scheduler import (
    Action,
    AmoebaConfig,
    AmoebaPolicy,
    ClusterView,
    Dispatch,
    Preempt,
    Reject,
    RejectKind,
    ScaleDown,
    ScaleUp,
)


def decide(view: ClusterView, **config) -> list[Action]:
    return AmoebaPolicy(AmoebaConfig(**config)).decide(view)


def decide_after(before: ClusterView, now: ClusterView, **config) -> list[Action]:
    policy = AmoebaPolicy(AmoebaConfig(**config))
    policy.decide(before)
    return policy.decide(now)


def dispatched(actions: list[Action]) -> dict[str, int]:
    return {a.request_id: a.instance_id for a in actions if isinstance(a, Dispatch)}


def only(actions: list[Action]) -> Action:
    (action,) = actions
    return action


# Short requests


def test_short_request_goes_to_the_least_loaded_instance():
    view = cluster(*[filled(d, 0.5) for d in range(8) if d != 5], filled(5, 0.2), queue=[waiting("a")])
    assert dispatched(decide(view)) == {"a": 5}


def test_short_requests_of_one_tick_spread_over_the_instances():
    view = cluster(queue=[waiting(f"r{n}", arrival_s=n / 10) for n in range(8)], now_s=1)
    assert sorted(dispatched(decide(view)).values()) == list(range(8))


def test_short_request_keeps_away_from_long_ones_where_there_is_other_room():
    merged = instance(0, 4, running("long", TP2_LONG))
    busier = [filled(device, 0.8) for device in range(4, 8)]
    assert merged.load < busier[0].load
    choice = dispatched(decide(cluster(merged, *busier, queue=[waiting("a")])))["a"]
    assert choice >= 4
    full = [filled(device, 1.0) for device in range(4, 8)]
    assert dispatched(decide(cluster(merged, *full, queue=[waiting("a")]))) == {"a": 0}


def test_merged_instance_without_long_requests_serves_short_ones_as_others_do():
    lingering = filled(0, 0.1, degree=4)
    before = cluster(instance(0, 4, running("long", TP2_LONG)))
    now = cluster(lingering, *(filled(d, 0.5) for d in range(4, 8)), queue=[waiting("a")], now_s=1)
    assert dispatched(decide_after(before, now)) == {"a": 0}


def test_requests_of_one_tick_share_the_slots_that_are_free():
    one_slot = [instance(d, free_slots=1) for d in range(2)]
    view = cluster(*one_slot, queue=[waiting(f"r{n}") for n in range(5)], num_devices=2)
    assert dispatched(decide(view)) == {"r0": 0, "r1": 1}


def test_instances_in_transition_or_draining_get_nothing():
    transforming = instance(0, 4, transition_to=4)
    draining = [instance(d, draining=True) for d in (4, 5, 6)]
    view = cluster(transforming, *draining, filled(7, 0.9), queue=[waiting("a")])
    assert dispatched(decide(view)) == {"a": 7}


def test_short_request_keeps_room_that_a_scale_up_would_need():
    """Devices 0 to 3 have 53,120 tokens free at TP4. The short request would leave fewer than 53,000, so it goes to
    devices 4 to 7, which are fuller."""
    groups = [filled(d, 0.68) for d in range(4)], [filled(d, 0.76) for d in range(4, 8)]
    now = cluster(*groups[0], *groups[1], queue=[waiting("a", 800)], now_s=100)
    seen = cluster(instance(0, 4, running("long", 53_000)))
    assert dispatched(decide_after(seen, now))["a"] >= 4
    assert dispatched(decide(now))["a"] < 4, "nothing is kept where no long request was seen"


def test_nothing_is_kept_while_two_groups_could_take_a_long_request():
    seen = cluster(instance(0, 4, running("long", 53_000)))
    now = cluster(*[filled(d, 0.68) for d in range(8)], queue=[waiting("a", 800)], now_s=100)
    assert dispatched(decide_after(seen, now)) == {"a": 0}


def test_room_for_a_scale_up_is_taken_where_there_is_no_other():
    seen = cluster(instance(0, 4, running("long", 55_000)))
    now = cluster(
        *[filled(d, 0.5) for d in range(4)], *[filled(d, 1.0) for d in range(4, 8)], queue=[waiting("a")], now_s=100
    )
    assert dispatched(decide_after(seen, now))["a"] < 4


def test_request_without_room_keeps_one_instance_for_itself():
    """The large request waits for device 7, which has the most free tokens. Small requests do not fill it up again."""
    large = waiting("large", 11_900)
    view = cluster(
        *[filled(d, 0.7) for d in range(7)], filled(7, 0.3), queue=[large, waiting("small", arrival_s=1)], now_s=2
    )
    actions = decide(view)
    assert set(dispatched(actions)) == {"small"}
    assert dispatched(actions)["small"] != 7


# Long requests


def test_long_request_merges_the_least_loaded_aligned_group():
    view = cluster(*[filled(d, 0.6) for d in range(4)], filled(5, 0.4), queue=[waiting("long", TP4_LONG)])
    action = only(decide(view))
    assert isinstance(action, ScaleUp)
    assert (action.devices, action.degree) == ((4, 5, 6, 7), 4)


def test_scale_up_is_to_the_least_degree_that_holds_the_request():
    action = only(decide(cluster(queue=[waiting("long", TP2_LONG)])))
    assert isinstance(action, ScaleUp)
    assert (action.devices, action.degree) == ((0, 1), 2)


def test_instances_of_one_degree_merge_rather_than_mixed_ones():
    mixed = instance(0, 2, running("other", TP2_LONG))
    action = only(decide(cluster(mixed, *[filled(d, 0.6) for d in range(4, 8)], queue=[waiting("long", TP4_LONG)])))
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)


def test_mixed_instances_merge_where_there_are_no_others():
    mixed = instance(0, 2, running("other", TP2_LONG))
    action = only(decide(cluster(mixed, queue=[waiting("long", TP4_LONG)], num_devices=4)))
    assert isinstance(action, ScaleUp)
    assert action.devices == (0, 1, 2, 3)


def test_long_request_prefers_the_instance_of_the_highest_degree():
    view = cluster(
        instance(0, 4, running("long", 40_000)),
        instance(4, 2, running("other", 12_500)),
        queue=[waiting("next", TP2_LONG)],
    )
    assert dispatched(decide(view)) == {"next": 0}


def test_consecutive_long_request_waits_for_the_merged_instance():
    view = cluster(instance(0, 4, running("long", TP4_LONG)), queue=[waiting("next", TP4_LONG)], now_s=500)
    assert decide(view) == []


def test_short_requests_use_what_a_waiting_long_request_leaves():
    """The running long request uses 50,000 of 80,000 tokens. The next will use 55,000, which leaves 25,000."""
    merged, others = instance(0, 4, running("long", TP4_LONG)), [filled(d, 1.0) for d in range(4, 8)]
    shorts = [waiting(f"short{n:02}", 8_000, arrival_s=1) for n in range(5)]
    for long in (1, 3):  # long requests run one after the other, so only the first counts
        queue = [*(waiting(f"next{n}", 55_000) for n in range(long)), *shorts]
        assert list(dispatched(decide(cluster(merged, *others, queue=queue, now_s=1))).values()) == [0, 0, 0]


def test_short_requests_do_not_fill_up_an_instance_that_a_long_request_waits_for():
    """Short requests keep the long request waiting. No long request runs on the instance."""
    merged = instance(0, 4, *(running(f"r{n}") for n in range(40)))
    others = [filled(d, 1.0) for d in range(4, 8)]
    shorts = [waiting(f"short{n}", arrival_s=1) for n in range(5)]
    assert dispatched(decide(cluster(merged, *others, queue=[waiting("next", TP4_LONG), *shorts], now_s=1))) == {}


def test_long_requests_of_one_tick_cause_one_merge():
    view = cluster(queue=[waiting("one", TP4_LONG), waiting("two", TP4_LONG, arrival_s=1)], now_s=1)
    assert isinstance(only(decide(view)), ScaleUp)


def test_long_request_waits_for_a_merge_under_way():
    view = cluster(instance(0, 4, transition_to=4), queue=[waiting("next", TP4_LONG)])
    assert decide(view) == []


def test_long_request_does_not_wait_for_a_draining_instance():
    action = only(decide(cluster(instance(0, 4, draining=True), queue=[waiting("long", TP4_LONG)])))
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)


def test_instance_that_holds_less_than_others_of_its_degree_is_split_rather_than_merged_with_itself():
    """The instance was merged without releasing weights."""
    merged = instance(0, 4, capacity_tokens=48_000, free_tokens=48_000)
    action = only(decide(cluster(merged, queue=[waiting("long", TP4_LONG)], num_devices=4)))
    assert isinstance(action, ScaleDown)
    assert action.degree == 1


def test_long_request_may_cause_a_second_merge_after_the_time_that_is_set():
    view = cluster(instance(0, 4, running("long", TP4_LONG)), queue=[waiting("next", TP4_LONG)], now_s=31)
    assert decide(view, merge_again_after_s=32) == []
    action = only(decide(view, merge_again_after_s=30))
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)


def test_group_without_room_is_kept_until_a_merge_has_room():
    """After a merge, neither group has 79,000 tokens free. Devices 4 to 7 have the most and get no short requests."""
    view = cluster(
        *[filled(d, 0.6) for d in range(4)],
        *[filled(d, 0.2) for d in range(4, 8)],
        queue=[waiting("long", 79_000), waiting("short", arrival_s=1)],
        now_s=1,
    )
    actions = decide(view)
    assert dispatched(actions)["short"] < 4
    assert len(actions) == 1


def test_group_merges_although_one_of_its_instances_is_kept_for_a_request_before():
    large = waiting("large", 11_900)
    busy = [filled(d, 0.3) for d in range(4)]
    view = cluster(*busy, queue=[large, waiting("long", TP4_LONG, arrival_s=1)], now_s=1, num_devices=4)
    action = only(decide(view))
    assert isinstance(action, ScaleUp)
    assert action.devices == (0, 1, 2, 3)


def test_group_that_was_refused_is_not_asked_for_again():
    view = cluster(queue=[waiting("long", TP4_LONG)], refused=frozenset({((0, 1, 2, 3), 4)}))
    action = only(decide(view))
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)
    assert decide(dataclasses.replace(view, refused=view.refused | {((4, 5, 6, 7), 4)})) == []


# Splits


def done(free_share: float, now_s: float = 0.0, *queue) -> ClusterView:
    """Return a snapshot with a TP4 instance on devices 0 to 3 whose long requests have ended."""
    count = round((1 - free_share) * CAPACITY[4] / 1_104)
    merged = instance(0, 4, *(running(f"r{n}") for n in range(count)))
    return cluster(merged, queue=queue, now_s=now_s)


def test_merged_instance_splits_when_its_long_requests_are_done():
    action = only(decide(done(0.9), linger_s=0))
    assert isinstance(action, ScaleDown)
    assert (action.devices, action.degree) == ((0, 1, 2, 3), 1)


def test_merged_instance_does_not_split_before_half_of_its_cache_is_free():
    assert decide(done(0.45), linger_s=0) == []
    assert isinstance(only(decide(done(0.45), linger_s=0, split_free_share=0.4)), ScaleDown)


def test_merged_instance_that_will_split_takes_no_new_requests():
    actions = decide(done(0.45, 0.0, *[waiting(f"n{k}") for k in range(20)]), linger_s=0)
    assert min(dispatched(actions).values()) >= 4


def test_merged_instance_lingers_for_the_next_long_request():
    assert decide_after(done(0.9, 0.0), done(0.9, 59.0)) == []
    assert isinstance(only(decide_after(done(0.9, 0.0), done(0.9, 60.0))), ScaleDown)


def test_lingering_instance_serves_short_requests_and_the_next_long_one():
    full = [filled(d, 0.5) for d in range(4, 8)]
    view = cluster(instance(0, 4), *full, queue=[waiting("short"), waiting("long", TP4_LONG, arrival_s=1)], now_s=1)
    assert dispatched(decide(view)) == {"short": 0, "long": 0}


def test_lingering_ends_when_a_short_request_finds_no_room():
    merged = instance(0, 4, free_slots=0)
    full = [filled(d, 1.0) for d in range(4, 8)]
    view = cluster(merged, *full, queue=[waiting("short")])
    policy = AmoebaPolicy()
    assert policy.decide(view) == []
    assert isinstance(only(policy.decide(view)), ScaleDown)


def test_lingering_ends_when_short_requests_fill_half_of_the_cache():
    shorts = [waiting(f"n{k}") for k in range(20)]
    assert 0 in dispatched(decide(done(0.55, 0.0, *shorts))).values()
    assert 0 not in dispatched(decide(done(0.45, 0.0, *shorts))).values()


def test_no_split_while_a_long_request_waits_that_the_instance_holds():
    merged = instance(0, 4, free_slots=0)
    assert decide(cluster(merged, queue=[waiting("long", TP4_LONG)]), linger_s=0) == []


def test_no_split_into_instances_that_cannot_hold_the_requests():
    """Five requests of 11,000 tokens on four TP1 instances."""
    merged = instance(0, 4, *(running(f"r{n}", 11_000) for n in range(5)))
    assert decide(cluster(merged), linger_s=0, split_free_share=0.2) == []


def test_no_split_into_instances_that_would_run_too_many_requests():
    """129 requests on four TP1 instances of 32 slots."""
    merged = instance(0, 4, *(running(f"r{n:03}", 200) for n in range(129)))
    assert decide(cluster(merged), linger_s=0) == []


def test_draining_instance_is_left_to_its_operator():
    assert decide(cluster(instance(0, 4, draining=True)), linger_s=0) == []


def test_instances_of_the_base_degree_are_left_as_they_are():
    merged = [instance(0, 4), instance(4, 4)]
    assert decide(cluster(*merged, base_degree=4), linger_s=0) == []


# Rejections and preemptions


def test_request_that_fits_at_no_degree_is_rejected_with_value_and_limit():
    reject = only(decide(cluster(queue=[waiting("huge", 80_001)])))
    assert isinstance(reject, Reject)
    assert reject.kind is RejectKind.NEVER_FITS
    assert "80001" in reject.reason
    assert "limit of 80000" in reject.reason
    assert "TP4" in reject.reason


def test_request_of_higher_priority_preempts_the_last_of_lower_priority():
    low = [running(f"low{n}", 5_500, priority=5, arrival_s=n) for n in range(2)]
    full = [instance(d, 1, running(f"same{d}", 11_900)) for d in range(1, 8)]
    view = cluster(instance(0, 1, *low), *full, queue=[waiting("urgent", 6_000, priority=0, arrival_s=10)], now_s=10)
    actions = decide(view)
    assert [a.request_id for a in actions if isinstance(a, Preempt)] == ["low1"]


def test_request_that_has_waited_its_priority_off_is_not_preempted():
    """After a preemption, it would be first in the queue and take its room back."""
    low = running("low", 11_000, priority=1, arrival_s=0)
    full = [instance(d, 1, running(f"same{d}", 11_900)) for d in range(1, 8)]
    view = cluster(instance(0, 1, low), *full, queue=[waiting("urgent", 6_000, arrival_s=100)], now_s=100)
    assert decide(view) == []


def test_a_long_request_that_finds_no_one_to_preempt_does_not_keep_a_short_one_from_it():
    """Only instances too small for the long request run requests of lower priority."""
    low = [instance(d, 1, running(f"low{d}", 11_900, priority=5, arrival_s=1)) for d in range(4, 8)]
    merged = instance(0, 4, running("same", 79_900))
    long = dataclasses.replace(waiting("long", 50_000), prompt_tokens=500)
    view = cluster(merged, *low, queue=[long, waiting("short", 6_000, arrival_s=2)], now_s=2)
    assert [a.request_id for a in decide(view) if isinstance(a, Preempt)] == ["low4"]


def test_preemption_is_left_if_it_would_not_make_enough_room():
    """Requests of equal priority hold most of each instance."""
    mixed = [
        instance(d, 1, running(f"same{d}", 9_000), running(f"low{d}", 1_000, priority=9, arrival_s=1)) for d in range(8)
    ]
    assert decide(cluster(*mixed, queue=[waiting("urgent", 6_000, arrival_s=2)], now_s=2)) == []


def test_running_requests_keep_a_share_of_their_growth():
    grows = [dataclasses.replace(running(f"g{d}", 6_000), num_tokens=1_000) for d in range(8)]
    view = cluster(*[instance(d, 1, grows[d]) for d in range(8)], queue=[waiting("a", 7_000)])
    assert dispatched(decide(view)) == {"a": 0}
    assert decide(view, reserved_growth=1.0) == []


def test_equal_snapshots_give_equal_decisions():
    view = cluster(*[filled(d, d / 10) for d in range(8)], queue=[waiting(f"r{n}", SHORT + n) for n in range(5)])
    assert decide(view) == decide(view)


# merge_to


def test_merges_go_to_the_degree_that_was_asked_for():
    """With `merge_to=4`, four instances merge for a request that fits at TP2. They always merge if it needs TP4."""
    view = cluster(queue=[waiting("a", TP2_LONG)])
    assert [only(decide(view, merge_to=degree)).degree for degree in (1, 2, 4)] == [2, 2, 4]  # type: ignore[union-attr]
    longer = cluster(queue=[waiting("a", TP4_LONG)])
    assert only(decide(longer, merge_to=2)).degree == 4  # type: ignore[union-attr]


def test_no_degree_is_high_enough_for_merge_to():
    """The highest existing degree is used. A request that fits at the base degree causes no merge."""
    two = cluster(queue=[waiting("a", TP2_LONG)], num_devices=2)
    two = dataclasses.replace(two, degrees=two.degrees[:2])
    assert decide(two, merge_to=4) == decide(two, merge_to=2)
    assert dispatched(decide(cluster(queue=[waiting("a", SHORT)]), merge_to=4)) == {"a": 0}


def test_a_decision_looks_past_a_limited_number_of_requests_that_find_no_place():
    """Seven requests that are too large for the free cache come before a request that fits."""
    busy = [instance(d, 1, running(f"b{d}", 6_000)) for d in range(8)]
    large = [waiting(f"large{n:02}", 11_000, arrival_s=n / 100) for n in range(7)]
    view = cluster(*busy, queue=[*large, waiting("small", arrival_s=1)], now_s=2)
    assert AmoebaPolicy(AmoebaConfig(lookahead=7)).decide(view) == []
    (action,) = AmoebaPolicy(AmoebaConfig(lookahead=8)).decide(view)
    assert isinstance(action, Dispatch)
