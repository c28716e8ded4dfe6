"""What lies in device memory, counted from live arrays."""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import jax


def live_bytes() -> dict[int, int]:
    """Bytes of all live buffers of each device, each counted once however many arrays view it."""
    gc.collect()
    seen: dict[tuple[int, int], int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            seen[(shard.device.id, shard.data.unsafe_buffer_pointer())] = shard.data.nbytes
    totals: dict[int, int] = defaultdict(int)
    for (device, _), size in seen.items():
        totals[device] += size
    return dict(totals)


def settled_live_bytes() -> dict[int, int]:
    """`live_bytes`, once threads have let go of the results that they have read: the same twice."""
    earlier, now = None, live_bytes()
    while now != earlier:
        time.sleep(0.05)
        earlier, now = now, live_bytes()
    return now


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Meanwhile garbage collection leaves out what there is now: counting takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def total_live_bytes() -> int:
    """Bytes in use on all devices."""
    return sum(live_bytes().values())
