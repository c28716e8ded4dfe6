"""Shards of a parameter in new memory, for comparisons."""

import numpy as np

from sharding.params import ParamSpec, ReadTensor


def build_shards(spec: ParamSpec, read: ReadTensor, dtype: np.dtype) -> list[np.ndarray]:
    """Return shards in `stored_shape`, from checkpoint tensors returned by `read(name)`."""
    shards = [np.empty(spec.stored_shape, dtype) for _ in range(spec.num_shards)]
    spec.fill_shards(read, shards)
    return shards
