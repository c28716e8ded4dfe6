"""Buffers of hidden states: taken and put back as one array or rank by rank, and recreated when they are lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amoeba_jax.instances.hidden_states import HiddenStates
from sharding.mesh import SubMesh, SubMeshPool, assemble, disassemble

SHAPE = (3, 5)


@pytest.fixture(scope="module")
def pool() -> SubMeshPool:
    return SubMeshPool(tuple(jax.devices()[:4]), 4)


def numbered(group: SubMesh) -> HiddenStates:
    """Rank `r` has `r` everywhere."""
    devices = zip(group.device_indices, group.devices, strict=True)
    return HiddenStates({index: jnp.full(SHAPE, index, jnp.float32, device=device) for index, device in devices})


def ranks(hidden: HiddenStates, group: SubMesh) -> list[float]:
    """What the first element is on each rank."""
    array = hidden.take(group, replicated=False)
    found = [float(np.asarray(buffer)[0, 0]) for buffer in disassemble(group, array)]
    hidden.put(group, array, replicated=False)
    return found


def test_parts_are_taken_and_put_back_by_rank(pool: SubMeshPool):
    group = pool.group(0, 4)
    hidden = numbered(group)
    assert ranks(hidden, group) == [0, 1, 2, 3]
    part = pool.group(2, 2)
    array = hidden.take(part)
    assert array.shape == SHAPE
    new = [jnp.full(SHAPE, 10 + r, jnp.float32, device=d) for r, d in enumerate(part.devices)]
    hidden.put(part, assemble(part, new, replicated=True))
    assert ranks(hidden, group) == [0, 1, 10, 11]


def test_whole_array_stays_whole_and_can_be_taken_apart(pool: SubMeshPool):
    group = pool.group(0, 2)
    hidden = numbered(group)
    states = jax.device_put(np.full(SHAPE, 7, np.float32), group.replicated)
    hidden.take(group)
    hidden.put(group, states)
    assert hidden.take(group) is states
    hidden.put(group, states)
    assert ranks(hidden, group) == [7, 7]


def test_lost_buffers_are_recreated_and_the_others_kept(pool: SubMeshPool):
    group = pool.group(0, 4)
    hidden = numbered(group)
    assert not hidden.is_lost
    hidden.take(pool.group(1, 1)).delete()
    assert hidden.is_lost
    hidden.replace_lost()
    assert not hidden.is_lost
    assert ranks(hidden, group) == [0, 0, 2, 3]
    hidden.put(group, hidden.take(group))
    whole = hidden.take(group)
    hidden.put(group, whole)
    whole.delete()
    assert hidden.is_lost
    assert [buffer.shape for buffer in hidden.release().values()] == [SHAPE] * 4
