"""Merges that short requests cause: they find slots, and no room in the KV cache."""

from collections.abc import Iterable

import pytest
from cluster_views import cluster, filled, instance, running, waiting

from serving.scheduler import Action, AmoebaConfig, AmoebaPolicy, InstanceView, ScaleDown, ScaleUp

CONFIG = AmoebaConfig(merge_for_cache_s=5.0, linger_s=10.0)
QUEUE = [waiting(f"w{n}") for n in range(3)]


def full(free_slots: int = 22, devices: Iterable[int] = range(8), **fields) -> list[InstanceView]:
    """TP1 instances with ten short requests each, and no page for another."""
    fields = {"step_s": 0.04} | fields
    return [
        instance(d, 1, *(running(f"r{d}-{n}") for n in range(10)), free_tokens=0, free_slots=free_slots, **fields)
        for d in devices
    ]


def merged(device: int, count: int = 60, **fields) -> InstanceView:
    """A TP4 instance with that many short requests."""
    return instance(device, 4, *(running(f"r{device}-{n}") for n in range(count)), **fields)


def changes(actions: list[Action]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(type(a).__name__, a.devices, a.degree) for a in actions if isinstance(a, ScaleUp | ScaleDown)]


def tick(policy: AmoebaPolicy, now_s: float, views: list[InstanceView], queue=QUEUE):
    return changes(policy.decide(cluster(*views, queue=queue, now_s=now_s)))


def under_pressure(policy: AmoebaPolicy, until_s: int, views: list[InstanceView]) -> list:
    """All changes until a time, from snapshots of every second."""
    return [(now_s, *change) for now_s in range(until_s + 1) for change in tick(policy, now_s, views)]


def test_instances_merge_once_requests_have_lacked_room_for_long_enough():
    """Devices of TP4 have room for 16.7 requests, of TP1 for 10."""
    assert under_pressure(AmoebaPolicy(CONFIG), 6, full()) == [(6, "ScaleUp", (0, 1, 2, 3), 4)]


def test_nothing_merges_where_that_is_turned_off():
    assert under_pressure(AmoebaPolicy(AmoebaConfig(merge_for_cache_s=None)), 30, full()) == []


def test_merges_by_default():
    """Two seconds after the first time that requests were found to lack room."""
    assert under_pressure(AmoebaPolicy(), 30, full())[0] == (3, "ScaleUp", (0, 1, 2, 3), 4)


def test_nothing_merges_where_slots_are_what_lacks():
    assert under_pressure(AmoebaPolicy(CONFIG), 30, full(free_slots=0)) == []


def test_room_that_comes_in_between_begins_the_time_again():
    policy = AmoebaPolicy(CONFIG)
    assert under_pressure(policy, 5, full()) == []
    assert tick(policy, 5.5, [filled(device, 0.5) for device in range(8)]) == []
    assert [tick(policy, now_s, full()) for now_s in (6, 7, 8, 9, 10, 11)] == [[]] * 6
    assert tick(policy, 12.0, full()) != []


def test_one_group_merges_at_a_time():
    policy = AmoebaPolicy(CONFIG)
    under_pressure(policy, 6, full())
    on_its_way = full(devices=range(4), transition_to=4) + full(devices=range(4, 8))
    assert [tick(policy, now_s, on_its_way) for now_s in range(7, 15)] == [[]] * 8
    rest = [merged(0, 60, free_tokens=0, step_s=0.05), *full(devices=range(4, 8))]
    assert tick(policy, 15, rest) == [("ScaleUp", (4, 5, 6, 7), 4)]
    assert [tick(policy, now_s, rest) for now_s in (16, 17, 18, 19)] == [[]] * 4


def test_the_last_group_merges_when_another_has_proved_to_be_as_fast():
    policy = AmoebaPolicy(CONFIG)
    under_pressure(policy, 6, full())
    unproved = [merged(0, 60, free_tokens=0), *full(devices=range(4, 8))]
    assert [tick(policy, now_s, unproved) for now_s in range(7, 60)] == [[]] * 53
    proved = [merged(0, 60, free_tokens=0, free_slots=0, step_s=0.05), *full(devices=range(4, 8))]
    assert tick(policy, 60, proved) == [("ScaleUp", (4, 5, 6, 7), 4)]


