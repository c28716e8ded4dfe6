"""The queue as policies see it follows what changes of the engine's, and reads no more than that."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.waiting import Waiting
from amoeba_jax.sampling.rows import sampling_row
from serving.runtime.waiting_view import WaitingView
from serving.scheduler import QueueSnapshot


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


def shown(snapshot: QueueSnapshot) -> dict[str, bool]:
    return {request.request_id: request.beyond_share for request in snapshot}


def test_a_mark_that_changes_is_the_only_change(waiting: Waiting, view: WaitingView):
    made = [sequence(number) for number in range(100)]
    for one in made:
        waiting.add(one)
    before = view.snapshot().version
    waiting.mark([made[40]], True)
    after = view.snapshot()
    assert {name for name, _ in after.changes_since(before) or ()} == {"r40"}
    assert [name for name, beyond in shown(after).items() if beyond] == ["r40"]
    assert len(after) == 100


def test_sequences_that_have_gone_before_they_were_seen(waiting: Waiting, view: WaitingView):
    """Others may have their ids by then."""
    kept = sequence(0)
    waiting.add(kept)
    assert shown(view.snapshot()) == {"r00": False}
    for number in range(1, 50):
        short_lived = sequence(number)
        waiting.add(short_lived)
        waiting.remove(short_lived)
        del short_lived
    waiting.remove(kept)
    waiting.add(kept)
    last = sequence(50)
    waiting.add(last)
    assert shown(view.snapshot()) == {"r00": False, "r50": False}
    waiting.remove(kept)
    del kept
    for number in range(51, 60):
        waiting.add(sequence(number))
    assert shown(view.snapshot()) == {f"r{number}": False for number in range(50, 60)}
    waiting.clear()
    assert not shown(view.snapshot())


def test_the_size_of_a_request_is_known_while_its_last_token_is_in_flight(waiting: Waiting, view: WaitingView):
    """It was preempted: nothing can be done for it yet, and an instance that holds it should stay."""
    preempted, other = sequence(0), sequence(1)
    preempted.num_in_flight = 1
    waiting.add(preempted)
    waiting.add(other)
    assert shown(view.snapshot()) == {"r01": False}
    assert view.hidden_tokens == (preempted.max_total_tokens,) == (5,)
    preempted.num_in_flight = 0
    assert shown(view.snapshot()) == {"r00": False, "r01": False}
    assert view.hidden_tokens == ()
