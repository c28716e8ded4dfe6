"""Instances that are about to change together get in step: none waits for long for the last steps of the others."""

import math
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from begun_steps import end
from harness import engine_of, in_dispatcher
from hypothesis import given
from hypothesis import strategies as st
from pausing_cases import KINDS, done, expected_of, options, outputs, steps, submit
from serving_checks import TIMEOUT_S

from amoeba_jax import LLM
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.step_plan import StepPlan
from amoeba_jax.transform.in_step import Approach, InStep, LastStep, approaches

pytestmark = pytest.mark.timeout(TIMEOUT_S)

times_s = st.floats(0.05, 1.0)


def reached(members: list[LastStep], found: list[Approach]) -> list[float]:
    """When each ends its last step, by going through them."""
    result = []
    for member, approach in zip(members, found, strict=True):
        at = member.end_s
        for _ in range(approach.num_steps):
            at += approach.wait_s + member.step_s
        result.append(at)
    return result


@given(st.lists(st.builds(LastStep, st.floats(-0.5, 1.0), times_s, st.sampled_from([0, 2])), min_size=1, max_size=4))
def test_waits_are_no_longer_than_for_the_last_to_end(members: list[LastStep]):
    found = approaches(members)
    assert all(a.wait_s >= 0 and 0 <= a.num_steps <= m.most_steps for a, m in zip(found, members, strict=True))
    reached_s = reached(members, found)
    at_once = max((max(m.end_s for m in members) - m.end_s) / m.step_s for m in members)
    for at_s, member, approach in zip(reached_s, members, found, strict=True):
        last_s = max(reached_s) - at_s
        assert last_s <= approach.last_wait_s + 1e-6, "the last may be there sooner than where they were to meet"
        assert max(approach.wait_s / member.step_s, last_s / member.step_s + 0.1) <= at_once + 0.1 + 1e-6


@given(st.floats(0, 0.999), times_s)
def test_two_instances_meet_within_two_steps(phase: float, step_s: float):
    """No request waits for more than a fourth of a step before one of them, and 0.15 behind the last; and there are as
    few of them as it takes for a fifth and a tenth."""
    members = [LastStep(0.0, step_s, 2), LastStep(phase * step_s, step_s, 2)]
    found = approaches(members)
    assert all(a.wait_s <= 0.24 * step_s for a in found)
    reached_s = reached(members, found)
    assert abs(reached_s[0] - reached_s[1]) <= 0.14 * step_s
    if min(abs(phase - at) for at in (0.1, 0.3, 0.9)) > 1e-6:
        # The one that is ahead waits before its steps; or it launches one more, and the other waits.
        assert max(a.num_steps for a in found) == (0 if phase < 0.1 else 1 if phase < 0.3 or phase > 0.9 else 2)


def test_all_go_to_meet_the_one_that_can_launch_none():
    """One without requests that go on waits for as long as it takes."""
    members = [LastStep(0.0, 1.0, 2), LastStep(2.3, 1.0, 0), LastStep(0.5, math.inf, 0)]
    ahead, *others = approaches(members)
    assert ahead.num_steps == 2
    assert reached(members, [ahead, *others])[0] == pytest.approx(2.3, abs=0.1)
    assert [other.num_steps for other in others] == [0, 0]


def sequence(num_uncomputed: int = 1, *, needs_prompt_logits: bool = False) -> Any:
    return SimpleNamespace(num_uncomputed_tokens=num_uncomputed, needs_prompt_logits=needs_prompt_logits)


