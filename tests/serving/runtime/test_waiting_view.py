"""The scheduler sees the engine's queue as it is at each snapshot."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.instances.queue import Waiting
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.sampling.rows import sampling_row
from serving.runtime.waiting_view import WaitingView


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def view(waiting: Waiting) -> WaitingView:
    engine: Any = SimpleNamespace(waiting=waiting, admission=SimpleNamespace(awaits_program=lambda sequence: False))
    return WaitingView(cast(Engine, engine))


def sequence(number: int) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=4)
    row = sampling_row(params, 0, 211, ())
    return Sequence(f"r{number:02}", (1,), params, row, lambda update: None, number)


def shown(view: WaitingView) -> dict[str, bool]:
    return {request.request_id: request.beyond_share for request in view.snapshot()}


def test_a_changed_mark_shows_in_the_next_snapshot(waiting: Waiting, view: WaitingView):
    made = [sequence(number) for number in range(3)]
    for one in made:
        waiting.add(one)
    assert shown(view) == {"r00": False, "r01": False, "r02": False}
    made[1].beyond_share = True
    waiting.sort()
    assert shown(view) == {"r00": False, "r01": True, "r02": False}


def test_a_sequence_that_has_gone_is_neither_shown_nor_found(waiting: Waiting, view: WaitingView):
    made = [sequence(number) for number in range(2)]
    for one in made:
        waiting.add(one)
    assert shown(view) == {"r00": False, "r01": False}
    waiting.remove(made[0])
    assert view.get("r00") is None
    assert view.get("r01") is made[1]
    assert shown(view) == {"r01": False}


def test_the_size_of_a_request_is_known_while_its_last_token_is_in_flight(waiting: Waiting, view: WaitingView):
    """The preempted request cannot start yet, but an instance that can hold it must stay."""
    preempted, other = sequence(0), sequence(1)
    preempted.num_in_flight = 1
    waiting.add(preempted)
    waiting.add(other)
    assert shown(view) == {"r01": False}
    assert view.hidden_tokens == (preempted.max_total_tokens,) == (5,)
    preempted.num_in_flight = 0
    assert shown(view) == {"r00": False, "r01": False}
    assert view.hidden_tokens == ()
