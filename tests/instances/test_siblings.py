"""Siblings that wait for a slot: the number admitted at a time, and the cost when they end."""

from typing import Any, cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.instances.queue import Siblings
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.sampling.rows import SamplingRow

SLOTS = 16


class Counted(Sequence):
    """Sequence that counts comparisons. A search compares once for each entry of a list."""

    comparisons = 0
    __hash__ = Sequence.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return self is other


def sequence(number: int, index: int = 0, **settings: Any) -> Counted:
    params = SamplingParams(max_tokens=4)
    row = cast(SamplingRow, None)
    return Counted(f"r{number}", (1,), params, row, lambda update: None, number, index, **settings)


@pytest.fixture
def queue() -> list[Sequence]:
    return []


@pytest.fixture
def siblings(queue: list[Sequence]) -> Siblings:
    return Queued(queue)


class Queued(Siblings):
    """Admits siblings to a list after each change."""

    def __init__(self, queue: list[Sequence]):
        super().__init__()
        self._queue = queue

    def release(self, leader: Sequence) -> None:
        super().release(leader)
        self._queue += self.admit(SLOTS)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._queue += self.admit(SLOTS)


def released(siblings: Siblings, number: int, count: int) -> list[Counted]:
    """Return the siblings of a leader whose prompt is computed."""
    leader = sequence(number)
    made = [sequence(number, index + 1, leader=leader) for index in range(count)]
    leader.siblings = list(made)
    siblings.release(leader)
    return made


def end(siblings: Siblings, ended: Sequence) -> None:
    ended.finish("abort")
    siblings.remove(ended)


def test_those_that_end_let_in_the_next_in_order(siblings: Siblings, queue: list[Sequence]):
    later = released(siblings, 2, 20)
    earlier = released(siblings, 1, 3)
    assert queue == later[:14], "an eighth of the slots is left to others"
    assert siblings.held == {*later[14:], *earlier}
    end(siblings, earlier[1])
    end(siblings, later[14])
    assert siblings.held == {*later[15:], earlier[0], earlier[2]}, "those that have ended are not counted"
    for ended in later[:3]:
        end(siblings, ended)
    assert queue[14:] == [earlier[0], earlier[2], later[15]]
    for ended in [*later, *earlier]:
        if not ended.finished:
            end(siblings, ended)
    assert not siblings.held
    assert all(it in queue or it in (earlier[1], later[14]) for it in [*later, *earlier])
    queue.clear()
    assert queue == [] != released(siblings, 3, 2) == queue


@pytest.mark.parametrize("reverse", [False, True], ids=["first", "last"])
def test_ending_many_costs_no_search_of_all(siblings: Siblings, reverse: bool):
    made = [it for number in range(20) for it in released(siblings, number, 50)]
    others = [sequence(100 + number) for number in range(1_000)]
    Counted.comparisons = 0
    for one in others:
        end(siblings, one)
    for one in made[::-1] if reverse else made:
        end(siblings, one)
    assert not siblings.held
    assert Counted.comparisons == 0
