"""States of a transformation, and its log lines while it waits for programs."""

import pytest

from amoeba_jax.transform import change as module
from amoeba_jax.transform.change import Change
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.views import TRANSITIONS, TransformState


def test_log_lines_repeat_if_fewer_programs_are_missing_after_an_interval(caplog: pytest.LogCaptureFixture):
    one = Change(TransformOptions(4, (0, 1, 2, 3)))
    one.update_programs(0, None)
    one.update_programs(31, None)
    one.update_programs(30, 40.2)
    one._logged_at -= module._LOG_INTERVAL_S
    one.update_programs(31, 41.5)
    one.update_programs(1, 1.4)
    assert one.awaits_programs
    one.update_programs(0, 0.0)
    assert [line.removeprefix("the transformation to TP4 ") for line in caplog.messages] == [
        "waits for 31 programs",
        "waits for 1 program, about 1 s",
        f"goes on after {one.waited_s:.1f} s: its programs are ready",
    ]
    assert one.awaited_programs == 32
    one.enter(TransformState.SWITCHING)
    assert not one.awaits_programs


def test_states_follow_each_other_as_the_table_says():
    assert TRANSITIONS.keys() == set(TransformState)
    for before, after in ((a, b) for a in TransformState for b in TransformState if a is not b):
        one = Change(TransformOptions(2, (0, 1)), state=before)
        if after in TRANSITIONS[before]:
            one.enter(after)
            assert one.state is after
        else:
            with pytest.raises(AssertionError, match=f"{after} cannot follow {before}"):
                one.enter(after)
            assert one.state is before


def test_an_ended_transformation_stays_ended():
    ends = {TransformState.DONE, TransformState.ABORTED, TransformState.RECOVERED}
    assert {state for state, after in TRANSITIONS.items() if not after} == ends
    assert all(ends <= TRANSITIONS[state] for state in TransformState if state not in ends)
