"""Snapshots with placements. Devices have 100 GB, and the model has 20 layers with 40 GB of weights.

A layer has 2 GB of weights, and 0.1 MB of KV cache for a token. An instance holds 30,000 tokens in 60 GB.
"""

from collections.abc import Mapping
from typing import Any

from serving.scheduler import (
    ClusterView,
    DegreeLimits,
    DeviceView,
    InstanceView,
    LayerSizes,
    PlacementView,
    RunningRequest,
)

LAYERS, CAPACITY = 20, 30_000
SIZES = LayerSizes(LAYERS, 0.5e9, 1.5e9, 1e5, other_bytes=1e9, transition_cost=0.3)
DEGREES = (DegreeLimits(1, CAPACITY, 32), DegreeLimits(2, 3 * CAPACITY, 64), DegreeLimits(4, 7 * CAPACITY, 128))


def requests(count: int, tokens: int = 1000, **fields: Any) -> tuple[RunningRequest, ...]:
    """Return running requests that arrived one second apart."""
    return tuple(RunningRequest(f"r{n}", tokens, tokens + 500, arrival_s=float(n), **fields) for n in range(count))


def placed(homes: Mapping[range, tuple[int, ...]], own: int) -> PlacementView:
    """Return a placement with homes of ranges of layers. The other layers are on device `own`."""
    layers = tuple(next((home for span, home in homes.items() if i in span), (own,)) for i in range(LAYERS))
    return PlacementView(layers, layers)


def instance(device: int, count: int = 0, tokens: int = 1000, homes=None, **fields: Any) -> InstanceView:
    """Return a TP1 instance with `count` running requests."""
    values: dict[str, Any] = {
        "capacity_tokens": CAPACITY,
        "free_tokens": CAPACITY - count * tokens,
        "free_slots": 32 - count,
        "running": requests(count, tokens),
        "placement": None if homes is None else placed(homes, device),
    }
    return InstanceView(device, (device,), **(values | fields))


def cluster(
    *instances: InstanceView,
    num_devices: int = 4,
    free: Mapping[int, float] | None = None,
    busy: Mapping[int, float] | None = None,
    now_s: float = 0.0,
    **fields: Any,
) -> ClusterView:
    """Return a snapshot. `free` overrides the free bytes of devices, and `busy` is their utilization."""
    devices = []
    for device in range(num_devices):
        own = next((i for i in instances if device in i.devices), None)
        memory = 100e9 if own is None else 60e9
        left = memory if own is None else memory * own.free_tokens / own.capacity_tokens
        devices.append(DeviceView(device, memory, (free or {}).get(device, left), (busy or {}).get(device, 0.0)))
    return ClusterView(
        now_s, instances, fields.pop("queue", ()), DEGREES, num_devices, layer=SIZES, devices=tuple(devices), **fields
    )
