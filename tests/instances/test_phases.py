"""Phases of instances, and states of their sequences."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence, SequenceState
from amoeba_jax.sampling.rows import SamplingRow
from sharding.mesh import SubMesh

ALLOWED = {
    (Phase.SERVING, Phase.DRAINING),
    (Phase.SERVING, Phase.CHANGING),
    (Phase.SERVING, Phase.PAUSED),
    (Phase.SERVING, Phase.LOST),
    (Phase.DRAINING, Phase.SERVING),
    (Phase.DRAINING, Phase.LOST),
    (Phase.CHANGING, Phase.SERVING),
    (Phase.CHANGING, Phase.DRAINING),
    (Phase.CHANGING, Phase.LOST),
    (Phase.PAUSED, Phase.SERVING),
}


def sequence() -> Sequence:
    return Sequence("r", (1,), SamplingParams(max_tokens=4), cast(SamplingRow, None), lambda update: None)


def instance(phase: Phase, *running: Sequence) -> Instance:
    """Return an instance without devices."""
    made: Any = Instance.__new__(Instance)
    made.id, made.phase, made.group = 0, phase, cast(SubMesh, SimpleNamespace(tp=1))
    made.lanes, made._free_slots = [cast(Lane, SimpleNamespace(running=[*running]))], []
    return made


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, Phase)))
def test_only_the_transitions_of_the_table_are_allowed(before: Phase, after: Phase):
    made = instance(before)
    if before == after or (before, after) in ALLOWED:
        made.enter(after)
        assert made.phase == after
        return
    with pytest.raises(AssertionError, match=f"must not go from {before} to {after}"):
        made.enter(after)
    assert made.phase == before


def test_a_sequence_pauses_with_its_instance():
    one = sequence()
    assert one.state == SequenceState.WAITING
    one.slot = 0
    made = instance(Phase.SERVING, one)
    assert one.state == SequenceState.RUNNING
    made.enter(Phase.PAUSED)
    assert one.state == SequenceState.PAUSED
    made.enter(Phase.SERVING)
    assert one.state == SequenceState.RUNNING
    one.finish("stop")
    assert one.state == SequenceState.FINISHED


def test_a_paused_sequence_that_is_preempted_waits():
    one = sequence()
    one.slot = 0
    made = instance(Phase.SERVING, one)
    made.enter(Phase.PAUSED)
    made.leave(one, made.lanes[0])
    one.slot = -1
    assert one.state == SequenceState.WAITING
    one.slot = 0  # it starts on another instance
    assert one.state == SequenceState.RUNNING


def test_a_sequence_that_failed_is_finished():
    one = sequence()
    one.fail(RuntimeError())
    assert one.state == SequenceState.FINISHED
