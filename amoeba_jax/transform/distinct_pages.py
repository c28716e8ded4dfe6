"""The pages of sequences that share some, each once, and which instance gets which sequences."""

from dataclasses import dataclass

import numpy as np

from amoeba_jax.instances.sequence import Sequence
from kvcache.assignment import assign_down
from kvcache.pages import SequencePages
from kvcache.relayout import staying_pieces


@dataclass(frozen=True)
class DistinctPages:
    """The pages of an instance's sequences, each once.

    Attributes:
        table: `[tp, pages]` local ids.
        references: of each, by sequences.
    """

    table: np.ndarray
    references: np.ndarray

    def columns(self, pages: SequencePages) -> np.ndarray:
        """Where a sequence's pages are in `table`."""
        return np.searchsorted(self.table[0], pages.table[0])


def distinct_pages(sequences: list[Sequence], tp: int) -> DistinctPages:
    """Those of sequences on one instance of degree `tp`."""
    tables = [s.pages.table for s in sequences if s.pages is not None]
    if not tables:
        return DistinctPages(np.zeros((tp, 0), np.int32), np.zeros(0, np.int64))
    table = np.concatenate(tables, axis=1)
    # By their ids on rank 0, which tell pages apart.
    _, first, counts = np.unique(table[0], return_index=True, return_counts=True)
    return DistinctPages(table[:, first], counts)


def deal(sequences: list[Sequence], room: list[int], limit: int) -> list[list[Sequence]]:
    """The sequences of each of the instances to come, by their room in pages, and at most that many.

    Raises `OutOfPagesError`.
    """
    parts: list[list[Sequence]] = [[] for _ in room]
    if sequences:
        tables = [s.pages.table for s in sequences if s.pages is not None]
        staying = [staying_pieces(table, len(room)) for table in tables]
        indices = assign_down([table[0] for table in tables], room, together=False, staying=staying, limit=limit)
        for sequence, index in zip(sequences, indices, strict=True):
            parts[index].append(sequence)
    return parts