class Member(SimpleNamespace):
    """An instance with one sequence whose steps take a second, the last of which was launched some time ago."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __init__(self, launched_s_ago: float, now: float = 1000.0, step_s: float = 1.0, **settings: Any):
        pace, launched_at = Pace(), now - launched_s_ago
        for index in range(4):
            pace.take(launched_at - (4 - index) * step_s, launched_at - (3 - index) * step_s, True)
        pending = deque([SimpleNamespace(decodes=True, launched_at=launched_at, prompt_tokens=0)])
        lane = SimpleNamespace(cache=SimpleNamespace(num_available_pages=2))
        default = {"pending": pending, "begun": None, "running": [sequence()], "num_launched": 7, "lane": lane}
        super().__init__(pace=pace, **{**default, **settings})

    @property
    def has_steps(self) -> bool:
        return bool(self.pending) or self.begun is not None


def in_step(*members: Member, now: float = 1000.0) -> InStep:
    return InStep(members, now)  # pyright: ignore[reportArgumentType]


def due_s(together: InStep, member: Member, now: float) -> float:
    return together.due_s(member, now)  # pyright: ignore[reportArgumentType]


def test_one_that_is_half_a_step_ahead_goes_on():
    """It launches two steps, and waits for a fifth of one before each."""
    now = 1000.0
    ahead, behind = Member(0.7), Member(0.2)
    together = in_step(ahead, behind)
    for launched_at in (now - 0.7, now + 0.5):
        assert due_s(together, ahead, now) == math.inf, "its last one computes"
        ahead.pace.take(launched_at, launched_at + 1.0, True)
        ahead.pending.clear()
        assert due_s(together, ahead, launched_at + 1.0) == pytest.approx(0.2)
        ahead.num_launched += 1
        ahead.pending.append(None)
    ahead.pending.clear()
    assert due_s(together, ahead, now + 2) == math.inf, "that was the last"
    behind.pace.take(now - 0.2, now + 0.8, True)
    behind.pending.clear()
    assert due_s(together, behind, now + 0.8) == pytest.approx(0.0), "it launches two as well"


def test_one_that_is_little_ahead_waits():
    ahead, behind = Member(0.5), Member(0.42)
    together = in_step(ahead, behind)
    for each in (ahead, behind):
        each.pending.clear()
        assert due_s(together, each, 1000.0) == math.inf


def launches_none(ahead: Member, *others: Member) -> bool:
    together = in_step(ahead, *others)
    for each in (ahead, *others):
        each.pending.clear()
        each.begun = None
    return due_s(together, ahead, 1000.0) == math.inf


def test_who_launches_steps(monkeypatch: pytest.MonkeyPatch):
    """None do where steps are as short as the host's own times, or nothing is known of them; nor one with a prompt to
    compute, or without pages for two tokens of each sequence, or whose sequences need no more steps."""
    assert not launches_none(Member(0.7), Member(0.2))
    assert not launches_none(Member(0.0028, step_s=0.004), Member(0.0008, step_s=0.004))
    monkeypatch.setattr("amoeba_jax.transform.in_step._LEAST_STEP_S", 0.005)
    assert launches_none(Member(0.0028, step_s=0.004), Member(0.0008, step_s=0.004))
    unknown = Member(0.2)
    unknown.pace = Pace()
    assert launches_none(Member(0.7), unknown)
    assert launches_none(Member(0.7, running=[sequence(), sequence(30)]), Member(0.2))
    assert launches_none(Member(0.7, running=[sequence(needs_prompt_logits=True)]), Member(0.2))
    assert launches_none(Member(0.7, running=[sequence(), sequence()]), Member(0.2))
    assert launches_none(Member(0.7, running=[sequence(0)]), Member(0.2))
    assert not launches_none(Member(0.7), Member(0.2, running=[sequence(0)])), "that one's last step is waited for"


def test_an_instance_that_was_idle_is_where_it_is_now():
    """Not where it was when it computed last."""
    idle, other = Member(10.0, pending=deque()), Member(0.2)
    together = in_step(idle, other)
    assert due_s(together, idle, 1000.0) <= 0.25


def test_a_step_that_was_begun_counts():
    """A prompt of 300 tokens takes 3 seconds, of which the other computes two steps meanwhile."""
    begun = SimpleNamespace(launched_at=1000.0, plan=SimpleNamespace(decodes=False, prompt_tokens=300))
    slow, other = Member(1.0, begun=begun), Member(0.7)
    slow.pending.clear()
    slow.pace.take(998.0, 999.0, False, 100)
    together = in_step(slow, other)
    other.pending.clear()
    other.pace.take(999.3, 1000.3, True)
    waits_s = due_s(together, other, 1000.3)
    assert waits_s == pytest.approx((1002.4 - 1000.3 - 2.0 - 0.0) / 2, abs=0.1)
    assert due_s(together, slow, 1000.3) == math.inf, "all of it is to be launched, and no other"


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

    def planned(members: list[LastStep]) -> list[Approach]:
        assert [member.most_steps for member in members] == [2] * 4
        return [Approach(2 if index == 1 else 0, 0.01, 0.0) for index in range(4)]

    def drive() -> None:
        engine = engine_of(idle)
        submitted = submit(idle, KINDS)
        steps(idle, lambda: all(r.sequences[0].output for r in submitted))
        engine.advance()
        before = engine.instances
        assert all(instance.pending and instance.running for instance in before)
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
