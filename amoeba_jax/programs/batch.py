"""Inputs of a step, packed into two integer arrays."""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax import lax
from jaxtyping import Int32


@dataclass(frozen=True)
class BatchShape:
    """Shape of a step for which programs are compiled. Steps with fewer sequences or tokens are padded to this shape.

    Attributes:
        groups: one tuple `(B, T)` for each query group, which has B sequences with T tokens each. The groups of a
            decode step are `((B, 1),)`.
        table_width: number of entries of a block table. This is the maximum number of pages of a sequence.
    """

    groups: tuple[tuple[int, int], ...]
    table_width: int

    @property
    def num_tokens(self) -> int:
        return sum(batch * length for batch, length in self.groups)

    @property
    def num_rows(self) -> int:
        """Number of rows (sequences) of the step, with padding."""
        return sum(batch for batch, _ in self.groups)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Place of each field in one rank's line of `StepBatch.packed`, as `{name: (offset, shape)}`."""
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
        """Place of each field in one rank's line of `StepBatch.rows`, as `{name: (offset, shape)}`."""
        return row_fields(self.num_rows)

    @cached_property
    def packed_size(self) -> int:
        offset, shape = list(self.fields.values())[-1]
        return offset + math.prod(shape)

    def __str__(self) -> str:
        return "+".join(f"{batch}x{length}" for batch, length in self.groups)


def row_fields(num_rows: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the place of each field in one rank's line of `StepBatch.rows`, as `{name: (offset, shape)}`.

    The program of the head reads these fields.
    """
    return _side_by_side({"last_token": (num_rows,), "slots": (num_rows,)})


def _side_by_side(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    offsets, total = {}, 0
    for name, shape in shapes.items():
        offsets[name] = (total, shape)
        total += math.prod(shape)
    return offsets


class StepBatch:
    """Inputs of a step on the host: the array `packed` for the layers and the array `rows` for the head.

    Both int32 arrays have one line for each rank. In a line, fields lie side by side. All fields except `tables` are
    equal on all ranks. `set` and `set_table` write fields. `unpack` reads fields inside a program. N is the number of
    tokens of the step, R the number of rows (sequences), and W the width of a block table in pages.

    Fields in `packed`, `[tp, packed_size]`:
        tokens: `[N]` token ids. Not used for tokens with a slot in `sources`.
        sources: `[N]` slot from which the device reads the token id, if the host does not know the id yet. -1: the id
            is in `tokens`.
        positions: `[N]` position of the token in its sequence. -1: the token is padding.
        tables: `[R, W]` page ids of each sequence on this rank, in the order of its tokens.
        num_pages: `[R]` number of valid entries in the table of each row.

    Fields in `rows`, `[tp, 2 R]`:
        last_token: `[R]` index of the last token of each row, among the N tokens. The head computes the logits of these
            tokens.
        slots: `[R]` slot that stores the next token of each row. -1: the row is padding, or a chunk that is not the
            last chunk of its prompt.
    """

    def __init__(self, shape: BatchShape, tp: int):
        self.shape = shape
        self.packed: Int32[np.ndarray, "tp size"] = np.zeros((tp, shape.packed_size), np.int32)
        self.rows: Int32[np.ndarray, "tp rows"] = np.zeros((tp, 2 * shape.num_rows), np.int32)
        self.set("positions", np.full(shape.num_tokens, -1))
        self.set("sources", np.full(shape.num_tokens, -1))
        self.set("slots", np.full(shape.num_rows, -1))

    def set(self, name: str, values: np.ndarray) -> None:
        """Write the field `name`, with the same values on every rank."""
        array, fields = (self.packed, self.shape.fields)
        if name in self.shape.row_fields:
            array, fields = (self.rows, self.shape.row_fields)
        offset, shape = fields[name]
        array[:, offset : offset + math.prod(shape)] = np.asarray(values, np.int32).reshape(-1)

    def set_table(self, row: int, table: Int32[np.ndarray, "tp pages"]) -> None:
        """Write the block table of one sequence, on every rank. Raises `ValueError` if the table has too many pages."""
        offset, (_, width) = self.shape.fields["tables"]
        if table.shape[1] > width:
            raise ValueError(f"a block table of {table.shape[1]} pages exceeds the {width} pages of step {self.shape}")
        start = offset + row * width
        self.packed[:, start : start + table.shape[1]] = table


def unpack(packed: Int32[jax.Array, " size"], fields: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, jax.Array]:
    """Return the fields of a packed array, by name. Call this inside a program.

    Args:
        packed: one rank's line of `StepBatch.packed` or `StepBatch.rows`.
        fields: place of each field in the line, as `{name: (offset, shape)}`.
    """
    return {
        name: lax.slice(packed, (offset,), (offset + math.prod(shape),)).reshape(shape)
        for name, (offset, shape) in fields.items()
    }
