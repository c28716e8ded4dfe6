"""A scheduler with actions without effect, unknown actions and old requests."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cluster_views import TP4_LONG, cluster, instance, running, waiting

from serving.scheduler import (
    Action,
    Admission,
    AmoebaPolicy,
    ClusterView,
    Dispatch,
    LeastLoadFirstPolicy,
    Outcome,
    Policy,
    Preempt,
    QueueOrder,
    Reject,
    RoundRobinPolicy,
    ScaleDown,
    ScaleUp,
    Scheduler,
    invalid,
)

KEPT = 48_000
"""Tokens of a TP4 instance with kept weights."""


@dataclass
class Cluster:
    """Executor that transforms at once. As in the engine, a transformation without effect is refused."""

    view: ClusterView
    applied: list[Action] = field(default_factory=list)

    def snapshot(self) -> ClusterView:
        return self.view

    def apply(self, action: Action) -> Outcome:
        self.applied.append(action)
        if isinstance(action, Dispatch):
            (request,) = [r for r in self.view.queue if r.request_id == action.request_id]
            (home,) = [i for i in self.view.instances if i.id == action.instance_id]
            runs = replace(home, running=(running(request.request_id, request.max_total_tokens),))
            instances = tuple(runs if i is home else i for i in self.view.instances)
            self.view = replace(self.view, queue=(), instances=instances)
        if not isinstance(action, ScaleUp | ScaleDown):
            return Outcome(True)
        if all(i.degree == action.degree for i in self.view.instances_on(action.devices)):
            return Outcome(False, "they have this degree")
        rest = [i for i in self.view.instances if set(action.devices).isdisjoint(i.devices)]
        made = [instance(d, action.degree) for d in action.devices[:: action.degree]]
        self.view = replace(self.view, instances=tuple(sorted([*rest, *made], key=lambda i: i.id)))
        return Outcome(True)


def kept_weights(*requests, **fields) -> ClusterView:
    """Return four devices that an operator has merged with kept weights, and a request that exceeds their capacity."""
    merged = instance(0, 4, *requests, capacity_tokens=KEPT, free_tokens=KEPT - 2_000 * len(requests))
    return cluster(merged, queue=[waiting("long", TP4_LONG)], num_devices=4, **fields)


@pytest.mark.parametrize("make", [RoundRobinPolicy, LeastLoadFirstPolicy, AmoebaPolicy])
def test_an_instance_that_keeps_its_weights_is_split_and_merged_again(make: type):
    """After the second merge, weights are released and the request fits. No action is refused."""
    executor = Cluster(kept_weights())
    policy: Policy = make()
    scheduler = Scheduler(policy, executor)
    for tick in range(100):
        executor.view = replace(executor.view, now_s=tick / 100)
        scheduler.tick()
    assert [type(a) for a in executor.applied] == [ScaleDown, ScaleUp, Dispatch]
    assert [a.degree for a in executor.applied[:2]] == [1, 4]  # type: ignore[union-attr]
    assert scheduler.counters.refused == 0


@pytest.mark.parametrize("make", [RoundRobinPolicy, LeastLoadFirstPolicy, AmoebaPolicy])
def test_it_is_not_split_while_a_request_runs_that_its_parts_could_not_hold(make: type):
    assert make().decide(kept_weights(running("other", 20_000))) == []


def test_amoeba_merges_others_rather_than_split_it():
    merged = instance(0, 4, capacity_tokens=KEPT, free_tokens=KEPT)
    (action,) = AmoebaPolicy().decide(cluster(merged, queue=[waiting("long", TP4_LONG)]))
    assert isinstance(action, ScaleUp)
    assert action.devices == (4, 5, 6, 7)


# Refused actions


@dataclass
class Scripted:
    """Policy with given decisions."""

    actions: list[Any]
    name: str = "scripted"

    def decide(self, view: ClusterView) -> list[Action]:
        return self.actions


@dataclass
class Refusing:
    """Executor that refuses every action."""

    view: ClusterView = field(default_factory=cluster)
    tried: list[Action] = field(default_factory=list)

    def snapshot(self) -> ClusterView:
        return self.view

    def apply(self, action: Action) -> Outcome:
        self.tried.append(action)
        return Outcome(False, "no")


@pytest.mark.parametrize(
    "make",
    [
        lambda reason: ScaleDown((0, 1), 1, reason),
        lambda reason: ScaleUp((0, 1), 2, reason),
        lambda reason: Preempt("a", reason=reason),
    ],
)
def test_a_refused_action_is_left_alone_whatever_its_reason_says(make):
    executor = Refusing()
    policy = Scripted([])
    scheduler = Scheduler(policy, executor)
    for tick in range(9):
        policy.actions = [make(f"{tick} requests wait")]
        scheduler.tick()
    assert len(executor.tried) == 1
    assert scheduler.counters.held_back == 8


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (object(), "object is not an action"),
        ("merge", "str is not an action"),
        (Reject("a", "later", "no room"), "kind='later' is not a RejectKind"),  # type: ignore[arg-type]
        (ScaleUp((0, 1), 2, running="sleep"), "running='sleep' must be one of"),  # type: ignore[arg-type]
        (ScaleUp([0, 1], 2), r"devices=\[0, 1\] must be a tuple"),  # type: ignore[arg-type]
    ],
)
def test_an_action_of_an_unknown_kind_ends_nothing(action, problem: str, caplog: pytest.LogCaptureFixture):
    executor = Refusing()
    scheduler = Scheduler(Scripted([action, ScaleUp((0, 1), 2)]), executor)
    scheduler.tick()
    assert executor.tried == [ScaleUp((0, 1), 2)]
    assert scheduler.counters.refused == 2
    assert invalid(action) is not None
    assert any(problem.replace("\\", "") in record.getMessage() for record in caplog.records)


# Old requests


def test_a_request_that_has_run_for_long_may_be_preempted():
    """It was served at once 10 minutes ago and never waited."""
    old = running("old", 11_000, priority=5, arrival_s=0)
    full = [instance(d, 1, running(f"same{d}", 11_900)) for d in range(1, 8)]
    view = cluster(instance(0, 1, old), *full, queue=[waiting("urgent", 6_000, arrival_s=600)], now_s=600)
    assert AmoebaPolicy().decide(view) == []  # with the default ageing, 600 s make up for five levels of priority
    policy = AmoebaPolicy(admission=Admission(QueueOrder(level_s=600)))
    (action,) = policy.decide(view)
    assert isinstance(action, Preempt)
    assert action.request_id == "old"


def test_a_request_that_starved_before_it_ran_is_not_preempted():
    """After a preemption, it would be first in the queue and take its room back."""
    starved = running("starved", 11_000, priority=5, arrival_s=0, queued_s=400)
    full = [instance(d, 1, running(f"same{d}", 11_900)) for d in range(1, 8)]
    view = cluster(instance(0, 1, starved), *full, queue=[waiting("urgent", 6_000, arrival_s=600)], now_s=600)
    assert AmoebaPolicy(admission=Admission(QueueOrder(level_s=600))).decide(view) == []
    (action,) = AmoebaPolicy(admission=Admission(QueueOrder(level_s=600, starving_s=None))).decide(view)
    assert isinstance(action, Preempt)


def test_time_that_a_request_ran_is_not_waiting_time():
    """It ran for 350 of the 400 s since its arrival, so it does not starve yet."""
    order = QueueOrder(starving_s=300)
    preempted = waiting("preempted", arrival_s=0, priority=9, started=True, waiting_since_s=350)
    never_ran = waiting("never_ran", arrival_s=0, priority=9)
    assert order.key(preempted, 400)[0] == 1
    assert order.key(never_ran, 400)[0] == 0
