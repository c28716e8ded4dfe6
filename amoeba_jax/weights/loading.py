"""Load weights from files to devices: read by several threads, ahead of the devices by a bounded amount."""

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
"""JAX adopts host memory that is aligned to that many bytes."""

_MAX_THREADS = 8


@dataclass(frozen=True)
class WeightReader:
    """Weights that are open for reading.

    Attributes:
        fill: writes every element of a parameter's shards, each in its stored shape, into host memory. It is called
            from several threads at once, and keeps nothing of what it read.
        threads: how many threads call it. With one, that is the caller's, and nothing is read ahead.
    """

    fill: FillShards
    threads: int


Parameters = Generator[tuple[ParamSpec, list[np.ndarray]], None, None]
OpenWeights = Callable[[], AbstractContextManager[WeightReader]]


def default_threads() -> int:
    """One for each core that this process may use, and at most 8: copying is bound by memory, not by cores."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MAX_THREADS)


def read_ahead(specs: Sequence[ParamSpec], reader: WeightReader, dtype: np.dtype, slot_bytes: int) -> Parameters:
    """Yield each parameter and its shards, in the order given, while threads read those that follow.

    The shards are host memory that `device_put` copies from (see `staging_shards`) and that is written to again once
    the next parameter is asked for. There are `reader.threads + 1` pieces of it, of `slot_bytes` each; a parameter
    that is larger has memory of its own, as long as it needs it.

    What `reader.fill` raises is raised here. Close the iterator if you leave it early: it waits for its threads.
    """
    slots = deque(np.empty(slot_bytes, np.uint8) for _ in range(reader.threads + 1))

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
    with ThreadPoolExecutor(reader.threads, "read-weights") as pool:
        pending: deque[tuple[ParamSpec, np.ndarray, Future[list[np.ndarray]]]] = deque()

        def submit(spec: ParamSpec) -> None:
            memory = take(spec)
            pending.append((spec, memory, pool.submit(fill, spec, memory)))

        upcoming = iter(specs)
        try:
            for spec in islice(upcoming, reader.threads + 1):
                submit(spec)
            while pending:
                spec, memory, shards = pending.popleft()
                yield spec, shards.result()
                give_back(memory)
                del memory, shards  # those of a large parameter, before the next one's are made
                for spec in islice(upcoming, 1):
                    submit(spec)
        finally:
            pool.shutdown(cancel_futures=True)


def staging_bytes(spec: ParamSpec, dtype: np.dtype) -> int:
    """Bytes of host memory that `staging_shards` needs."""
    return spec.num_shards * _stride(spec, dtype) + 2 * _ALIGNMENT


def staging_shards(spec: ParamSpec, dtype: np.dtype, memory: np.ndarray) -> list[np.ndarray]:
    """A parameter's shards in their stored shape, as views of `memory` (bytes) that are aligned for no device.

    On CPU `device_put` adopts the memory of a NumPy array that happens to be aligned, `may_alias=False` or not (JAX
    0.10 to 0.12): such memory could not be used again, and donating such a buffer copies it. Misaligned memory is
    always copied, and only once, where `jnp.array(copy=True)` may copy twice.
    """
    size, first = spec.num_elements // spec.num_shards * dtype.itemsize, _misaligned(memory, dtype)
    starts = [first + index * _stride(spec, dtype) for index in range(spec.num_shards)]
    return [memory[start : start + size].view(dtype).reshape(spec.stored_shape) for start in starts]


def _misaligned(memory: np.ndarray, dtype: np.dtype) -> int:
    """The byte of `memory` that is one element past an alignment."""
    return -memory.ctypes.data % _ALIGNMENT + dtype.itemsize


def _stride(spec: ParamSpec, dtype: np.dtype) -> int:
    size = spec.num_elements // spec.num_shards * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def put(shards: Sequence[np.ndarray], devices: Sequence[Sequence[jax.Device]]) -> list[list[jax.Array]]:
    """A buffer of its own for each shard on each of its devices. Waits until all are written.

    The shards are as `staging_shards` makes them, and may be written to afterwards.
    """
    return jax.block_until_ready(
        [[jax.device_put(shard, device) for device in its] for shard, its in zip(shards, devices, strict=True)]
    )