def test_an_instance_proves_itself_with_a_long_request_too():
    """Without it, it would be faster still."""
    policy = AmoebaPolicy(CONFIG)
    under_pressure(policy, 6, full())
    long = running("long", 50_000)
    both = instance(0, 4, long, *(running(f"r-{n}") for n in range(60)), free_tokens=0, step_s=0.05)
    later = [change for now_s in range(7, 20) for change in tick(policy, now_s, [both, *full(devices=range(4, 8))])]
    assert later[0] == ("ScaleUp", (4, 5, 6, 7), 4)


@pytest.mark.parametrize(("step_s", "stays"), [(0.05, True), (0.09, False)])
def test_where_all_have_merged_they_are_compared_with_those_before(step_s: float, stays: bool):
    """TP1 instances generated 10 tokens in 0.04 s; 60 / 4 for each device of TP4 take 0.06 s for as many."""
    policy = AmoebaPolicy(CONFIG)

    def decide(now_s: int, *views: InstanceView) -> list[tuple[str, tuple[int, ...], int]]:
        return changes(policy.decide(cluster(*views, num_devices=4, queue=QUEUE, now_s=now_s)))

    merges = [change for now_s in range(7) for change in decide(now_s, *full(devices=range(4)))]
    assert merges == [("ScaleUp", (0, 1, 2, 3), 4)]
    assert [decide(now_s, merged(0, 60, free_tokens=0, step_s=step_s)) for now_s in (7, 8, 9)] == [[]] * 3
    assert decide(10, merged(0, 20, step_s=step_s)) == ([] if stays else [("ScaleDown", (0, 1, 2, 3), 1)])


def test_nothing_merges_where_no_times_are_told():
    """Whether it pays could not be seen."""
    assert under_pressure(AmoebaPolicy(CONFIG), 30, full(step_s=None)) == []


def after_a_merge(step_s: float, base_step_s: float = 0.04) -> tuple[AmoebaPolicy, list[InstanceView]]:
    """A policy that has merged devices 0 to 3, whose steps take that long."""
    policy = AmoebaPolicy(CONFIG)
    under_pressure(policy, 6, full())
    return policy, [
        merged(0, 66, free_tokens=0, step_s=step_s),
        *full(devices=range(4, 8), free_slots=0, step_s=base_step_s),
    ]


def test_an_instance_that_was_merged_for_its_room_stays_while_it_is_needed():
    """Four TP1 instances do not hold its 66 requests, nor what waits."""
    policy, views = after_a_merge(0.04)
    assert [tick(policy, now_s, views) for now_s in range(7, 60, 4)] == [[]] * 14


def test_it_splits_when_what_runs_would_fit_again():
    policy, _ = after_a_merge(0.04)
    views = [merged(0, 10), *(filled(device, 0.2) for device in range(4, 8))]
    assert tick(policy, 8.0, views, queue=[]) == []
    assert tick(policy, 15.0, views, queue=[]) == [], "requests lacked room less than linger_s ago"
    assert tick(policy, 30.0, views, queue=[]) == [("ScaleDown", (0, 1, 2, 3), 1)]


@pytest.mark.parametrize(("step_s", "stays"), [(0.05, True), (0.09, False)])
def test_it_splits_if_it_turns_out_slower(step_s: float, stays: bool):
    """TP1 instances generate 10 tokens in 0.04 s; 66 / 4 for each device of TP4 take 0.066 s for as many."""
    policy, views = after_a_merge(step_s, base_step_s=0.04)
    views = [views[0], *full(devices=range(4, 8), step_s=0.04)]
    assert tick(policy, 7, views) == tick(policy, 8, views) == []
    emptier = [merged(0, 20, step_s=step_s), *full(devices=range(4, 8), step_s=0.04)]
    assert tick(policy, 9, emptier) == ([] if stays else [("ScaleDown", (0, 1, 2, 3), 1)])
    if not stays:
        later = [change for now_s in range(20, 60) for change in tick(policy, now_s, full())]
        assert {degree for _, _, degree in later} == {2}, "TP4 is left alone, and TP2 has not been tried"
