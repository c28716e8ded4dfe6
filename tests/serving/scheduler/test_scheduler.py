"""The loop between policy and executor: order, counters, log lines and back-off, without JAX."""

import logging
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cluster_views import TP4_LONG, cluster, instance, waiting

from serving.scheduler import (
    Action,
    AmoebaPolicy,
    BackoffConfig,
    ClusterView,
    Dispatch,
    Outcome,
    Preempt,
    Reject,
    RejectKind,
    ScaleDown,
    ScaleUp,
    Scheduler,
)
from serving.scheduler.scheduler import MAX_RECORDS


@dataclass
class ScriptedPolicy:
    """Policy with constant decisions."""

    actions: list[Action]
    name: str = "scripted"

    def decide(self, view: ClusterView) -> list[Action]:
        return self.actions


@dataclass
class ScriptedExecutor:
    """Executor with a given state, which refuses actions of given types."""

    view: ClusterView = field(default_factory=cluster)
    refuses: tuple[type[Action], ...] = ()
    soon: bool = False
    applied: list[Action] = field(default_factory=list)

    def snapshot(self) -> ClusterView:
        return self.view

    def apply(self, action: Action) -> Outcome:
        self.applied.append(action)
        return Outcome(False, "not now", self.soon) if isinstance(action, self.refuses) else Outcome(True)

    def at(self, now_s: float) -> None:
        self.view = replace(self.view, now_s=now_s)


REPOSITORY = Path(__file__).parents[3]
MERGE = ScaleUp((0, 1, 2, 3), 4, "a long request")


def test_actions_are_carried_out_in_order_and_counted():
    actions: list[Action] = [
        Reject("late", RejectKind.DEADLINE, "too late"),
        ScaleDown((4, 5), 1),
        MERGE,
        Dispatch("a", 6),
        Dispatch("b", 7),
        Preempt("c"),
    ]
    executor = ScriptedExecutor()
    scheduler = Scheduler(ScriptedPolicy(actions), executor)
    assert [d.action for d in scheduler.tick()] == actions
    assert executor.applied == actions
    counters = scheduler.counters
    assert (counters.ticks, counters.dispatched, counters.scale_ups, counters.scale_downs) == (1, 2, 1, 1)
    assert (counters.preempted, counters.refused) == (1, 0)
    assert counters.rejected == {RejectKind.NEVER_FITS: 0, RejectKind.DEADLINE: 1, RejectKind.QUEUE_FULL: 0}


def test_every_decision_is_one_log_line_that_says_why(caplog: pytest.LogCaptureFixture):
    actions: list[Action] = [Dispatch("a", 3, 'least loaded,\n"TP1"'), MERGE]
    with caplog.at_level(logging.INFO, "amoeba.scheduler"):
        Scheduler(ScriptedPolicy(actions), ScriptedExecutor(refuses=(ScaleUp,))).tick()
    assert [r.getMessage() for r in caplog.records] == [
        'action=dispatch policy=scripted request_id=a instance_id=3 reason="least loaded,\\n\\"TP1\\"" '
        "outcome=accepted",
        'action=scale_up policy=scripted devices=0-3 degree=4 reason="a long request" '
        'release_weights=True running=migrate outcome=refused detail="not now" retry_s=1.0',
    ]
    assert caplog.records[0].__dict__["decision"]["instance_id"] == 3
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.WARNING]


def test_a_refusal_of_what_is_on_its_way_is_no_warning(caplog: pytest.LogCaptureFixture):
    """After each cold start, programs are still being compiled."""
    executor = ScriptedExecutor(refuses=(ScaleUp,), soon=True)
    with caplog.at_level(logging.INFO, "amoeba.scheduler"):
        scheduler = Scheduler(ScriptedPolicy([MERGE]), executor)
        scheduler.tick()
    assert [(r.levelno, r.__dict__["decision"]["outcome"]) for r in caplog.records] == [(logging.INFO, "refused")]
    assert scheduler.counters.refused == 1


