"""Log lines of a call that waits for programs."""

import pytest

from amoeba_jax.transform import call as module
from amoeba_jax.transform.call import TransformCall
from amoeba_jax.transform.options import TransformOptions


def test_a_call_logs_again_if_fewer_programs_are_missing_after_an_interval(caplog: pytest.LogCaptureFixture):
    call = TransformCall(TransformOptions(4, (0, 1, 2, 3)))
    call.await_programs(0, None)
    call.await_programs(31, None)
    call.await_programs(30, 40.2)
    call.logged_at -= module._LOG_INTERVAL_S
    call.await_programs(31, 41.5)
    call.await_programs(1, 1.4)
    call.await_programs(0, 0.0)
    assert [line.removeprefix("the transformation to TP4 ") for line in caplog.messages] == [
        "waits for 31 programs",
        "waits for 1 program, about 1 s",
        f"goes on after {call.waited_s:.1f} s: its programs are ready",
    ]
    assert call.awaited_programs == 32
    assert not call.awaits_programs
