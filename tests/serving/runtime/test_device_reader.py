"""Utilization of devices from step times, and of GPUs from NVML with a fake driver."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from amoeba_jax import LLM, SamplingParams
from serving.runtime.device_reader import NvmlUtilization, StepTimes

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_steps_occupy_the_devices_of_their_instance(executor_llm: LLM):
    call = executor_llm._dispatcher.call
    times = call(StepTimes, executor_llm._engine).result()
    executor_llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    busy = call(times.read).result()
    assert len(busy) == 2
    assert 0 < max(busy) <= 1
    assert min(busy) == 0, "the request ran on one device"
    assert call(times.read).result() == [0, 0]


class Driver:
    """Fake driver: GPUs by index and by UUID, with their utilization in percent."""

    def __init__(self, utilization: dict[str, int], fails: bool = False):
        self._utilization, self._fails = utilization, fails

    def nvmlInit(self) -> None:
        if self._fails:
            raise RuntimeError("no driver")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self._utilization[handle])


def gpus(count: int) -> list[jax.Device]:
    return [cast(jax.Device, SimpleNamespace(platform="gpu", local_hardware_id=index)) for index in range(count)]


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0.1, 0.2]), ("", [0.1, 0.2]), ("1,0", [0.2, 0.1]), ("GPU-abc, 1", [0.3, 0.2])]
)
def test_visible_gpus_are_found(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[float]):
    monkeypatch.setitem(sys.modules, "pynvml", cast(Any, Driver({"0": 10, "1": 20, "GPU-abc": 30})))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = NvmlUtilization.open(gpus(2))
    assert found is not None
    assert found.read() == expected


@pytest.mark.parametrize(
    ("driver", "devices"),
    [
        (Driver({"0": 10}), [SimpleNamespace(platform="cpu")]),
        (Driver({"0": 10}), []),
        (Driver({"0": 10}, fails=True), gpus(1)),
        (Driver({"0": 10}), gpus(2)),
        (None, gpus(1)),
    ],
    ids=["no GPUs", "no devices", "no driver", "a GPU that NVML does not have", "no package"],
)
def test_step_times_count_without_nvml(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, devices: Any):
    monkeypatch.setitem(sys.modules, "pynvml", cast(Any, driver))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert NvmlUtilization.open(devices) is None
