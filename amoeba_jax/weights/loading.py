"""Loading of weights. While a parameter is copied to devices, threads read the next parameters."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import jax
import numpy as np

from amoeba_jax.checkpoint.base import FillShards
from sharding.params import ParamSpec

_ALIGNMENT = 64
"""Alignment in bytes. JAX uses host memory with this alignment without a copy."""

_MAX_THREADS = 8
_MAX_STAGING_BYTES = 4 << 30


@dataclass(frozen=True)
class WeightReader:
    """Source of weights that is ready to be read.

    Attributes:
        fill: function that writes all shards of a parameter into host memory, in their stored shapes. Several threads
            call it at once.
        threads: number of reading threads. 1: the caller's thread reads, and nothing is read ahead.
    """

    fill: FillShards
    threads: int


Parameters = Generator[tuple[ParamSpec, list[np.ndarray]], None, None]
OpenWeights = Callable[[], AbstractContextManager[WeightReader]]


def default_threads() -> int:
    """Return the number of usable cores, but at most 8.

    With more threads, memory bandwidth would limit the copies.
    """
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MAX_THREADS)


def read_ahead(specs: Sequence[ParamSpec], reader: WeightReader, dtype: np.dtype, slot_bytes: int) -> Parameters:
    """Yield each parameter with all its shards, in the order of `specs`, while threads read the next parameters.

    The shards are valid until the next parameter is requested. Then their memory is reused.

    There are `reader.threads + 1` buffers of `slot_bytes` bytes. If all buffers together would exceed 4 GiB, there are
    fewer buffers and threads, but at least 2 buffers. A parameter that needs more than `slot_bytes` gets memory of its
    own.

    Errors of `reader.fill` are raised here. If you leave the iterator early, close it, so that it waits for its
    threads.
    """
    num_slots = min(reader.threads + 1, max(2, _MAX_STAGING_BYTES // slot_bytes))
    slots = deque(np.empty(slot_bytes, np.uint8) for _ in range(num_slots))

    def fill(spec: ParamSpec, memory: np.ndarray) -> list[np.ndarray]:
        shards = staging_shards(spec, dtype, memory)
        reader.fill(spec, shards)
        return shards

    def take(spec: ParamSpec) -> np.ndarray:
        needed = staging_bytes(spec, dtype)
        return slots.popleft() if needed <= slot_bytes else np.empty(needed, np.uint8)

    def give_back(memory: np.ndarray) -> None:
        if memory.nbytes == slot_bytes:
            slots.append(memory)

    if reader.threads == 1:
        for spec in specs:
            memory = take(spec)
            yield spec, fill(spec, memory)
            give_back(memory)
            del memory
        return
    with ThreadPoolExecutor(num_slots - 1, "read-weights") as pool:
        pending: deque[tuple[ParamSpec, np.ndarray, Future[list[np.ndarray]]]] = deque()

        def submit(spec: ParamSpec) -> None:
            memory = take(spec)
            pending.append((spec, memory, pool.submit(fill, spec, memory)))

        upcoming = iter(specs)
        try:
            for spec in islice(upcoming, num_slots):
                submit(spec)
            while pending:
                spec, memory, shards = pending.popleft()
                yield spec, shards.result()
                give_back(memory)
                del memory, shards  # frees a large parameter before the next one is allocated
                for spec in islice(upcoming, 1):
                    submit(spec)
        finally:
            pool.shutdown(cancel_futures=True)


def staging_bytes(spec: ParamSpec, dtype: np.dtype) -> int:
    """Return the bytes of host memory that `staging_shards` needs for a parameter."""
    return spec.num_shards * _stride(spec, dtype) + 2 * _ALIGNMENT


def staging_shards(spec: ParamSpec, dtype: np.dtype, memory: np.ndarray) -> list[np.ndarray]:
    """Return arrays for the shards of a parameter, in their stored shapes. They are views of `memory` (bytes).

    The arrays are misaligned, so that `device_put` makes copies, and `memory` can be used again. On CPU, JAX 0.10 to
    0.12 would use aligned memory without a copy, even with `may_alias=False`.
    """
    size, first = spec.num_elements // spec.num_shards * dtype.itemsize, _misaligned(memory, dtype)
    starts = [first + index * _stride(spec, dtype) for index in range(spec.num_shards)]
    return [memory[start : start + size].view(dtype).reshape(spec.stored_shape) for start in starts]


def _misaligned(memory: np.ndarray, dtype: np.dtype) -> int:
    """Return an offset in `memory`, in bytes, whose address is one element after an aligned address."""
    return -memory.ctypes.data % _ALIGNMENT + dtype.itemsize


def _stride(spec: ParamSpec, dtype: np.dtype) -> int:
    size = spec.num_elements // spec.num_shards * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def put(shards: Sequence[np.ndarray], devices: Sequence[Sequence[jax.Device]]) -> list[list[jax.Array]]:
    """Copy shard `i` to all devices in `devices[i]`, and wait. `result[i][j]` is the copy on `devices[i][j]`.

    The shards must come from `staging_shards`. Their memory may be used again after the call.
    """
    return jax.block_until_ready(
        [[jax.device_put(shard, device) for device in its] for shard, its in zip(shards, devices, strict=True)]
    )
