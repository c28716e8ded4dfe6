"""Chunks of a parameter in new memory, to compare others with."""

import numpy as np

from sharding.params import ParamSpec, ReadTensor


def build_chunks(spec: ParamSpec, read: ReadTensor, dtype: np.dtype) -> list[np.ndarray]:
    """Chunks in `stored_shape`, from checkpoint tensors returned by `read(name)`."""
    chunks = [np.empty(spec.stored_shape, dtype) for _ in range(spec.num_chunks)]
    spec.fill_chunks(read, chunks)
    return chunks
