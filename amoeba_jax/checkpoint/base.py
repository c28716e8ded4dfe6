"""Interface of checkpoints, and memory-mapped files."""

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from amoeba_jax.errors import CheckpointError
from sharding.params import ParamSpec

FillShards = Callable[[ParamSpec, list[np.ndarray]], None]
"""Function that writes all shards of a parameter into the given arrays, one array of `stored_shape` for each shard."""


@runtime_checkable
class Checkpoint(Protocol):
    """Weights of one model. Tensors have Hugging Face's names, and matrices have the shape `[out, in]`."""

    config: dict[str, Any]
    """Content of the model's `config.json`."""

    directory: Path | None
    """Directory of the tokenizer files, or None."""

    def names(self) -> frozenset[str]:
        """Return the names of all tensors, such as `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it. Raises `CheckpointError` for an unknown name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its stored dtype (bf16 as `ml_dtypes.bfloat16`), or in float32 if it is quantized.

        The array may be a read-only view of the mapped file. Several threads may read at once.

        Raises `CheckpointError` for an unknown name, or if the file was truncated after it was opened.
        """
        ...

    def release(self, name: str | None = None) -> None:
        """Free the host memory of one tensor, or of all tensors if `name` is None.

        Arrays that were returned earlier stay valid, and the tensors can be read again.
        """
        ...

    def close(self) -> None:
        """Close the files. Arrays that were returned earlier stay valid. Further reads raise `CheckpointError`."""
        ...


class MappedFile:
    """Read-only memory map of a file. Its memory can be freed while views of the file exist.

    Each tensor is read once, to copy it to devices. After that, the host no longer needs the tensor, but its bytes
    still count as resident memory of the process. `release` frees this memory.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Return the array of `dtype` and `shape` that starts at byte `offset`.

        The array is a read-only view of the file, or a copy if the bytes are not aligned.

        Raises `CheckpointError` if the file is closed or too short. The message has `name`, the name of the tensor.
        """
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed: open the checkpoint again to read it")
        count = math.prod(shape)
        end, size = offset + count * dtype.itemsize, self._map.size()
        if end > size:  # reading past the end of a mapped file would end the process
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {end}, the file at {size}: download it again"
            )
        array = np.frombuffer(self._map, dtype, count, offset).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def release(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """Free the resident memory of `num_bytes` bytes of the file, starting at byte `offset`.

        If `num_bytes` is None, free the memory up to the end of the file. Views stay valid: an access to a view reads
        the file again.
        """
        if self._map is not None:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            end = len(self._map) if num_bytes is None else offset + num_bytes
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Close the file, so that `view` raises an error. The memory stays mapped until the last view is deleted."""
        self._map = None
