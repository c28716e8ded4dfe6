"""`unpack` on the device returns the inputs of a step that the host packed."""

import math
from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from quick_compiling import compiling_quickly

from amoeba_jax.programs.batch import BatchShape, StepBatch, unpack
from sharding.mesh import TP_AXIS, SubMeshPool

SHAPES = (
    BatchShape(((1, 1),), 1),
    BatchShape(((4, 1),), 7),
    BatchShape(((1, 16),), 3),
    BatchShape(((4, 1), (1, 16)), 5),
    BatchShape(((2, 1), (3, 4), (1, 8)), 2),
)
SHAPE_IDS = [f"{shape} width {shape.table_width}" for shape in SHAPES]
# By default, only the smallest and the largest shape run. The largest has groups of all kinds.
SOME_SHAPES = [pytest.param(shape, marks=[pytest.mark.slow] * (shape in SHAPES[1:-1])) for shape in SHAPES]


def filled(shape: BatchShape, tp: int, seed: int) -> tuple[StepBatch, dict[str, np.ndarray], np.ndarray]:
    """Return a batch with every field set, the values of the fields, and the tables `[tp, R, W]`."""
    random = np.random.default_rng(seed)
    fields = {
        name: random.integers(-(2**31), 2**31, size, np.int32)
        for name, (_, size) in (shape.fields | shape.row_fields).items()
        if name != "tables"
    }
    tables = random.integers(0, 2**31 - 1, (tp, shape.num_rows, shape.table_width), np.int32)
    batch = StepBatch(shape, tp)
    for name in reversed(fields):
        batch.set(name, fields[name])
    for row in reversed(range(shape.num_rows)):
        batch.set_table(row, tables[:, row])
    return batch, fields, tables


@cache
def unpacker(shape: BatchShape) -> Callable[[np.ndarray, np.ndarray], dict[str, jax.Array]]:
    """Return a program that unpacks all fields. Otherwise JAX would compile each operation separately."""
    return jax.jit(lambda packed, rows: unpack(packed, shape.fields) | unpack(rows, shape.row_fields))


def unpacked(batch: StepBatch, rank: int = 0) -> dict[str, jax.Array]:
    """Return all fields of one rank."""
    with compiling_quickly():
        return unpacker(batch.shape)(batch.packed[rank], batch.rows[rank])


@pytest.mark.first_by_default
@pytest.mark.parametrize("shape", SOME_SHAPES, ids=SHAPE_IDS)
def test_every_field_comes_out_on_every_rank_as_it_went_in(shape):
    tp = 4
    group = SubMeshPool(tuple(jax.devices()[:4]), 4).group(0, tp)
    batch, fields, tables = filled(shape, tp, seed=len(shape.groups))

    def ranks(packed: jax.Array, rows: jax.Array) -> dict[str, jax.Array]:
        found = unpack(packed[0], shape.fields) | unpack(rows[0], shape.row_fields)
        return {name: value[None] for name, value in found.items()}

    program = jax.jit(jax.shard_map(ranks, mesh=group.mesh, in_specs=P(TP_AXIS), out_specs=P(TP_AXIS)))
    with compiling_quickly():
        out = program(*jax.device_put((batch.packed, batch.rows), group.sharded))
    assert set(out) == {*fields, "tables"}
    for rank in range(tp):
        for name, values in fields.items():
            np.testing.assert_array_equal(out[name][rank], values)
        np.testing.assert_array_equal(out["tables"][rank], tables[rank])


@given(
    groups=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 33)), min_size=1, max_size=4).map(tuple),
    width=st.integers(1, 20),
)
def test_fields_lie_side_by_side_without_gap_or_overlap(groups, width):
    shape = BatchShape(groups, width)
    assert shape.num_tokens == sum(batch * length for batch, length in groups)
    assert shape.num_rows == sum(batch for batch, _ in groups)
    assert StepBatch(shape, 2).packed.shape == (2, shape.packed_size)
    assert StepBatch(shape, 2).rows.shape == (2, 2 * shape.num_rows)
    for fields, total in ((shape.fields, shape.packed_size), (shape.row_fields, 2 * shape.num_rows)):
        owners = np.zeros(total, int)
        for offset, size in fields.values():
            owners[offset : offset + math.prod(size)] += 1
        assert (owners == 1).all()


@pytest.mark.first_by_default
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_setting_one_field_leaves_the_others(shape):
    batch, fields, tables = filled(shape, 2, seed=1)
    batch.set("num_pages", np.arange(shape.num_rows))
    batch.set_table(shape.num_rows - 1, np.zeros((2, shape.table_width), np.int32))
    fields |= {"num_pages": np.arange(shape.num_rows, dtype=np.int32)}
    tables[:, -1] = 0
    for rank in range(2):
        out = unpacked(batch, rank)
        for name, values in fields.items():
            np.testing.assert_array_equal(out[name], values)
        np.testing.assert_array_equal(out["tables"], tables[rank])


def test_empty_batch_is_all_padding():
    shape = BatchShape(((4, 1), (1, 16)), 3)
    out = unpacked(StepBatch(shape, 1))
    for name, size in (("positions", 20), ("sources", 20), ("slots", 5)):
        np.testing.assert_array_equal(out[name], np.full(size, -1))
    for name in ("tokens", "last_token", "num_pages", "tables"):
        assert not out[name].any(), name


def test_short_table_fills_the_front_of_its_row():
    shape = BatchShape(((3, 1),), 4)
    batch = StepBatch(shape, 2)
    batch.set_table(1, np.array([[5, 6], [7, 8]], np.int32))
    out = [unpacked(batch, rank)["tables"] for rank in range(2)]
    np.testing.assert_array_equal(out[0], [[0] * 4, [5, 6, 0, 0], [0] * 4])
    np.testing.assert_array_equal(out[1], [[0] * 4, [7, 8, 0, 0], [0] * 4])


def test_batches_of_one_bucket_have_one_key():
    assert BatchShape(((4, 1), (1, 16)), 5) == BatchShape(((4, 1), (1, 16)), 5)
    assert len({BatchShape(((4, 1),), 5), BatchShape(((4, 1),), 5), BatchShape(((4, 1),), 6)}) == 2
    assert str(BatchShape(((4, 1), (1, 16)), 5)) == "4x1+1x16"


def test_table_that_does_not_fit_is_refused():
    batch = StepBatch(BatchShape(((2, 1),), 3), 1)
    with pytest.raises(ValueError, match="4 pages exceeds the 3"):
        batch.set_table(0, np.zeros((1, 4), np.int32))
