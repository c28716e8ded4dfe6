"""Policies that are replaced, and instances that an operator changes, at any moment: all requests end, none is lost."""

import math
from collections.abc import Callable

from cluster_views import DEGREES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_cluster import SimulatedCluster

from serving.scheduler import (
    POLICY_NAMES,
    AmoebaConfig,
    Reject,
    ScaleDown,
    ScaleUp,
    Scheduler,
    WaitingRequest,
    make_policy,
)

NUM_DEVICES = 4
CONFIG = AmoebaConfig(linger_s=5.0)
DYNAMIC = [name for name in POLICY_NAMES if name != "static"]


class Cluster(SimulatedCluster):
    """One whose instances an operator may change beside the scheduler."""

    def operate(self, devices: tuple[int, ...], degree: int) -> bool:
        """Begin what an operator asks for, if the engine would: instances that are whole, not in transition, and hold
        their requests afterwards."""
        members = [i for i in self.instances if not set(devices).isdisjoint(i.devices)]
        if any(i.transition is not None or not set(i.devices) <= set(devices) for i in members):
            return False
        largest = max((r.request.max_total_tokens for i in members for r in i.running), default=0)
        if len(members) > 1 and all(len(i.devices) < degree for i in members) and len(devices) == degree:
            self.apply(ScaleUp(devices, degree, "an operator's"))
            return True
        if len(members) == 1 and len(devices) > degree and largest <= self.capacity[degree]:
            self.apply(ScaleDown(devices, degree, "an operator's"))
            return True
        return False


class OperatorMachine(RuleBasedStateMachine):
    """Requests come, time passes, and an operator does what it likes."""

    @initialize(name=st.sampled_from(DYNAMIC))
    def begin(self, name: str) -> None:
        self.cluster = Cluster(DEGREES, NUM_DEVICES, shows_timing=True)
        self.scheduler = Scheduler(make_policy(name, config=CONFIG), self.cluster)
        self.sent: list[WaitingRequest] = []

    @rule(
        prompt=st.sampled_from([200, 1_000, 6_000, 11_000, 20_000, 30_000, 50_000, 75_000]),
        output=st.integers(1, 200),
        priority=st.integers(-1, 1),
    )
    def a_request_comes(self, prompt: int, output: int, priority: int) -> None:
        name = f"r{len(self.sent)}"
        request = WaitingRequest(name, prompt, prompt + 200, priority, arrival_s=self.cluster.now_s)
        self.sent.append(request)
        self.cluster.outputs[name] = output
        self.cluster.queue.append(request)
        self.scheduler.tick()

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.cluster.now_s + seconds)

    @rule(name=st.sampled_from(POLICY_NAMES))
    def the_policy_is_replaced(self, name: str) -> None:
        self.scheduler.policy = make_policy(name, config=CONFIG)
        self.scheduler.tick()

    @rule(change=st.sampled_from([((0, 1), 2), ((2, 3), 2), ((0, 1, 2, 3), 4), ((0, 1, 2, 3), 2), ((0, 1, 2, 3), 1)]))
    def an_operator_transforms(self, change: tuple[tuple[int, ...], int]) -> None:
        self.cluster.operate(*change)
        self.scheduler.tick()

    @rule(first=st.integers(0, NUM_DEVICES - 1))
    def an_operator_splits(self, first: int) -> None:
        instance = next(i for i in self.cluster.instances if first in i.devices)
        self.cluster.operate(instance.devices, 1)
        self.scheduler.tick()

    @rule()
    def a_transformation_will_fail(self) -> None:
        self.cluster.fail_transformations = 1

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        cluster = self.cluster
        while cluster.now_s < until_s and not done():
            self.scheduler.tick()
            event_s = min([until_s, cluster.now_s + 1.0, *(cluster._event_s(i) for i in cluster.instances)])
            cluster._advance(max(event_s, cluster.now_s + 1e-6))

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        waiting = [r.request_id for r in cluster.queue]
        running = [r.request.request_id for i in cluster.instances for r in i.running]
        places = [*waiting, *running, *cluster.finished_s, *cluster.rejected]
        assert sorted(places) == sorted(r.request_id for r in self.sent)
        assert sorted(d for i in cluster.instances for d in i.devices) == list(range(NUM_DEVICES))

    def teardown(self) -> None:
        """Whatever has happened, a policy that may merge serves all that is left, and splits what was merged."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.fail_transformations = 0
        self.scheduler.policy = make_policy("amoeba", config=CONFIG)
        left = cluster.now_s + 3_000
        self.run(left, lambda: len(cluster.finished_s) + len(cluster.rejected) == len(self.sent))
        rejects = [action for _, action in cluster.log if isinstance(action, Reject)]
        assert all("the largest instance" in r.reason for r in rejects), "only `static` may: every request fits at TP4"
        assert {*cluster.finished_s, *cluster.rejected} == {r.request_id for r in self.sent}
        assert all(math.isfinite(time_s) for time_s in cluster.first_token_s.values())
        self.run(cluster.now_s + 200, lambda: len(cluster.instances) == NUM_DEVICES)
        assert len(cluster.instances) == NUM_DEVICES, "all have split"


OperatorMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestOperator = OperatorMachine.TestCase
