"""No request is lost if policies are replaced and an operator changes instances at any moment."""

import math

from cluster_views import DEGREES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from policy_runs import DrivenHost, host_config

from serving.scheduler import (
    POLICY_NAMES,
    AmoebaConfig,
    Reject,
    RunningRequests,
    ScaleDown,
    ScaleUp,
    WaitingRequest,
    make_policy,
)
from serving.simulator.tally import Ending

NUM_DEVICES = 4
CONFIG = AmoebaConfig(linger_s=5.0)
DYNAMIC = [name for name in POLICY_NAMES if name != "static"]


class OperatorMachine(RuleBasedStateMachine):
    """Random arrivals, delays and actions of an operator."""

    @initialize(name=st.sampled_from(DYNAMIC))
    def begin(self, name: str) -> None:
        config = host_config(DEGREES, NUM_DEVICES, shows_timing=True)
        self.host = DrivenHost(config, make_policy(name, config=CONFIG))
        self.sent: list[WaitingRequest] = []

    @rule(
        prompt=st.sampled_from([200, 1_000, 6_000, 11_000, 20_000, 30_000, 50_000, 75_000]),
        output=st.integers(1, 200),
        priority=st.integers(-1, 1),
    )
    def a_request_comes(self, prompt: int, output: int, priority: int) -> None:
        name = f"r{len(self.sent)}"
        request = WaitingRequest(name, prompt, prompt + 200, priority, arrival_s=self.host.now_s)
        self.sent.append(request)
        self.host.send(request, output)
        self.host.scheduler.tick()

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.host.run(self.host.now_s + seconds)

    @rule(name=st.sampled_from(POLICY_NAMES))
    def the_policy_is_replaced(self, name: str) -> None:
        self.host.scheduler.policy = make_policy(name, config=CONFIG)
        self.host.scheduler.tick()

    @rule(
        change=st.sampled_from([((0, 1), 2), ((2, 3), 2), ((0, 1, 2, 3), 4), ((0, 1, 2, 3), 2), ((0, 1, 2, 3), 1)]),
        running=st.sampled_from(["migrate", "pause"]),
        release=st.booleans(),
    )
    def an_operator_transforms(self, change: tuple[tuple[int, ...], int], running: RunningRequests, release: bool):
        """Transform devices. A merge that pauses requests keeps weights."""
        devices, degree = change
        members = [i for i in self.host.executor.instances if not set(devices).isdisjoint(i.devices)]
        if len(members) > 1:
            release = release and running == "migrate"
            self.host.ask(ScaleUp(devices, degree, "an operator's", release_weights=release, running=running))
        else:
            self.host.ask(ScaleDown(devices, degree, "an operator's"))
        self.host.scheduler.tick()

    @rule(first=st.integers(0, NUM_DEVICES - 1))
    def an_operator_splits(self, first: int) -> None:
        instance = next(i for i in self.host.executor.instances if first in i.devices)
        self.host.ask(ScaleDown(instance.devices, 1, "an operator's"))
        self.host.scheduler.tick()

    @rule()
    def a_transformation_will_fail(self) -> None:
        self.host.executor.failing_transformations = 1

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if not hasattr(self, "host"):
            return
        executor = self.host.executor
        paused = [member for i in executor.instances for member in i.paused]
        running = [name for i in (*executor.instances, *paused) for name in i.runs]
        ended = self.host.ended(Ending.COMPLETED, Ending.NEVER_FITS, Ending.DEADLINE, Ending.QUEUE_FULL)
        assert sorted([*executor.queue, *running, *ended]) == sorted(r.request_id for r in self.sent)
        assert sorted(d for i in executor.instances for d in i.devices) == list(range(NUM_DEVICES))

    def teardown(self) -> None:
        """Check that a policy with merges serves all remaining requests and splits all merged instances."""
        if not hasattr(self, "host"):
            return
        host, executor = self.host, self.host.executor
        executor.failing_transformations = 0
        host.scheduler.policy = make_policy("amoeba", config=CONFIG)
        host.run(host.now_s + 3_000, lambda: len(host.ended(Ending.OPEN)) == 0)
        rejects = [action for _, action in executor.log if isinstance(action, Reject)]
        assert all("the largest instance" in r.reason for r in rejects), "only `static` may: every request fits at TP4"
        completed = host.ended(Ending.COMPLETED)
        assert completed | host.ended(Ending.NEVER_FITS) == {r.request_id for r in self.sent}
        first_token_s = dict(zip((r.request_id for r in self.sent), host.records.first_token_s, strict=False))
        assert all(math.isfinite(first_token_s[name]) for name in completed)
        host.run(host.now_s + 200, lambda: len(executor.instances) == NUM_DEVICES)
        assert len(executor.instances) == NUM_DEVICES, "all have split"


OperatorMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestOperator = OperatorMachine.TestCase
