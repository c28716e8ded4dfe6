"""Chunks of one device: as a mapping, and those that are released together taken at once."""

import jax.numpy as jnp
import pytest

from amoeba_jax.weights.device_chunks import DeviceChunks

RELEASES = {("a", 1): (0, 2), ("b", 1): (0, 2), ("a", 2): (0, 4), ("c", 1): (1, 2)}
KEYS = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]


def make() -> DeviceChunks:
    chunks = DeviceChunks(RELEASES)
    for value, key in enumerate(KEYS):
        chunks[key] = jnp.array(value)
    return chunks


def test_they_are_found_by_their_keys():
    chunks = make()
    assert [int(chunks[key]) for key in KEYS] == list(range(len(KEYS)))
    assert sorted(chunks) == KEYS
    assert ("d", 0) not in chunks
    with pytest.raises(KeyError):
        chunks["d", 0]


@pytest.mark.parametrize("release", sorted(set(RELEASES.values())))
def test_those_released_together_are_taken_and_no_others(release: tuple[int, int]):
    chunks = make()
    taken = chunks.take(release)
    expected = {key: KEYS.index(key) for key, found in RELEASES.items() if found == release}
    assert {key: int(chunk) for key, chunk in taken.items()} == expected
    assert sorted(chunks) == [key for key in KEYS if key not in taken]
    for key in KEYS:
        assert (key in chunks) != (key in taken)
    with pytest.raises(KeyError):
        chunks.take(release)


def test_those_that_come_back_can_be_taken_again():
    chunks = make()
    for key in chunks.take((0, 2)):
        chunks[key] = jnp.array(-1)
    assert sorted(chunks) == KEYS
    assert [int(chunk) for chunk in chunks.take((0, 2)).values()] == [-1, -1]


def test_cleared_there_are_none():
    chunks = make()
    chunks.clear()
    assert list(chunks) == []
    assert ("a", 0) not in chunks
