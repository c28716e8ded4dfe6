"""Buffers of hidden states are taken and put back as one array or rank by rank. Lost buffers are recreated.

Expert loads are collected from all devices, which then count from zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amoeba_jax.instances.hidden_states import ExpertLoads, HiddenStates
from sharding.mesh import SubMesh, SubMeshPool, assemble, disassemble

SHAPE = (3, 5)


@pytest.fixture(scope="module")
def pool() -> SubMeshPool:
    return SubMeshPool(tuple(jax.devices()[:4]), 4)


def numbered(group: SubMesh) -> HiddenStates:
    """Return buffers in which rank `r` is filled with `r`."""
    hidden = HiddenStates(SHAPE, "float32")
    for index, device in zip(group.device_indices, group.devices, strict=True):
        hidden.add(index, device)
    whole = [jnp.full(SHAPE, index, jnp.float32, device=d) for index, d in enumerate(group.devices)]
    hidden.take(group, replicated=False)
    hidden.put(group, assemble(group, whole), replicated=False)
    return hidden


def ranks(hidden: HiddenStates, group: SubMesh) -> list[float]:
    """Return the first element on each rank."""
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


def test_groups_of_two_instances_share_the_buffers(pool: SubMeshPool):
    hidden = numbered(pool.group(0, 4))
    for group in (pool.group(0, 2), pool.group(2, 2), pool.group(1, 1), pool.group(0, 4)):
        states = hidden.take(group)
        assert states.shape == SHAPE
        hidden.put(group, jax.device_put(np.full(SHAPE, group.tp, np.float32), group.replicated))
    assert ranks(hidden, pool.group(0, 4)) == [4] * 4


def test_lost_buffers_are_recreated_and_the_others_kept(pool: SubMeshPool):
    group, devices = pool.group(0, 4), range(4)
    hidden = numbered(group)
    hidden.take(pool.group(1, 1)).delete()
    hidden.replace_lost(devices)
    assert ranks(hidden, group) == [0, 0, 2, 3]
    hidden.put(group, hidden.take(group))
    whole = hidden.take(group)
    hidden.put(group, whole)
    whole.delete()
    hidden.replace_lost([2])
    assert ranks(hidden, pool.group(2, 1)) == [0]
    with pytest.raises(KeyError):
        hidden.take(pool.group(3, 1))
    hidden.replace_lost(devices)
    assert ranks(hidden, group) == [0] * 4


def test_a_dropped_buffer_is_gone_and_the_others_stay(pool: SubMeshPool):
    group = pool.group(0, 2)
    hidden = numbered(group)
    hidden.put(group, jax.device_put(np.full(SHAPE, 7, np.float32), group.replicated))
    hidden.drop(1)
    hidden.replace_lost(range(2))
    assert ranks(hidden, pool.group(0, 1)) == [7]
    with pytest.raises(KeyError):
        hidden.take(pool.group(1, 1))


def test_loads_are_collected_from_each_device_once(pool: SubMeshPool):
    loads, group = ExpertLoads((2, 3)), pool.group(0, 2)
    for index, device in zip(group.device_indices, group.devices, strict=True):
        loads.add(index, device)
    first = np.array([[2**32 - 1, 0, 5], [0, 0, 7]], np.uint32)  # the largest count

    def count(values: np.ndarray) -> None:
        """Add the tokens of a step on the first rank, as a program does."""
        array = loads.take(group)
        counted = [b + jnp.asarray(v) for b, v in zip(disassemble(group, array), (values, 0 * values), strict=True)]
        placed = [jax.device_put(it, device) for it, device in zip(counted, group.devices, strict=True)]
        loads.put(group, assemble(group, jax.block_until_ready(placed), replicated=True))

    count(first)
    assert loads.collect() == []
    count(np.ones_like(first))
    assert loads.collect() == loads.collect() == []
    np.testing.assert_array_equal(loads.totals[0], first.astype(np.int64) + 1)
    assert not loads.totals[1].any()


def test_loads_that_a_failed_step_has_lost_start_from_zero(pool: SubMeshPool):
    hidden = HiddenStates(SHAPE, "float32", (2, 3))
    hidden.add(0, pool.devices[0])
    states = hidden.take_states(pool.group(0, 1))
    assert states.loads is not None
    states.loads.delete()
    hidden.put_states(pool.group(0, 1), states)
    hidden.replace_lost([0])
    assert hidden.loads is not None
    assert hidden.loads.collect() == []
    lost = hidden.loads.take(pool.group(0, 1))
    lost.delete()
    hidden.loads.put(pool.group(0, 1), lost)
    assert hidden.loads.collect() == []
    assert not hidden.loads.totals[0].any()
