"""Configuration of a simulation."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from serving.bench.workload import WorkloadConfig
from serving.scheduler import AmoebaConfig, CocoServeConfig, FlyingConfig
from serving.simulator.batching import Batching, EngineBuckets, TokenBudget
from serving.simulator.calibration import Calibration
from serving.simulator.device_spec import DeviceSpec, find_device
from serving.simulator.errors import SimulationError
from serving.simulator.faults import Faults
from serving.simulator.model_shape import ModelShape
from serving.simulator.operator_profile import OperatorProfile
from serving.simulator.router import ROUTERS
from serving.simulator.slo import Slo

DEGREES = (1, 2, 4)
MAX_DEVICES = 100_000


@dataclass(frozen=True)
class SimulationConfig:
    """Settings of a simulation: devices, model and traffic. Raises `SimulationError` for an invalid value."""

    model: str | Path | ModelShape
    """Model: the path of a `config.json` or of its directory, or a shape."""
    workload: WorkloadConfig
    device: str | DeviceSpec = "H100"
    """Name of a device of this package, or path of a JSON file. Several kinds with their numbers: `H100:8+A100:16`.
    Hosts have devices of one kind."""
    num_devices: int = 8
    devices_per_scheduler: int | None = None
    """Number of devices of each scheduler. None: the devices of a host, usually 8; with a calibration, all devices."""
    policies: tuple[str, ...] = ("amoeba",)
    slo: Slo = field(default_factory=Slo)
    degrees: tuple[int, ...] = DEGREES
    """Possible degrees of instances."""
    max_num_seqs: int | None = None
    """Maximum running requests for each device of an instance. None: one for each 1,024 tokens of the cache
    (`MemoryPlan.limits`)."""
    max_num_batched_tokens: int = 2048
    """Maximum prompt tokens of one step."""
    memory_utilization: float = 0.9
    activation_gb: float | None = None
    """Memory for temporaries on each device in GB. None: an estimate (`MemoryPlan.activations`)."""
    page_size: int = 16
    max_model_len: int | None = None
    """Maximum tokens of prompt and output. None: the limit of the model."""
    layers_per_step: int = 1
    """Number of layers that switch to a new degree before each step of a transformation."""
    max_tokens: int | None = None
    """Output limit of each request, which the scheduler knows. None: the output length of the request."""
    deadline_s: float | None = None
    """Seconds from the arrival of a request until it is cancelled. None: never."""
    urgent_share: float = 0.0
    """Share of requests that get priority -1 in place of 0, so that they are served first."""
    policy_config: AmoebaConfig = field(default_factory=AmoebaConfig)
    """Settings of the policy `amoeba`, and of other policies with the same rules (`make_policy`)."""
    flying_config: FlyingConfig = field(default_factory=FlyingConfig)
    """Settings of the policy `flying`."""
    cocoserve_config: CocoServeConfig = field(default_factory=CocoServeConfig)
    """Settings of the policy `cocoserve`, in addition to `policy_config`."""
    instances_at_start: int | None = None
    """Number of instances of each scheduler at the start. Further devices are empty; `cocoserve` may use them. None: as
    many as the devices hold."""
    router: str = "two_choices"
    """Name of the router that chooses a scheduler for each request (`ROUTERS`)."""
    profiles: tuple[Path, ...] = ()
    """Files with measured operator times of the device (`serving.simulator.operator_profile`)."""
    calibration: Calibration | None = None
    """Measured times of an engine, which replace the cost model of the device."""
    faults: Faults = field(default_factory=Faults)
    until_s: float | None = None
    """Virtual seconds to simulate. None: until all requests have ended."""
    drain_s: float = 3600.0
    """Maximum virtual seconds to simulate after the last arrival, if `until_s` is None."""
    seed: int = 0
    price_per_hour: float | None = None
    """Price of a device for an hour, in USD. None: unknown."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MAX_DEVICES:
            raise SimulationError(f"num_devices={self.num_devices!r} must be from 1 to {MAX_DEVICES}")
        per = self.devices_per_scheduler
        if per is not None and (per < 1 or self.num_devices % per):
            raise SimulationError(
                f"devices_per_scheduler={per!r} must be at least 1 and divide num_devices={self.num_devices}"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "layers_per_step", "instances_at_start"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise SimulationError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise SimulationError(f"page_size={self.page_size!r} must be a power of two, at least 1")
        for name in ("max_model_len", "max_tokens", "deadline_s", "until_s", "activation_gb", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SimulationError(f"{name}={value!r} must be above 0 and finite")
        if not 0 <= self.drain_s < math.inf:
            raise SimulationError(f"drain_s={self.drain_s!r} must be finite and at least 0")
        if not 0 <= self.urgent_share <= 1:
            raise SimulationError(f"urgent_share={self.urgent_share!r} must be from 0 to 1")
        if not self.policies:
            raise SimulationError("policies is empty: it must name at least one")
        for degree in self.degrees:
            if degree < 1 or degree & (degree - 1):
                raise SimulationError(f"degrees has {degree!r}: each must be a power of two")
        if self.router not in ROUTERS:
            raise SimulationError(f"router={self.router!r} must be one of {', '.join(ROUTERS)}")
        if self.calibration is not None and self.num_devices > self.calibration.num_devices:
            raise SimulationError(
                f"num_devices={self.num_devices} is more than the {self.calibration.num_devices} devices of the "
                "calibration: calibrate with at least as many devices"
            )
        for fault in self.faults.devices:
            if fault.device >= self.num_devices:
                raise SimulationError(f"fault: device={fault.device} must be below num_devices={self.num_devices}")

    def parts(self) -> "tuple[SimulationConfig, ...]":
        """Return a configuration for each kind of device, in the order of the devices.

        Raises `SimulationError` if the kinds are invalid, or if their devices do not add up to `num_devices`.
        """
        if not isinstance(self.device, str) or "+" not in self.device:
            return (self,)
        found = []
        for text in self.device.split("+"):
            name, _, count = text.rpartition(":")
            if not name or not count.isdigit() or not int(count):
                raise SimulationError(
                    f"--device {self.device[:100]!r}: {text[:100]!r} must be a device and a number, such as H100:8"
                )
            found.append(replace(self, device=name, num_devices=int(count), faults=Faults()))
        if sum(part.num_devices for part in found) != self.num_devices:
            raise SimulationError(
                f"--device {self.device[:100]!r} has {sum(part.num_devices for part in found)} devices, but "
                f"num_devices={self.num_devices}"
            )
        return tuple(found)

    def shape(self) -> ModelShape:
        """Return the sizes of the model. If `model` is a path, read its `config.json`."""
        return self.model if isinstance(self.model, ModelShape) else ModelShape.read(Path(self.model))

    def device_spec(self) -> DeviceSpec:
        """Return the rates and sizes of the device. If `device` is a name or path, look it up."""
        return self.device if isinstance(self.device, DeviceSpec) else find_device(self.device)

    def profile(self) -> OperatorProfile | None:
        """Return the measured times of operators in the files `profiles`, or None if there are no files."""
        return OperatorProfile.read(self.profiles) if self.profiles else None

    def host_devices(self) -> int:
        """Return the number of devices of each scheduler.

        Raises `SimulationError` if `num_devices` is not a multiple of this number.
        """
        if self.devices_per_scheduler is not None:
            return self.devices_per_scheduler
        if self.calibration is not None:
            return self.num_devices
        per_host = min(self.device_spec().devices_per_host, self.num_devices)
        if self.num_devices % per_host:
            raise SimulationError(
                f"num_devices={self.num_devices} must be a multiple of the {per_host} devices of a host, or set "
                "devices_per_scheduler"
            )
        return per_host

    def batching(self) -> Batching:
        """Return the rule that chooses the prompt chunks of a step."""
        if self.calibration is not None:
            return EngineBuckets(self.calibration.max_num_seqs, self.calibration.max_num_batched_tokens)
        return TokenBudget(self.max_num_batched_tokens)
