"""Decisions of `amoeba_paper` in a given state: each rule of the paper's scheduler."""

import dataclasses

from cluster_views import TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting

from serving.scheduler import (
    Action,
    AmoebaPaperPolicy,
    ClusterView,
    Dispatch,
    PaperConfig,
    ScaleDown,
    ScaleUp,
    Timing,
)


def decide(view: ClusterView, **config) -> list[Action]:
    return AmoebaPaperPolicy(PaperConfig(**config)).decide(view)


def merges(actions: list[Action]) -> list[tuple[tuple[int, ...], int]]:
    return [(a.devices, a.degree) for a in actions if isinstance(a, ScaleUp)]


def dispatched(actions: list[Action]) -> dict[str, int]:
    return {a.request_id: a.instance_id for a in actions if isinstance(a, Dispatch)}


def test_a_request_goes_to_the_least_loaded_instance_that_can_serve_it():
    view = cluster(*[filled(d, 0.5) for d in range(8) if d != 5], filled(5, 0.2), queue=[waiting("a")])
    assert dispatched(decide(view)) == {"a": 5}


def test_consecutive_long_requests_go_to_the_higher_degree():
    """The higher degree wins despite its greater load."""
    tp4, tp2 = instance(0, 4, running("long", 40_000)), instance(4, 2)
    assert dispatched(decide(cluster(tp4, tp2, queue=[waiting("next", TP2_LONG)]))) == {"next": 0}


def test_degrees_double_in_steps_within_one_group():
    policy, queue = AmoebaPaperPolicy(), [waiting("long", TP4_LONG)]
    busy = [filled(d, 0.5) for d in range(4)]
    assert merges(policy.decide(cluster(*busy, queue=queue))) == [((4, 5), 2), ((6, 7), 2)]
    doing = [instance(4, 2, transition_to=2), instance(6, 2)]
    assert policy.decide(cluster(*busy, *doing, queue=queue)) == []
    assert merges(policy.decide(cluster(*busy, instance(4, 2), instance(6, 2), queue=queue))) == [((4, 5, 6, 7), 4)]
    assert dispatched(policy.decide(cluster(*busy, instance(4, 4), queue=queue))) == {"long": 4}


def test_only_instances_of_the_same_degree_merge():
    """Of a TP2 and two TP1 instances, the TP1 instances merge first."""
    mixed = [instance(0, 2, running("other", TP2_LONG))]
    actions = decide(cluster(*mixed, queue=[waiting("long", TP4_LONG)], num_devices=4))
    assert merges(actions) == [((2, 3), 2)]


def test_half_made_groups_do_not_split_though_they_run_nothing_long():
    policy, queue = AmoebaPaperPolicy(), [waiting("long", TP4_LONG)]
    policy.decide(cluster(queue=queue, num_devices=4))
    half = cluster(instance(0, 2), instance(2, 2, transition_to=2), queue=queue, num_devices=4)
    assert policy.decide(half) == []


def test_a_request_without_room_scales_up_by_input_length_and_load():
    """All TP1 instances are full. Two merged instances hold more, because they release weights."""
    view = cluster(*[filled(d, 1.0) for d in range(4)], queue=[waiting("a")], num_devices=4)
    assert merges(decide(view)) == [((0, 1), 2)]
    assert decide(view, scale_up_under_load=False) == []


def test_a_second_long_request_scales_up_others_while_the_first_one_runs():
    view = cluster(instance(0, 4, running("long", TP4_LONG)), queue=[waiting("next", TP4_LONG)])
    assert merges(decide(view)) == [((4, 5), 2), ((6, 7), 2)]


def test_short_requests_skip_instances_that_a_transformation_needs():
    """Only devices 0 to 3 could take the long request again, and all others are full. The short request waits."""
    policy = AmoebaPaperPolicy(PaperConfig(scale_up_under_load=False))
    policy.decide(cluster(instance(0, 4, running("long", 57_000))))
    now = cluster(*[filled(d, 0.5) for d in range(4)], *[filled(d, 1.0) for d in range(4, 8)], queue=[waiting("a")])
    assert policy.decide(now) == []
    assert dispatched(decide(now)) == {"a": 0}, "nothing is reserved where no long request was seen"


