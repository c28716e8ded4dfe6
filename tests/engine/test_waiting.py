"""The engine's queue: order and membership."""

from typing import cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.instances.queue import Waiting
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.sampling.rows import SamplingRow


def sequence(number: int, priority: int = 0, client: str = "") -> Sequence:
    params = SamplingParams(max_tokens=4, priority=priority)
    return Sequence(f"r{number}", (1,), params, cast(SamplingRow, None), lambda update: None, number, client=client)


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


@pytest.mark.parametrize("count", [3, 80])
def test_marked_sequences_move_to_their_places(count: int):
    waiting, made = Waiting(), [sequence(n, client="ab"[n % 2]) for n in range(2 * count)]
    for one in made:
        waiting.add(one)
    marked = made[:count]
    waiting.mark(marked, True)
    assert [*waiting] == made[count:] + marked
    assert [*waiting.of_client("a")] == made[::2]
    assert [s for s in waiting.of_client("a") if not s.beyond_share] == [s for s in made[::2] if s not in marked]
    waiting.remove(marked[1])
    assert marked[1] not in waiting
    waiting.mark([made[0]], False)
    assert [*waiting] == [made[0], *made[count:], *marked[2:]]


def test_sequences_are_known_by_client():
    waiting, made = Waiting(), [sequence(n, client="ab"[n % 2]) for n in range(4)]
    for one in made:
        waiting.add(one)
    assert {client: [*waiting.of_client(client)] for client in waiting.clients} == {"a": made[::2], "b": made[1::2]}
    waiting.remove(made[0])
    waiting.remove(made[2])
    assert {*waiting.clients} == {"b"}
    assert not waiting.of_client("a")