def test_refused_action_is_tried_again_later_and_later():
    executor = ScriptedExecutor(refuses=(ScaleUp,))
    scheduler = Scheduler(ScriptedPolicy([MERGE]), executor, BackoffConfig(first_s=1, factor=2, longest_s=5))
    tried = []
    for now_s in range(30):
        executor.at(now_s)
        if scheduler.tick():
            tried.append(now_s)
    assert tried == [0, 1, 3, 7, 12, 17, 22, 27]
    assert scheduler.counters.refused == 8
    assert scheduler.counters.held_back == 22


def test_refused_dispatch_holds_back_no_other():
    executor = ScriptedExecutor(refuses=(Dispatch,))
    scheduler = Scheduler(ScriptedPolicy([Dispatch("a", 0)]), executor)
    scheduler.tick()
    executor.refuses = ()
    scheduler.policy = ScriptedPolicy([Dispatch("a", 0), Dispatch("a", 1), Dispatch("b", 0)])
    assert [d.action for d in scheduler.tick()] == [Dispatch("a", 1), Dispatch("b", 0)]


def test_policy_sees_which_transformations_were_refused():
    executor = ScriptedExecutor(cluster(queue=[waiting("long", TP4_LONG)]), refuses=(ScaleUp,))
    scheduler = Scheduler(AmoebaPolicy(), executor)
    for _ in range(5):
        scheduler.tick()
    assert [a.devices for a in executor.applied if isinstance(a, ScaleUp)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert scheduler.counters.held_back == 0


def test_transformation_that_ends_without_its_degree_counts_as_failed():
    executor = ScriptedExecutor()
    scheduler = Scheduler(ScriptedPolicy([MERGE]), executor)
    scheduler.tick()
    scheduler.policy = ScriptedPolicy([])
    executor.view = cluster(instance(0, 4, transition_to=4), now_s=1)
    scheduler.tick()
    assert scheduler.counters.transformations_failed == 0
    executor.view = cluster(now_s=2)
    scheduler.tick()
    assert scheduler.counters.transformations_failed == 1
    scheduler.policy = ScriptedPolicy([MERGE])
    assert scheduler.tick() == []
    executor.at(3)
    assert len(scheduler.tick()) == 1


def test_transformation_that_succeeds_forgets_earlier_refusals():
    executor = ScriptedExecutor(refuses=(ScaleUp,))
    scheduler = Scheduler(ScriptedPolicy([MERGE]), executor)
    scheduler.tick()
    executor.refuses = ()
    executor.at(1)
    scheduler.tick()
    scheduler.policy = ScriptedPolicy([])
    executor.view = cluster(instance(0, 4), now_s=2)
    scheduler.tick()
    assert scheduler.counters.transformations_failed == 0
    executor.view, executor.refuses = cluster(now_s=3), (ScaleUp,)
    scheduler.policy = ScriptedPolicy([MERGE])
    scheduler.tick()
    executor.at(4.5)
    assert len(scheduler.tick()) == 1, "the first refusal again, so a second later"


def test_scheduler_imports_no_jax():
    """It imports the standard library only."""
    code = (
        "import sys; import serving.scheduler; "
        "tops = {name.partition('.')[0] for name in sys.modules}; "
        "print(sorted(tops - set(sys.stdlib_module_names) - {'serving', '__main__'}))"
    )
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_last_actions_are_kept_with_their_times_and_outcomes():
    executor = ScriptedExecutor(refuses=(ScaleUp,))
    scheduler = Scheduler(ScriptedPolicy([Dispatch("a", 0), MERGE]), executor)
    executor.at(7.0)
    scheduler.tick()
    executor.at(7.5)
    scheduler.tick()  # the refused merge is not tried again so soon
    starts = [(record.number, record.at_s, record.outcome) for record in scheduler.dispatch_records]
    assert starts == [(1, 7.0, "accepted"), (3, 7.5, "accepted")]
    (merge,) = scheduler.records
    assert (merge.number, merge.at_s, merge.action, merge.outcome, merge.detail) == (
        2,
        7.0,
        MERGE,
        "refused",
        "not now",
    )
    for _ in range(200):
        scheduler.tick()
    assert len(scheduler.dispatch_records) == MAX_RECORDS
    assert scheduler.records[0] is merge
