"""Order and membership of the engine's queue."""

from typing import cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.instances.queue import Waiting
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.sampling.rows import SamplingRow


def sequence(number: int, priority: int = 0, client: str = "", deadline: float | None = None) -> Sequence:
    params = SamplingParams(max_tokens=4, priority=priority)
    return Sequence(
        f"r{number}", (1,), params, cast(SamplingRow, None), print, number, client=client, deadline=deadline
    )


def test_sequences_are_in_order_and_found():
    waiting, made = Waiting(), [sequence(n, priority=n % 2) for n in range(6)]
    for one in made[::-1]:
        waiting.add(one)
    assert [s.number for s in waiting] == [0, 2, 4, 1, 3, 5]
    assert made[3] in waiting
    waiting.remove(made[3])
    assert made[3] not in waiting
    assert len(waiting) == 5
    with pytest.raises(ValueError):
        waiting.remove(made[3])


def test_marked_sequences_move_to_their_places():
    waiting, made = Waiting(), [sequence(n, client="ab"[n % 2]) for n in range(6)]
    for one in made:
        waiting.add(one)
    for one in made[:3]:
        one.beyond_share = True
    waiting.sort()
    assert [*waiting] == made[3:] + made[:3]
    waiting.remove(made[1])
    assert made[1] not in waiting
    made[0].beyond_share = False
    waiting.sort()
    assert [*waiting] == [made[0], *made[3:], made[2]]


def test_deadlines_are_found_anywhere_in_the_queue():
    waiting, late = Waiting(), [sequence(-n, deadline=float(n)) for n in (9, 3, 5, 7)]
    for one in [*late, sequence(1)]:
        waiting.add(one)
    waiting.remove(late[2])  # it starts to run
    assert waiting.expired(3.0) == []
    assert waiting.expired(8.0) == [late[3], late[1]]
    waiting.remove(late[1])
    waiting.remove(late[3])
    assert waiting.expired(8.0) == []
    waiting.add(late[2])
    waiting.remove(late[0])
    assert waiting.expired(10.0) == [late[2]]
