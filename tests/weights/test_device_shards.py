"""Shards of one device: a mapping that can also give all shards of one release."""

import jax.numpy as jnp
import pytest

from amoeba_jax.weights.device_shards import DeviceShards

RELEASES = {("a", 1): (0, 2), ("b", 1): (0, 2), ("a", 2): (0, 4), ("c", 1): (1, 2)}
KEYS = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]


def make() -> DeviceShards:
    shards = DeviceShards(RELEASES)
    for value, key in enumerate(KEYS):
        shards[key] = jnp.array(value)
    return shards


def test_they_are_found_by_their_keys():
    shards = make()
    assert [int(shards[key]) for key in KEYS] == list(range(len(KEYS)))
    assert sorted(shards) == KEYS
    assert ("d", 0) not in shards
    with pytest.raises(KeyError):
        shards["d", 0]


@pytest.mark.parametrize("release", sorted(set(RELEASES.values())))
def test_those_released_together_are_taken_and_no_others(release: tuple[int, int]):
    shards = make()
    taken = shards.take(release)
    expected = {key: KEYS.index(key) for key, found in RELEASES.items() if found == release}
    assert {key: int(shard) for key, shard in taken.items()} == expected
    assert sorted(shards) == [key for key in KEYS if key not in taken]
    for key in KEYS:
        assert (key in shards) != (key in taken)
    with pytest.raises(KeyError):
        shards.take(release)


def test_those_that_come_back_can_be_taken_again():
    shards = make()
    for key in shards.take((0, 2)):
        shards[key] = jnp.array(-1)
    assert sorted(shards) == KEYS
    assert [int(shard) for shard in shards.take((0, 2)).values()] == [-1, -1]


def test_cleared_there_are_none():
    shards = make()
    shards.clear()
    assert list(shards) == []
    assert ("a", 0) not in shards
