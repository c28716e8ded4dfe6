"""Instances that are about to change together get in step: none waits for long for the last steps of the others."""

import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from begun_steps import end
from harness import engine_of, in_dispatcher
from hypothesis import given
from hypothesis import strategies as st
from pausing_cases import KINDS, done, expected_of, options, outputs, steps, submit
from serving_checks import TIMEOUT_S
from transform_cases import SHARED, make

from amoeba_jax import LLM
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.step_plan import StepPlan
from amoeba_jax.transform.in_step import Approach, InStep, approaches

pytestmark = pytest.mark.timeout(TIMEOUT_S)

times_s = st.floats(0.05, 1.0)


def ends(ends_s: list[float], steps_s: list[float], found: list[Approach]) -> list[float]:
    """When each ends its last step, by going through them."""
    result = []
    for at, step_s, approach in zip(ends_s, steps_s, found, strict=True):
        for _ in range(approach.num_steps):
            at += approach.wait_s + step_s
        result.append(at)
    return result


@given(st.lists(st.tuples(st.floats(-0.5, 1.0), times_s), min_size=1, max_size=4))
def test_waits_are_no_longer_than_for_the_last_to_end(members: list[tuple[float, float]]):
    ends_s, steps_s = [end for end, _ in members], [step for _, step in members]
    found = approaches(ends_s, steps_s)
    assert all(a.wait_s >= 0 and 0 <= a.num_steps <= 2 for a in found)
    reached_s = ends(ends_s, steps_s, found)
    at_once = max((max(ends_s) - end) / step for end, step in members)
    for at_s, step_s, approach in zip(reached_s, steps_s, found, strict=True):
        last_s = max(reached_s) - at_s
        assert last_s <= approach.last_wait_s + 1e-6, "one may have to wait for less than planned, as none is there yet"
        assert max(approach.wait_s / step_s, last_s / step_s + 0.1) <= at_once + 0.1 + 1e-6


@given(st.floats(0, 0.999), times_s)
def test_two_instances_meet_within_two_steps(phase: float, step_s: float):
    """No request waits for more than a fourth of a step before one of them, and 0.15 behind the last; and there are as
    few of them as it takes for a fifth and a tenth."""
    ends_s, steps_s = [0.0, phase * step_s], [step_s, step_s]
    found = approaches(ends_s, steps_s)
    assert all(a.wait_s <= 0.24 * step_s for a in found)
    reached_s = ends(ends_s, steps_s, found)
    assert abs(reached_s[0] - reached_s[1]) <= 0.14 * step_s
    if min(abs(phase - at) for at in (0.1, 0.3, 0.9)) > 1e-6:
        # The one that is ahead waits before its steps; or it launches one more, and the other waits.
        assert max(a.num_steps for a in found) == (0 if phase < 0.1 else 1 if phase < 0.3 or phase > 0.9 else 2)


def member(pace_s: float, launched_s_ago: float, now: float, *, running: bool = True) -> Any:
    """An instance whose steps take that long, and whose last one was launched some time ago."""
    pace = Pace()
    for index in range(4):
        pace.take(now + index * pace_s - launched_s_ago - 4 * pace_s, now - launched_s_ago - (3 - index) * pace_s, True)
    pending = deque([SimpleNamespace(decodes=True, launched_at=now - launched_s_ago, prompt_tokens=0)])

    class Member(SimpleNamespace):
        __hash__ = object.__hash__

        @property
        def has_steps(self) -> bool:
            return bool(self.pending)

    return Member(pace=pace, pending=pending, begun=None, running=["one"] if running else [], num_launched=7)


def test_one_that_is_half_a_step_ahead_goes_on():
    """It launches two steps, and waits for a fifth of one before each."""
    now = 1000.0
    ahead, behind = member(1.0, 0.7, now), member(1.0, 0.2, now)
    together = InStep([ahead, behind], now)
    for num_steps, launched_at in enumerate([now - 0.7, now + 0.5]):
        assert together.due_s(ahead, now) == math.inf, "its last one computes"
        ahead.pace.take(launched_at, launched_at + 1.0, True)
        ahead.pending.clear()
        assert together.due_s(ahead, launched_at + 1.0) == pytest.approx(0.2), num_steps
        ahead.num_launched += 1
        ahead.pending.append(None)
    ahead.pending.clear()
    assert together.due_s(ahead, now + 2) == math.inf, "that was the last"
    behind.pending.clear()
    assert together.due_s(behind, now + 2) == pytest.approx(0.0), "it launches one: the other launches two"


def test_one_that_is_little_ahead_waits():
    now = 1000.0
    ahead, behind = member(1.0, 0.5, now), member(1.0, 0.42, now)
    together = InStep([ahead, behind], now)
    for each in (ahead, behind):
        each.pending.clear()
        assert together.due_s(each, now) == math.inf


def test_nothing_to_gain():
    """With the shortest steps, and for one alone."""
    now = 1000.0
    short = [member(0.004, 0.003, now), member(0.004, 0.001, now)]
    ahead, idle = member(1.0, 0.7, now), member(1.0, 0.2, now, running=False)
    for instances in (short, [ahead, idle], [ahead]):
        together = InStep(instances, now)
        for each in instances:
            each.pending.clear()
            assert together.due_s(each, now) == math.inf


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, **SHARED) as llm:
        yield llm


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("degree", [2, 4])
def test_an_instance_launches_steps_before_the_merge(idle: LLM, monkeypatch: pytest.MonkeyPatch, degree: int):
    """One of four is ahead: it alone launches two more, the merge waits for it, and tokens are as ever."""
    expected = expected_of(idle, KINDS)
    launched: list[int] = []
    launch_plan = Instance.launch_plan

    def noted(instance: Instance, plan: StepPlan) -> None:
        if instance.transition is None:
            launched.append(instance.id)
        launch_plan(instance, plan)

    def planned(ends_s: list[float], steps_s: list[float]) -> list[Approach]:
        assert len(ends_s) == len(steps_s) == 4
        return [Approach(2 if index == 1 else 0, 0.01, 0.0) for index in range(4)]

    def drive() -> None:
        engine = engine_of(idle)
        submitted = submit(idle, KINDS)
        steps(idle, lambda: all(r.sequences[0].output for r in submitted))
        engine.advance()
        before = engine.instances
        assert all(instance.pending and instance.running for instance in before)
        monkeypatch.setattr("amoeba_jax.transform.in_step._SHORT_STEP_S", 0.0)
        monkeypatch.setattr("amoeba_jax.transform.in_step.approaches", planned)
        monkeypatch.setattr(Instance, "launch_plan", noted)
        future = engine.transform(options(degree, release=True))
        for _ in range(2):  # the others have not computed their last ones yet
            engine._drain(before[1])
            engine.advance()
            time.sleep(0.02)
            engine.advance()
        assert launched == [1, 1]
        assert engine.instances == before, "the merge waits for it"
        engine.end_transformations()
        assert launched == [1, 1]
        assert [group.to_degree for group in future.result().groups] == [degree] * (4 // degree)
        steps(idle, lambda: done(submitted))
        assert outputs(submitted) == expected
        end(idle, submitted)

    in_dispatcher(idle, drive)
