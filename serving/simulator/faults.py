"""Failures to inject into a simulation."""

from dataclasses import dataclass

from serving.simulator.errors import SimulationError


@dataclass(frozen=True)
class DeviceFault:
    """Failure of the device with index `device` at `at_s` seconds. Devices are numbered over all hosts.

    Each instance that uses the device loses its KV cache on all devices, and accepts no requests for `down_s`
    seconds. The requests of the instance return to the queue and are computed again, as in the engine.
    """

    device: int
    at_s: float
    down_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("device", "at_s", "down_s"):
            if not getattr(self, name) >= 0:
                raise SimulationError(f"fault: {name}={getattr(self, name)!r} must be at least 0")


@dataclass(frozen=True)
class Faults:
    """All failures to inject into a simulation."""

    transformations: int = 0
    """Number of failing transformations: the first transformations of each host end without effect."""
    devices: tuple[DeviceFault, ...] = ()

    @classmethod
    def from_text(cls, texts: list[str]) -> "Faults":
        """Parse descriptions of failures. Raises `SimulationError` for an invalid text.

        `transformations:2` means that the first two transformations of each host fail. `device:3@120+60` means that
        device 3 fails at 120 s, for 60 s.
        """
        transformations, devices = 0, []
        for text in texts:
            kind, _, value = text.partition(":")
            try:
                if kind == "transformations":
                    transformations += int(value)
                    if int(value) < 0:
                        raise ValueError
                elif kind == "device":
                    device, _, times = value.partition("@")
                    at_s, _, down_s = times.partition("+")
                    devices.append(DeviceFault(int(device), float(at_s), float(down_s or 0)))
                else:
                    raise ValueError
            except SimulationError:
                raise
            except ValueError:
                raise SimulationError(
                    f"--fail {text!r} is invalid: it must be transformations:N or device:D@SECONDS+SECONDS"
                ) from None
        return cls(transformations, tuple(devices))
