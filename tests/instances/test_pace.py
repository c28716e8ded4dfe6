"""Durations of steps, and the overhead of a transformation."""

import pytest

from amoeba_jax.instances.pace import Pace
from amoeba_jax.transform.report import GroupTransform


def test_a_step_lasts_from_its_launch_or_the_result_before():
    pace = Pace()
    assert pace.step_s is None
    pace.take(10.0, 11.0, True)
    assert pace.step_s == 1.0
    pace.take(10.5, 14.0, True)  # queued behind the first: it lasted 3 s
    pace.take(20.0, 25.0, True)
    assert pace.step_s == 3.0


def test_what_is_no_decode_step_is_left_out():
    pace = Pace()
    pace.take(0.0, 100.0, False)
    assert pace.step_s is None
    pace.take(1.0, 102.0, True)
    assert pace.step_s == 2.0


def test_only_the_latest_steps_count():
    pace = Pace()
    for start in range(0, 100, 10):
        pace.take(float(start), start + 9.0, True)
    for start in range(100, 116):
        pace.take(float(start), start + 0.5, True)
    assert pace.step_s == 0.5


def test_steps_with_prompts_give_the_rate_of_prompts():
    pace = Pace()
    pace.take(0.0, 1.0, True, prompt_tokens=9)  # decodes only
    assert pace.prompt_tokens_per_s is None
    pace.take(1.0, 2.0, False, prompt_tokens=100)
    pace.take(1.5, 5.0, False, prompt_tokens=300)  # queued behind the previous step: it lasted 3 s
    pace.take(5.0, 25.0, False)  # step of a transformation
    assert pace.prompt_tokens_per_s == 100.0
    for start in range(100, 116):
        pace.take(float(start), start + 0.5, False, prompt_tokens=5)
    assert pace.prompt_tokens_per_s == 10.0


@pytest.mark.parametrize(
    ("steps", "step_s", "overhead"),
    [(10, 0.1, 0.5), (10, 0.3, 0.0), (0, 0.1, None), (10, None, None)],
)
def test_overhead_is_what_is_left_of_the_time(steps: int, step_s: float | None, overhead: float | None):
    group = GroupTransform((0, 1), 1, 2, 2.0, (), steps, steps, 0, 0, step_s=step_s)
    assert group.step_overhead == overhead


def test_the_rate_of_decodes_is_of_sixteen_steps():
    pace = Pace()
    for step in range(20):
        assert (pace.decode_rate is None) == (step < 16)
        pace.take(2.0 * step, 2.0 * step + 0.5, True, num_rows=1 if step < 4 else 4)
        pace.take(2.0 * step + 1, 2.0 * step + 1.5, False, prompt_tokens=5, num_rows=9)
    assert pace.decode_rate == (4, 8.0)