def test_an_instance_whose_long_requests_are_done_is_unavailable_at_once_and_splits_half_free():
    fuller = instance(0, 4, *(running(f"r{n}") for n in range(40)))
    assert dispatched(decide(cluster(fuller, queue=[waiting("a")])))["a"] >= 4
    assert not any(isinstance(a, ScaleDown) for a in decide(cluster(fuller)))
    emptier = instance(0, 4, *(running(f"r{n}") for n in range(30)))
    (action,) = decide(cluster(emptier))
    assert isinstance(action, ScaleDown)
    assert (action.devices, action.degree) == ((0, 1, 2, 3), 1)
    assert decide(cluster(instance(0, 4, running("long", TP2_LONG)))) == [], "not while a long one runs"


def test_the_group_with_the_best_expected_performance_scales_up():
    """A prompt runs on device 0. A merge of devices 2 and 3 slows down no request."""
    prompt = dataclasses.replace(running("p", 2_000), uncomputed_tokens=900)
    view = cluster(instance(0, 1, prompt), queue=[waiting("long", TP2_LONG)], num_devices=4)
    (action,) = decide(view)
    assert isinstance(action, ScaleUp)
    assert action.devices == (2, 3)
    assert "100% of the group's tokens/s" in action.reason


def test_expected_performance_is_that_of_measured_steps_where_there_are_some():
    busy = [instance(d, 1, running(f"r{d}")) for d in range(2)]
    view = cluster(*busy, queue=[waiting("long", TP2_LONG)], num_devices=2)
    view = dataclasses.replace(view, degrees=view.degrees[:2])
    assert "75% of the group's" in decide(view)[0].reason  # 670 of 2 x 448 tokens/s
    measured = dataclasses.replace(view, timing=Timing(steps_s={1: 0.02, 2: 0.04}))
    assert "50% of the group's" in decide(measured)[0].reason


def test_a_group_without_room_takes_nothing_else_until_it_has_some():
    full = [filled(d, 1.0) for d in range(4)]
    queue = [waiting("long", 79_000), waiting("short", arrival_s=1)]
    view = cluster(*full[:3], filled(3, 0.3), queue=queue, now_s=2, num_devices=4)
    assert decide(view) == []


def test_a_group_that_was_refused_is_left_for_another():
    policy, queue = AmoebaPaperPolicy(), [waiting("long", TP2_LONG)]
    refused = frozenset({((0, 1), 2)})
    assert merges(policy.decide(cluster(queue=queue, refused=refused))) == [((2, 3), 2)]


def test_a_group_that_was_begun_goes_on_behind_many_that_wait():
    """Requests ahead in the queue may not use its devices."""
    policy, long = AmoebaPaperPolicy(), waiting("long", TP4_LONG)
    assert merges(policy.decide(cluster(queue=[long], num_devices=4))) == [((0, 1), 2), ((2, 3), 2)]
    urgent = [waiting(f"urgent{n}", TP4_LONG, priority=-1) for n in range(PaperConfig().lookahead)]
    halves = cluster(instance(0, 2), instance(2, 2), queue=[*urgent, long], num_devices=4)
    assert merges(policy.decide(halves)) == [((0, 1, 2, 3), 4)]


def test_a_group_that_was_given_up_is_there_for_the_next():
    """The first request finds no group. Then a group's owner starts elsewhere, and the last request gets this group."""
    policy, full = AmoebaPaperPolicy(), [filled(device, 0.9) for device in range(8)]
    owner, other = waiting("owner", TP4_LONG), waiting("other", TP4_LONG, arrival_s=1)
    policy.decide(cluster(*full, instance(8, 4, free_slots=0), queue=[owner, other], num_devices=12))
    assert set(policy._scaling) == {"owner", "other"}
    first, last = waiting("first", 79_000, priority=-1), waiting("last", 79_000, arrival_s=2)
    partly = instance(8, 4, running("r", 20_000))
    actions = policy.decide(cluster(*full, partly, queue=[first, owner, other, last], num_devices=12))
    assert dispatched(actions) == {"owner": 8}
    assert set(policy._scaling) == {"other", "last"}
