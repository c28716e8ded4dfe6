"""Checkpoints that store tensors under other names, or several tensors of the model together."""

from pathlib import Path
from typing import Any

import numpy as np

from amoeba_jax.checkpoint.base import Checkpoint
from amoeba_jax.models.families.fields import Split


class SplitCheckpoint:
    """View of a `Checkpoint` that has the tensors of the model under their names.

    Args:
        stored: checkpoint with the stored tensors. `close` closes it.
        split: function that names the tensors within a stored tensor.
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
        """Return the names of all tensors."""
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._places[name][1] if name in self._places else self._stored.shape(name)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: a part of a stored tensor, without a copy."""
        if name not in self._places:
            return self._stored.read(name)  # raises
        stored = self._places[name][0]
        tensor = self._stored.read(stored)
        parts = self._split(stored, tensor)
        return tensor if parts is None else parts[name]

    def release(self, name: str | None = None) -> None:
        """Free the memory of the stored tensor that has a tensor (None: of all tensors)."""
        self._stored.release(None if name is None else self._places[name][0])

    def close(self) -> None:
        """Close the stored checkpoint."""
        self._stored.close()
