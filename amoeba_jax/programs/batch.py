"""Inputs of one step, packed into two integer arrays for each rank."""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax import lax
from jaxtyping import Int32


@dataclass(frozen=True)
class BatchShape:
    """Static shape of a step. A step with fewer sequences or tokens is padded to it.

    Attributes:
        groups: `(B, T)` for each query group: B sequences of T tokens each. A decode step is `((B, 1),)`.
        table_width: entries of a block table: pages that a sequence can have.
    """

    groups: tuple[tuple[int, int], ...]
    table_width: int

    @property
    def num_tokens(self) -> int:
        return sum(batch * length for batch, length in self.groups)

    @property
    def num_rows(self) -> int:
        """Number of sequences of the step."""
        return sum(batch for batch, _ in self.groups)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape of every field in a rank's `StepBatch.packed`."""
        rows, tokens = (self.num_rows,), (self.num_tokens,)
        shapes = {
            "tokens": tokens,
            "sources": tokens,
            "positions": tokens,
            "tables": (self.num_rows, self.table_width),
            "num_pages": rows,
        }
        return _side_by_side(shapes)

    @cached_property
    def row_fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape of every field in a rank's `StepBatch.rows`."""
        return row_fields(self.num_rows)

    @cached_property
    def packed_size(self) -> int:
        offset, shape = list(self.fields.values())[-1]
        return offset + math.prod(shape)

    def __str__(self) -> str:
        return "+".join(f"{batch}x{length}" for batch, length in self.groups)


def row_fields(num_rows: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return offset and shape of the fields that the head takes. They depend only on the number of sequences."""
    return _side_by_side({"last_token": (num_rows,), "slots": (num_rows,)})


def _side_by_side(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    offsets, total = {}, 0
    for name, shape in shapes.items():
        offsets[name] = (total, shape)
        total += math.prod(shape)
    return offsets


class StepBatch:
    """Inputs of a step on the host.

    The layers take `packed`, `[tp, packed_size]`, and the head takes `rows`, `[tp, 2 R]`. The fields below are views
    into these arrays. All fields except `tables` are the same on every rank.

    Fields, with N tokens, R rows (sequences) and W pages in a table:
        tokens: `[N]` token ids that the host knows.
        sources: `[N]` slot of the sampled token to use instead of `tokens`, if the host has not read it yet; else -1.
        positions: `[N]` position in the sequence; -1 for padding.
        tables: `[tp, R, W]` local page ids, in logical order.
        num_pages: `[R]` number of valid entries in each table.
        last_token: `[R]` index of each row's last token, for which the head computes logits.
        slots: `[R]` slot that stores the row's next token; -1 if the row ends before its prompt does.
    """

    def __init__(self, shape: BatchShape, tp: int):
        self.shape = shape
        self.packed: Int32[np.ndarray, "tp size"] = np.zeros((tp, shape.packed_size), np.int32)
        self.rows: Int32[np.ndarray, "tp rows"] = np.zeros((tp, 2 * shape.num_rows), np.int32)
        self.set("positions", np.full(shape.num_tokens, -1))
        self.set("sources", np.full(shape.num_tokens, -1))
        self.set("slots", np.full(shape.num_rows, -1))

    def set(self, name: str, values: np.ndarray) -> None:
        """Fill a field with the same values on every rank."""
        array, fields = (self.packed, self.shape.fields)
        if name in self.shape.row_fields:
            array, fields = (self.rows, self.shape.row_fields)
        offset, shape = fields[name]
        array[:, offset : offset + math.prod(shape)] = np.asarray(values, np.int32).reshape(-1)

    def set_table(self, row: int, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Fill the block table of one row on every rank."""
        offset, (_, width) = self.shape.fields["tables"]
        if table.shape[1] > width:
            raise ValueError(f"a block table of {table.shape[1]} pages exceeds the {width} pages of step {self.shape}")
        start = offset + row * width
        self.packed[:, start : start + table.shape[1]] = table


def unpack(packed: Int32[jax.Array, " size"], fields: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, jax.Array]:
    """Return the fields of one rank's row of `StepBatch.packed` or `StepBatch.rows`, inside a program."""
    return {
        name: lax.slice(packed, (offset,), (offset + math.prod(shape),)).reshape(shape)
        for name, (offset, shape) in fields.items()
    }
