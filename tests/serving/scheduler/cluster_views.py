"""Snapshots of eight devices. Instances hold 12,000 tokens at TP1, 32,000 at TP2 and 80,000 at TP4."""

from typing import Any

from serving.scheduler import ClusterView, DegreeLimits, InstanceView, RunningRequest, WaitingRequest

DEGREES = (DegreeLimits(1, 12_000, 32), DegreeLimits(2, 32_000, 64), DegreeLimits(4, 80_000, 128))
CAPACITY = {limits.degree: limits.capacity_tokens for limits in DEGREES}
SHORT, TP2_LONG, TP4_LONG = 1_200, 20_000, 50_000
"""Maximum tokens of requests that need TP1, TP2 and TP4."""


def waiting(name: str, total: int = SHORT, **fields) -> WaitingRequest:
    """Return a waiting request of at most `total` tokens, including 100 output tokens."""
    return WaitingRequest(name, total - 100, total, **fields)


def running(name: str, total: int = SHORT, **fields) -> RunningRequest:
    """Return a running request with a computed prompt and no output yet."""
    return RunningRequest(name, total - 100, total, **fields)


def instance(first: int, degree: int = 1, *requests: RunningRequest, **fields) -> InstanceView:
    """Return an instance whose first device is `first`, with pages for its requests."""
    used = sum(-(-r.num_tokens // 16) * 16 for r in requests)
    values: dict[str, Any] = {
        "capacity_tokens": CAPACITY[degree],
        "free_tokens": CAPACITY[degree] - used,
        "free_slots": 32 * degree - len(requests),
    }
    return InstanceView(first, tuple(range(first, first + degree)), running=requests, **(values | fields))


def cluster(*instances: InstanceView, queue=(), now_s: float = 0.0, **fields) -> ClusterView:
    """Return a snapshot. Devices without a given instance have empty TP1 instances."""
    num_devices = fields.pop("num_devices", 8)
    covered = {device for i in instances for device in i.devices}
    rest = [instance(device) for device in range(num_devices) if device not in covered]
    ordered = tuple(sorted([*instances, *rest], key=lambda i: i.id))
    degrees = tuple(limits for limits in DEGREES if limits.degree <= num_devices)
    return ClusterView(now_s, ordered, tuple(queue), degrees, num_devices, **fields)


def filled(first: int, share: float, degree: int = 1) -> InstanceView:
    """Return an instance whose short requests use a share of its cache."""
    count = int(share * CAPACITY[degree] / SHORT)
    return instance(first, degree, *(running(f"filler-{first}-{n}") for n in range(count)))
