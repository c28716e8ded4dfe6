"""View of a checkpoint with renamed or split tensors."""

from pathlib import Path
from typing import Any

import numpy as np

from amoeba_jax.checkpoint.base import Checkpoint
from amoeba_jax.models.families.fields import Split


class SplitCheckpoint:
    """View of a checkpoint. The view renames stored tensors, or splits a stored tensor into several tensors.

    Args:
        stored: checkpoint to read. Closing the view closes this checkpoint.
        split: function `(name, array)` that splits or renames a stored tensor. Returns the arrays as a dict by name in
            the view. Returns None if the stored tensor keeps its name and is not split.
    """

    def __init__(self, stored: Checkpoint, split: Split):
        self.config: dict[str, Any] = stored.config
        self.directory: Path | None = stored.directory
        self._stored, self._split = stored, split
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in stored.names():
            shape = stored.shape(name)
            parts = split(name, np.broadcast_to(np.zeros((), np.int8), shape))
            shapes = {name: shape} if parts is None else {part: it.shape for part, it in parts.items()}
            self._places |= {part: (name, shape) for part, shape in shapes.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][1] if name in self._places else self._stored.shape(name)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor. A part of a stored tensor is returned without a copy."""
        if name not in self._places:
            return self._stored.read(name)  # raises
        stored = self._places[name][0]
        tensor = self._stored.read(stored)
        parts = self._split(stored, tensor)
        return tensor if parts is None else parts[name]

    def release(self, name: str | None = None) -> None:
        """Free the host memory of the stored tensor that contains `name`, or of all tensors if `name` is None."""
        self._stored.release(None if name is None else self._places[name][0])

    def close(self) -> None:
        """Close the checkpoint that this view reads."""
        self._stored.close()
