"""Placement changes that are refused or fail later. The scheduler counts, logs and blocks them."""

import dataclasses
import logging

import pytest
from placed_views import cluster, instance

from serving.scheduler import (
    Action,
    ClusterView,
    CocoServePolicy,
    Evict,
    LimitBatch,
    Migrate,
    Offload,
    Outcome,
    Replicate,
    ScaleIn,
    ScaleOut,
    Scheduler,
)
from serving.scheduler.actions import PlacementChange, identity, invalid

CHANGES: list[PlacementChange] = [
    Replicate(0, (5, 15), 1, "room"),
    Evict(0, (5, 15), 1, "late"),
    Migrate(0, (0, 4), 1, "late"),
    ScaleOut(0, 1, "room"),
    ScaleIn(0, 1, "calm"),
]


class Host:
    """Executor with a given state, which accepts or refuses all actions."""

    def __init__(self, view: ClusterView, accepts: bool = True):
        self.view, self.accepts = view, accepts
        self.applied: list[Action] = []

    def snapshot(self) -> ClusterView:
        return self.view

    def apply(self, action: Action) -> Outcome:
        self.applied.append(action)
        return Outcome(self.accepts, "" if self.accepts else "the device is full")

    def at(self, now_s: float, **fields) -> None:
        self.view = dataclasses.replace(self.view, now_s=now_s, **fields)


class Scripted:
    """Policy with constant decisions, which records the refused changes of each view."""

    name = "scripted"

    def __init__(self, *actions: Action):
        self.actions, self.refused = list(actions), list[frozenset]()

    def decide(self, view: ClusterView) -> list[Action]:
        self.refused.append(view.refused_changes)
        return self.actions


def test_changes_are_counted_by_kind():
    scheduler = Scheduler(Scripted(*CHANGES, Offload("r0"), LimitBatch(0, 8)), Host(cluster(instance(0))))
    scheduler.tick()
    counts = scheduler.counters.by_name()
    kinds = ("replicate", "evict", "migrate", "scale_out", "scale_in", "offloaded", "batch_limits")
    assert [counts[kind] for kind in kinds] == [1] * 7


def test_log_line_names_the_layers(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "amoeba.scheduler"):
        Scheduler(Scripted(CHANGES[0]), Host(cluster(instance(0)))).tick()
    expected = "action=replicate policy=scripted instance_id=0 layers=5-14 device=1 reason=room modules=layer"
    assert caplog.messages == [f"{expected} outcome=accepted"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_refused_change_is_blocked_and_the_policy_sees_it(change: PlacementChange):
    policy, host = Scripted(change), Host(cluster(instance(0)), accepts=False)
    scheduler = Scheduler(policy, host)
    for now_s in (0.0, 0.5, 1.1, 2.0):
        host.at(now_s)
        scheduler.tick()
    assert len(host.applied) == 2, "after 1 s again, and then not before 2 s more"
    assert policy.refused == [frozenset(), {identity(change)}, frozenset(), {identity(change)}]
    assert (scheduler.counters.refused, scheduler.counters.held_back) == (2, 2)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_change_that_ends_without_effect_counts_as_failed(change: PlacementChange):
    """The instance shows that the change is in progress. After that, its layers show the result."""
    homes = {range(5, 15): (0, 1)} if isinstance(change, Evict) else None
    there = [instance(0, homes=homes), *([instance(1)] if isinstance(change, ScaleIn) else [])]
    policy, host = Scripted(change), Host(cluster(*there))
    scheduler = Scheduler(policy, host)
    scheduler.tick()
    policy.actions = []
    host.at(1.0, instances=tuple(dataclasses.replace(i, changes_placement=True) for i in there))
    scheduler.tick()
    assert scheduler.counters.transformations_failed == 0
    host.at(2.0, instances=tuple(there))
    scheduler.tick()
    assert scheduler.counters.transformations_failed == 1
    assert policy.refused[-1] == {identity(change)}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_change_that_succeeds_is_no_failure(change: PlacementChange):
    before = [instance(0, homes={range(5, 15): (0, 1)})] if isinstance(change, Evict) else [instance(0)]
    after = {
        Replicate: [instance(0, homes={range(5, 15): (0, 1)})],
        Evict: [instance(0)],
        Migrate: [instance(0, homes={range(0, 4): (1,)})],
        ScaleOut: [instance(0), instance(1)],
        ScaleIn: [instance(0)],
    }[type(change)]
    policy, host = Scripted(change), Host(cluster(*before))
    scheduler = Scheduler(policy, host)
    scheduler.tick()
    policy.actions = []
    host.at(1.0, instances=tuple(after))
    scheduler.tick()
    assert scheduler.counters.transformations_failed == 0
    assert policy.refused[-1] == frozenset()


def test_policy_goes_on_to_another_device_when_one_refuses():
    host = Host(cluster(instance(0, 24), num_devices=3), accepts=False)
    scheduler = Scheduler(CocoServePolicy(), host)
    for tick in range(60):
        host.at(tick / 2)
        scheduler.tick()
    assert {a.device for a in host.applied if isinstance(a, ScaleOut)} == {1, 2}
    assert scheduler.counters.refused == len(host.applied) <= 10, "later and later"


def test_invalid_changes_are_found():
    assert invalid(Replicate(0, (3, 3), 1)) == "layers=(3, 3) must be (first, end) with 0 <= first < end"
    assert "modules='head' must be one of" in str(invalid(Migrate(0, (0, 4), 1, modules="head")))  # type: ignore
    assert invalid(LimitBatch(0, 0)) == "size=0 must be at least 1, or None"
    assert all(invalid(change) is None for change in CHANGES)
