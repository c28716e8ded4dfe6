"""What a loader sees of weights on disk: names, shapes, arrays, and a way to give the memory back."""

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from amoeba_jax.errors import CheckpointError
from sharding.params import ParamSpec

FillShards = Callable[[ParamSpec, list[np.ndarray]], None]
"""Fills all shards of a parameter."""


@runtime_checkable
class Checkpoint(Protocol):
    """Weights of one model under their Hugging Face names, in the Hugging Face orientation `[out, in]`."""

    config: dict[str, Any]
    """The content of the model's `config.json`."""

    directory: Path | None
    """Where the tokenizer files lie, or None where the source has none."""

    def names(self) -> frozenset[str]:
        """Names of all tensors, such as `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`, without reading it. Raises `CheckpointError` if there is none."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` in the file's own dtype (bf16 as `ml_dtypes.bfloat16`); quantised ones as float32.

        The array may be a read-only view of the mapped file: copy it to change it. Several threads may read at once.
        Raises `CheckpointError` if there is no such tensor, or its file is shorter than when it was opened.
        """
        ...

    def release(self, name: str | None = None) -> None:
        """Give back the memory of tensor `name`, or of all that was read; arrays and further reads keep working."""
        ...

    def close(self) -> None:
        """Let go of the files. Arrays that were read stay valid; reading more raises `CheckpointError`."""
        ...


class MappedFile:
    """A file mapped read-only, whose pages can be dropped while views of them are still held.

    Loading copies each tensor to a device once, so its pages in the page cache are worthless to this process
    afterwards, yet they count as its resident memory until they are dropped.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Tensor `name`, the `shape` array of `dtype` at byte `offset`: a read-only view, or a copy if unaligned."""
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed: open the checkpoint again to read more of it")
        count = math.prod(shape)
        end, size = offset + count * dtype.itemsize, self._map.size()
        if end > size:  # reading beyond the end of a mapped file kills the process
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {end}, the file at {size}: download it again"
            )
        array = np.frombuffer(self._map, dtype, count, offset).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def release(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """Drop the resident pages, or those of some bytes. Views stay valid: a later access reads the file again."""
        if self._map is not None:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            end = len(self._map) if num_bytes is None else offset + num_bytes
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Forget the mapping; it goes away with the last view of it."""
        self._map = None
