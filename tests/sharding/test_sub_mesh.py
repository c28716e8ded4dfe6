"""Device groups that exist, and arrays over their buffers without copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.errors import LayoutError
from sharding.mesh import SubMeshPool, assemble, disassemble


@pytest.fixture(scope="module")
def pool() -> SubMeshPool:
    return SubMeshPool(tuple(jax.devices()), max_tp=4)


def pointers(array: jax.Array) -> dict[jax.Device, int]:
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_groups_of_a_degree_partition_the_devices(pool, tp):
    groups = pool.groups(tp)
    assert [device for group in groups for device in group.devices] == list(pool.devices)
    assert [group.start for group in groups] == list(range(0, 8, tp))
    for group in groups:
        assert group.tp == tp
        assert group.mesh.devices.tolist() == list(group.devices)
        assert [pool.devices[index] for index in group.device_indices] == list(group.devices)


def test_equal_groups_share_one_mesh(pool):
    assert pool.group(4, 2) is pool.groups(2)[2]
    assert pool.group(4, 2).mesh is pool.group(4, 2).mesh
    assert pool.group(4, 2) != pool.group(4, 4)
    assert str(pool.group(4, 2)) == "TP2[4, 5]"


@pytest.mark.parametrize(("start", "tp"), [(1, 2), (2, 4), (3, 4), (8, 1), (8, 4), (-2, 2), (-1, 1), (-4, 4)])
def test_group_that_is_not_aligned_or_outside_is_refused(pool, start, tp):
    with pytest.raises(LayoutError, match=f"TP{tp} instance starts at a multiple of {tp} and ends within 8"):
        pool.group(start, tp)


@pytest.mark.parametrize("tp", [0, -1, 3, 8])
def test_degree_that_does_not_exist_is_refused(pool, tp):
    for call in (lambda: pool.group(0, tp), lambda: pool.groups(tp), lambda: pool.check_degree(tp)):
        with pytest.raises(LayoutError, match=rf"tensor_parallel_size={tp} .* one of \(1, 2, 4\)"):
            call()


def test_degree_above_max_tp_is_refused():
    pool = SubMeshPool(tuple(jax.devices()[:4]), max_tp=2)
    assert pool.degrees() == (1, 2)
    with pytest.raises(LayoutError, match=r"one of \(1, 2\)"):
        pool.group(0, 4)


@pytest.mark.parametrize(("num_devices", "max_tp"), [(0, 1), (3, 1), (5, 1), (6, 2), (7, 4)])
def test_device_count_must_be_a_power_of_two(num_devices, max_tp):
    with pytest.raises(LayoutError, match=f"num_devices={num_devices}"):
        SubMeshPool(tuple(jax.devices()[:num_devices]), max_tp)


@pytest.mark.parametrize(("num_devices", "max_tp"), [(8, 3), (8, 16), (8, 0), (2, 4), (1, 2)])
def test_max_tp_must_be_a_degree_and_fit(num_devices, max_tp):
    with pytest.raises(LayoutError, match=f"max_tensor_parallel_size={max_tp}.*num_devices={num_devices}"):
        SubMeshPool(tuple(jax.devices()[:num_devices]), max_tp)


@pytest.mark.first_by_default
@pytest.mark.parametrize(("start", "tp"), [(0, 1), (5, 1), (2, 2), (0, 4), (4, 4)])
def test_sharded_view_is_the_ranks_buffers_side_by_side(pool, start, tp):
    group = pool.group(start, tp)
    values = [np.arange(6, dtype=np.float32).reshape(3, 2) + 100 * rank for rank in range(tp)]
    buffers = [jnp.array(v, copy=True, device=d) for v, d in zip(values, group.devices, strict=True)]
    assemble(group, buffers)  # JAX checks only the first array of a kind
    view = assemble(group, buffers)
    assert view.sharding.is_equivalent_to(group.sharded, view.ndim)
    np.testing.assert_array_equal(view, np.concatenate(values))
    assert pointers(view) == {b.devices().pop(): b.unsafe_buffer_pointer() for b in buffers}
    parts = disassemble(group, view)
    assert [part.unsafe_buffer_pointer() for part in parts] == [b.unsafe_buffer_pointer() for b in buffers]
    assert [part.devices() for part in parts] == [{device} for device in group.devices], "in rank order"
    for part, value in zip(parts, values, strict=True):
        np.testing.assert_array_equal(part, value)


@pytest.mark.parametrize(("start", "tp"), [(2, 2), (4, 4)])
def test_what_a_program_returned_is_taken_apart_in_rank_order(pool, start, tp):
    group = pool.group(start, tp)
    double = jax.jit(lambda x: 2 * x, out_shardings=group.sharded, donate_argnums=0)
    made = double(jax.device_put(np.arange(4 * tp, dtype=np.float32), group.sharded))
    parts = disassemble(group, made)
    own = [made.addressable_data(rank) for rank in range(tp)]
    assert [p.unsafe_buffer_pointer() for p in parts] == [p.unsafe_buffer_pointer() for p in own]
    assert [part.devices() for part in parts] == [{device} for device in group.devices]
    double(made)
    with pytest.raises(RuntimeError, match="deleted"):
        disassemble(group, made)


@pytest.mark.parametrize(("start", "tp"), [(3, 1), (6, 2), (4, 4)])
def test_replicated_view_is_each_ranks_own_buffer(pool, start, tp):
    group = pool.group(start, tp)
    value = np.arange(6, dtype=np.float32).reshape(3, 2)
    buffers = [jnp.array(value, copy=True, device=device) for device in group.devices]
    assemble(group, buffers, replicated=True)
    view = assemble(group, buffers, replicated=True)
    assert view.shape == value.shape
    assert view.sharding.is_equivalent_to(group.replicated, view.ndim)
    np.testing.assert_array_equal(view, value)
    addresses = [b.unsafe_buffer_pointer() for b in buffers]
    assert list(pointers(view).values()) == addresses
    assert [part.unsafe_buffer_pointer() for part in disassemble(group, view)] == addresses


@pytest.mark.parametrize("replicated", [False, True])
def test_views_of_a_kind_are_equal_whether_jax_checked_them_or_not(pool, replicated):
    group = pool.group(4, 4)
    for dtype, columns in ((jnp.float32, 3), (jnp.bfloat16, 3), (jnp.float32, 5)):
        buffers = [jnp.full((2, columns), 1, dtype, device=device) for device in group.devices]
        checked, made = (assemble(group, buffers, replicated=replicated) for _ in range(2))
        assert made.aval == checked.aval
        assert made.sharding == checked.sharding
        assert made.committed == checked.committed
        run = jax.jit(lambda x: x * 2, out_shardings=made.sharding).lower(checked).compile()
        np.testing.assert_array_equal(run(made), run(checked))


def test_one_buffer_can_stand_in_views_of_several_groups(pool):
    """Changing the degree and back copies nothing: the buffers stay the same."""
    buffers = [jnp.full((2, 3), index, jnp.float32, device=device) for index, device in enumerate(pool.devices[:4])]
    merged = assemble(pool.group(0, 4), buffers)
    singles = [assemble(pool.group(index, 1), [buffer]) for index, buffer in enumerate(buffers)]
    addresses = [buffer.unsafe_buffer_pointer() for buffer in buffers]
    assert list(pointers(merged).values()) == addresses
    assert [single.unsafe_buffer_pointer() for single in singles] == addresses
