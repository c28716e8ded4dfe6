"""MXFP4 weights, expanded to bfloat16 when they are read.

MXFP4 stores blocks of 32 numbers. Each number has 4 bits, and all numbers of a block share a power of two.
"""

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from amoeba_jax.checkpoint.safetensors_file import SafetensorsCheckpoint
from amoeba_jax.errors import CheckpointError

BLOCKS, SCALES, ROWS = "_blocks", "_scales", "_rows"
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
"""`[256, 2]`: the two numbers of each byte."""


class Mxfp4Checkpoint:
    """View of a checkpoint. The view has MXFP4 weights as bfloat16. The conversion is exact.

    For a projection X, the stored tensors `experts.X_blocks [E, out, in / 32, 16]` and
    `experts.X_scales [E, out, in / 32]` hold all `E` experts. The view has one tensor for each expert instead, such as
    `experts.0.X_rows [out, in]` for expert 0.
    """

    def __init__(self, stored: SafetensorsCheckpoint):
        self.config: dict[str, Any] = stored.config
        self.directory: Path | None = stored.directory
        self._stored = stored
        self._last = threading.local()  # a fused tensor is read twice in a row: for gate and for up
        self._places: dict[str, tuple[str, int]] = {}
        self._plain = {name for name in stored.names() if not name.endswith((BLOCKS, SCALES))}
        for name in stored.names() - self._plain:
            if not name.endswith(BLOCKS):
                continue
            prefix, kind = name.removesuffix(BLOCKS).rsplit(".", 1)
            blocks, scales = stored.shape(name), stored.shape(name.removesuffix(BLOCKS) + SCALES)
            if len(blocks) != 4 or blocks[3] != 16 or scales != blocks[:3]:
                raise CheckpointError(f"tensor {name} has shape {blocks} and scales {scales}: they are not MXFP4")
            self._places |= {f"{prefix}.{expert}.{kind}{ROWS}": (name, expert) for expert in range(blocks[0])}

    def names(self) -> frozenset[str]:
        return frozenset(self._plain | self._places.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._places:
            return self._stored.shape(name)
        _, out, blocks, _ = self._stored.shape(self._places[name][0])
        return out, blocks * 32

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: the expanded weights of one expert, or any other tensor as it is stored."""
        if name not in self._places:
            return self._stored.read(name)
        if getattr(self._last, "name", None) == name:
            return self._last.tensor
        stored, expert = self._places[name]
        blocks = self._stored.read_bytes(stored)[expert]
        scales = self._stored.read_bytes(stored.removesuffix(BLOCKS) + SCALES)[expert]
        self._last.name, self._last.tensor = name, expand(blocks, scales).reshape(self.shape(name))
        return self._last.tensor

    def release(self, name: str | None = None) -> None:
        vars(self._last).clear()
        if name not in self._places:
            self._stored.release(name)
            return
        blocks = self._places[name][0]
        for stored in (blocks, blocks.removesuffix(BLOCKS) + SCALES):
            self._stored.release(stored)

    def close(self) -> None:
        """Close the checkpoint that this view reads."""
        self._stored.close()


def expand(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weights that MXFP4 blocks encode, as bfloat16 `[..., 32]`.

    A block has 32 numbers of 4 bits, and one scale. A weight is a number of the block times `2 ** (scale - 127)`.

    Args:
        blocks: uint8 `[..., 16]`. Each byte has two numbers. The first number is in the lower 4 bits.
        scales: uint8 `[...]`, one scale for each block.
    """
    values = _PAIRS[blocks].reshape(*blocks.shape[:-1], 32)
    return np.ldexp(values, scales.astype(np.int32)[..., None] - 127, out=values).astype(ml_dtypes.bfloat16)
