"""Rates and sizes of accelerators. The files in `devices/` have the numbers and their sources."""

import json
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from serving.simulator.errors import SimulationError

_FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class DeviceSpec:
    """Rates and sizes of one accelerator, and of its links within a host.

    Operators reach only a share of a peak rate. The fields `*_efficiency` give these shares.
    """

    name: str
    memory_bytes: float
    flops: float
    """Dense bf16 floating-point operations per second."""
    memory_bandwidth: float
    """Bytes per second of the device's memory."""
    link_bandwidth: float
    """Bytes per second that a device can send to other devices of its host, in one direction."""
    host_bandwidth: float
    """Bytes per second between a device and host memory."""
    devices_per_host: int
    """Number of devices of one host. An instance never spans hosts."""
    flops_efficiency: float
    """Share of `flops` that large matrix products reach."""
    memory_efficiency: float
    """Share of `memory_bandwidth` that matrix products reach."""
    attention_efficiency: float
    """Share of `memory_bandwidth` that decode attention reaches."""
    launch_s: float
    """Seconds of the shortest operator that is launched alone, as in transformations."""
    kernel_s: float
    """Seconds that each operator adds to the time of its work in a captured program, such as a step."""
    all_reduce_latency_s: dict[int, float]
    """Seconds of the smallest all-reduce, by number of ranks. More ranks must not take less time. For a missing
    number, the value of the next larger number is used. Above all numbers, the value of the largest number is used."""
    link_efficiency: float
    """Share of `link_bandwidth` that transfers between devices reach."""
    host_s: float
    """Seconds of host work in each step, while the device computes. No step is shorter than this."""
    step_overhead_s: float = 0.0
    """Seconds of host work in each step, while the device waits. 0 for an engine that launches steps ahead."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each number, by the name of its field."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is float and not value >= 0:
                raise SimulationError(f"device {self.name}: {item.name}={value!r} must be at least 0")
        for name in ("memory_bytes", "flops", "memory_bandwidth", "link_bandwidth", "host_bandwidth"):
            if not getattr(self, name) > 0:
                raise SimulationError(f"device {self.name}: {name}={getattr(self, name)!r} must be above 0")
        for name in ("flops_efficiency", "memory_efficiency", "attention_efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise SimulationError(f"device {self.name}: {name}={getattr(self, name)!r} must be in (0, 1]")
        latencies = [self.all_reduce_latency_s[ranks] for ranks in sorted(self.all_reduce_latency_s)]
        if not latencies or min(latencies) < 0 or latencies != sorted(latencies):
            raise SimulationError(
                f"device {self.name}: all_reduce_latency_s={self.all_reduce_latency_s} must have numbers of at least "
                "0, which do not fall as ranks grow"
            )

    @classmethod
    def from_json(cls, data: dict[str, Any], origin: str) -> "DeviceSpec":
        """Build a device from JSON data. `origin` is the prefix of error messages.

        Raises `SimulationError` for a missing, unknown or invalid field.
        """
        known = {item.name for item in fields(cls)}
        for name in data:
            if name not in known:
                raise SimulationError(f"{origin}: {name!r} is no device field; fields are {', '.join(known)}")
        values = dict(data)
        try:
            latencies = data.get("all_reduce_latency_s", {})
            values["all_reduce_latency_s"] = {int(ranks): float(seconds) for ranks, seconds in latencies.items()}
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise SimulationError(f"{origin}: a field of the device is missing or invalid: {error}") from error

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of `num_bytes` bytes over `ranks` devices; 0 for one device."""
        if ranks == 1:
            return 0.0
        known = [count for count in self.all_reduce_latency_s if count >= ranks]
        latency = self.all_reduce_latency_s[min(known) if known else max(self.all_reduce_latency_s)]
        traffic = 2 * (ranks - 1) / ranks * num_bytes
        return latency + traffic / (self.link_bandwidth * self.link_efficiency)


def device_names() -> tuple[str, ...]:
    """Return the names of the accelerators that have a file in `devices/`."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


_ALIASES = {"a100": "a100-80", "a100-sxm": "a100-80", "a100-pcie-80": "a100-pcie", "h100-80": "h100"}


def _key(name: str) -> str:
    key = name.lower().replace("_", "-").removesuffix("gb")
    return _ALIASES.get(key, key)


@cache
def find_device(name: str) -> DeviceSpec:
    """Return a device by name (`H100`, `A100-80`) or by the path of a JSON file.

    Raises `SimulationError` if the name is unknown or the file is invalid.
    """
    by_key = {_key(known): known for known in device_names()}
    if _key(name) in by_key:
        path = _FOLDER / f"{by_key[_key(name)]}.json"
    elif name.endswith(".json"):
        path = Path(name)
    else:
        known = ", ".join(device_names())
        raise SimulationError(f"--device {name[:100]!r} is unknown: it must be one of {known}, or a .json file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimulationError(f"--device {name[:100]!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise SimulationError(f"--device {name[:100]!r}: the file must hold an object")
    return DeviceSpec.from_json(data, f"--device {name[:100]!r}")
