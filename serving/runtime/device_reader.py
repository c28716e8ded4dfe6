"""Free memory and utilization of devices.

Free memory comes from the engine's ledgers and includes unused KV pages. Utilization comes from NVML or, on devices
without NVML, from step times.
"""

import importlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.reports import page_bytes
from amoeba_jax.instances.instance import Instance
from serving.runtime.placements import layers_by_device
from serving.scheduler import DeviceView
from sharding.ledger import Ledger
from sharding.owners import Owner

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two readings."""


class DeviceReader:
    """Reader of the free memory and utilization of each device. Only the engine's thread uses it."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._utilization: Utilization = NvmlUtilization.open(engine.cluster.sub_meshes.devices) or StepTimes(engine)
        self._latest: tuple[DeviceView, ...] = ()
        self._next_s = 0.0

    def read(self) -> tuple[DeviceView, ...]:
        """Return the free memory and utilization of each device. The values are at most a second old."""
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            used_bytes, _ = page_bytes(self._engine)
            self._latest = tuple(
                _view(device, ledger, used_bytes[device], utilization)
                for device, (ledger, utilization) in enumerate(
                    zip(self._engine.cluster.ledgers, self._utilization.read(), strict=True)
                )
            )
        return self._latest


def _view(device: int, ledger: Ledger, used_bytes: int, utilization: float) -> DeviceView:
    cache = sum(size for (_, owner), size in ledger.entries.items() if owner == Owner.KV_CACHE)
    memory = ledger.free_bytes + cache
    return DeviceView(device, memory_bytes=memory, free_bytes=memory - used_bytes, utilization=utilization)


class Utilization(Protocol):
    """Source of the utilization of devices."""

    def read(self) -> Sequence[float]:
        """Return each device's share of busy time in a recent period, from 0 to 1."""
        ...


class StepTimes:
    """Utilization computed from the durations of steps, for devices without NVML.

    The layers of a step run one after another. If a device computes a third of an instance's layers, the device counts
    as busy for a third of each step.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._busy_s: dict[Instance, float] = {}
        self._read_s = time.perf_counter()

    def read(self) -> Sequence[float]:
        """Return each device's share of busy time since the last call, from 0 to 1."""
        engine, now_s = self._engine, time.perf_counter()
        elapsed_s, self._read_s = max(now_s - self._read_s, 1e-6), now_s
        busy_s = [0.0] * len(engine.cluster.sub_meshes.devices)
        for instance in engine.instances:
            spent_s = instance.pace.busy_s - self._busy_s.get(instance, 0.0)
            placement = instance.runner.placement
            for device, count in layers_by_device(placement).items():
                busy_s[device] += spent_s * count / placement.num_layers
        self._busy_s = {instance: instance.pace.busy_s for instance in engine.instances}
        return [min(seconds / elapsed_s, 1.0) for seconds in busy_s]


class NvmlUtilization:
    """Utilization of GPUs as the driver reports it, through the package `nvidia-ml-py`."""

    def __init__(self, nvml: Any, handles: Sequence[Any]):
        self._nvml, self._handles = nvml, handles

    @classmethod
    def open(cls, devices: Sequence[jax.Device]) -> "NvmlUtilization | None":
        """Return an object that reads these devices, or None if NVML cannot read all of them."""
        if {device.platform for device in devices} != {"gpu"}:
            return None
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            found = cls(nvml, [_handle(nvml, device) for device in devices])
            found.read()
        except Exception as error:  # errors of NVML have no common base class without the package
            logger.info("utilization comes from step times, because NVML (extra nvml) is not available: %s", error)
            return None
        return found

    def read(self) -> Sequence[float]:
        """Return the utilization of each device, from 0 to 1.

        The values are for the driver's latest sample period (at most a second).
        """
        return [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]


def _handle(nvml: Any, device: jax.Device) -> Any:
    """Return the NVML handle of a device. `CUDA_VISIBLE_DEVICES` gives the index or UUID of each visible GPU."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    index = device.local_hardware_id
    name = visible[index] if visible else str(index)
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
