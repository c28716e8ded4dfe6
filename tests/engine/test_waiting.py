"""The engine's queue: order, membership, and the changes that others follow."""

import gc
import weakref
from typing import cast

import pytest

from amoeba_jax import SamplingParams
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.waiting import Waiting
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


def test_a_sequence_whose_order_has_changed_is_still_found():
    waiting, made = Waiting(), [sequence(n) for n in range(4)]
    for one in made:
        waiting.add(one)
    made[0].beyond_share = True
    waiting.remove(made[0])
    made[1].beyond_share = True
    waiting.sort()
    assert [s.number for s in waiting] == [2, 3, 1]


def test_changes_can_be_followed_until_orders_change():
    waiting, made = Waiting(), [sequence(n) for n in range(3)]
    waiting.add(made[0])
    version = waiting.version
    waiting.add(made[1])
    waiting.remove(made[0])
    changes = waiting.changes_since(version)
    assert changes == {id(made[1]): made[1], id(made[0]): None}
    assert [*(changes or ())] == [id(made[1]), id(made[0])]
    assert waiting.changes_since(version + 1) == {id(made[0]): None}
    assert waiting.changes_since(waiting.version) == {}
    waiting.add(made[0])
    assert waiting.changes_since(version + 1) == {id(made[0]): made[0]}, "the latest is what counts"
    waiting.sort()
    assert waiting.changes_since(version) is None
    assert waiting.changes_since(waiting.version) == {}
    version = waiting.version
    waiting.clear()
    assert waiting.changes_since(version) is None
    assert len(waiting) == 0


def test_orders_that_have_changed_are_changes_of_those_that_wait():
    waiting, made = Waiting(), [sequence(n) for n in range(101)]
    for one in made[:100]:
        waiting.add(one)
    version = waiting.version
    made[3].beyond_share = made[100].beyond_share = True
    waiting.sort([made[3], made[100]])
    assert [*waiting][-1] is made[3]
    assert waiting.changes_since(version) == {id(made[3]): made[3]}


def test_a_sequence_that_has_gone_is_not_kept():
    waiting, made = Waiting(), sequence(0)
    gone, number, version = weakref.ref(made), id(made), waiting.version
    waiting.add(made)
    waiting.remove(made)
    del made
    gc.collect()
    assert gone() is None
    assert waiting.changes_since(version) == {number: None}


def test_clients_are_counted():
    waiting, made = Waiting(), [sequence(n, client="ab"[n % 2]) for n in range(4)]
    for one in made:
        waiting.add(one)
    assert dict(waiting.clients) == {"a": 2, "b": 2}
    waiting.remove(made[0])
    waiting.remove(made[2])
    assert dict(waiting.clients) == {"b": 2}
