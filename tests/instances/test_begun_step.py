"""When the parts of a step are launched, and what is in them."""

import time

import pytest

from amoeba_jax.engine.launching import PART_LEAD_S, step_due_s
from amoeba_jax.instances.begun_step import BegunStep, PreparedStep
from amoeba_jax.instances.pace import ExpectedStep
from amoeba_jax.instances.runner import Part, PreparedPart, StepInputs
from amoeba_jax.instances.step_plan import StepPlan
from amoeba_jax.programs.batch import BatchShape
from sharding.placement import Home

HOUR_S = 3600.0


def begun_step(num_segments: int, num_parts: int, seconds: float) -> BegunStep:
    part = PreparedPart(Part(Home(0, 1), (), None), [None] * num_segments, None)  # pyright: ignore[reportArgumentType]
    inputs = StepInputs((part,), None, None, None)  # pyright: ignore[reportArgumentType]
    prepared = PreparedStep(inputs, [], None, None, None)
    now = time.perf_counter()
    return BegunStep(StepPlan(BatchShape(((1, 1),), 1), ()), prepared, num_parts, ExpectedStep(now, now + seconds))


@pytest.mark.parametrize(
    ("num_segments", "num_parts", "parts"),
    [(6, 7, [1, 1, 1, 1, 1, 1]), (6, 2, [3]), (6, 3, [2, 2]), (6, 5, [1, 1, 2, 1]), (1, 2, [1]), (2, 2, [1])],
)
def test_parts_are_of_about_as_many_segments(num_segments: int, num_parts: int, parts: list[int]):
    """The last one has the head, which counts as one, and the segments that are left."""
    step, found = begun_step(num_segments, num_parts, HOUR_S), []
    while (segments := step.next_part()) is not None:
        assert segments.start == sum(found)
        assert step.num_launched == segments.stop
        found.append(segments.stop - segments.start)
    assert found == parts


def test_parts_are_due_one_behind_the_other():
    """Each takes as long; what lies between is waited for."""
    step = begun_step(3, 4, HOUR_S)
    begins_at = step.runs_until
    for part in (1, 2):
        step.next_part()
        assert step.runs_until == pytest.approx(begins_at + part * HOUR_S / 4, abs=1)
    launched_at = step.launched_at
    step.resumed()
    assert step.launched_at == launched_at, "no time has passed beyond what was launched"
    step.runs_until -= 2 * HOUR_S
    step.resumed()
    assert step.runs_until == pytest.approx(time.perf_counter(), abs=1)
    assert step.launched_at == pytest.approx(launched_at + 1.5 * HOUR_S, abs=1)


def test_parts_are_due_from_when_the_step_before_has_run():
    step = begun_step(3, 4, HOUR_S)
    step.next_part()
    step.next_part()
    step.began(step.runs_until + HOUR_S)
    assert step.runs_until == pytest.approx(time.perf_counter() + 2 * HOUR_S, abs=1)


def test_parts_are_due_sooner_where_devices_wait_for_two_in_a_row():
    """For one they may wait by chance."""
    step = begun_step(7, 8, HOUR_S)
    step.next_part()
    parts = [(True, 1 / 8), (False, None), (True, 1 / 8), (True, 1 / 16), (True, 1 / 32)]
    for wait, share in parts:
        step.devices_wait(wait)
        step.next_part()
        if share is not None:
            assert step.runs_until == pytest.approx(time.perf_counter() + share * HOUR_S, abs=1)
    step.began(time.perf_counter())
    assert step.runs_until == pytest.approx(time.perf_counter() + HOUR_S / 32, abs=1), "of what has not run"


def test_the_next_part_is_due_shortly_before_those_that_were_launched_have_run():
    class Serving:
        begun = begun_step(3, 4, HOUR_S)
        pending = ()

    Serving.begun.next_part()
    found_s = step_due_s(Serving())  # pyright: ignore[reportArgumentType]
    assert found_s == pytest.approx(HOUR_S / 4 - PART_LEAD_S, abs=1)


def test_after_a_pause_the_first_wait_does_not_count():
    step = begun_step(15, 16, HOUR_S)
    step.next_part()
    parts = [("resumed", 1 / 16), (True, 1 / 16), (True, 1 / 32), ("resumed", 1 / 32), (True, 1 / 32), (True, 1 / 64)]
    for what, share in parts:
        if what == "resumed":
            step.resumed()
        step.devices_wait(True)
        step.next_part()
        assert step.runs_until == pytest.approx(time.perf_counter() + share * HOUR_S, abs=1)
