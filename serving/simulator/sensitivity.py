"""Sensitivity of a comparison of policies: which conclusions still hold if constants of the device change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.simulator.device_spec import DeviceSpec
from serving.simulator.errors import SimulationError
from serving.simulator.explain import compare, ranking
from serving.simulator.requests import RequestTable
from serving.simulator.result import PolicyResult
from serving.simulator.settings import SimulationConfig
from serving.simulator.simulate import simulate

CHANGE = 0.2
"""Relative change of each constant, up and down."""
CONSTANTS = (
    "flops_efficiency", "memory_efficiency", "attention_efficiency", "link_efficiency", "kernel_s",
    "all_reduce_latency_s", "host_s",
)  # fmt: skip
"""Constants of a device that were fitted or assumed, not read from a data sheet."""
_SHARES = ("flops_efficiency", "memory_efficiency", "attention_efficiency", "link_efficiency")


@dataclass(frozen=True)
class Conclusion:
    """Statement that the policy `better` is better than the policy `worse`.

    `equal` and `reversed` list the changes of a device constant under which the statement is false.
    """

    better: str
    worse: str
    equal: tuple[str, ...] = ()
    """Changes under which both policies are equal."""
    reversed: tuple[str, ...] = ()
    """Changes under which `worse` is better than `better`."""

    def text(self, changes: int) -> str:
        """Return a sentence about the conclusion. `changes` is the number of changes that were tried."""
        first = f"{self.better} is better than {self.worse}: "
        if not self.equal and not self.reversed:
            return first + f"survives all {changes} changes."
        parts = [
            f"{what} with {', '.join(names)}"
            for what, names in (("reversed", self.reversed), ("equal", self.equal))
            if names
        ]
        return first + f"does not survive: {'; '.join(parts)}."


def changed_devices(device: DeviceSpec) -> dict[str, DeviceSpec]:
    """Return copies of a device by the name of a change, such as `kernel_s +20%`. Each copy has one changed constant.

    Each name in `CONSTANTS` gives two copies: with a larger and with a smaller value. Efficiencies stay at most 1.
    """
    found = {}
    for name in CONSTANTS:
        for factor in (1 - CHANGE, 1 + CHANGE):
            value = getattr(device, name)
            if isinstance(value, Mapping):
                new: object = {key: number * factor for key, number in value.items()}
            else:
                new = min(value * factor, 1.0) if name in _SHARES else value * factor
            found[f"{name} {factor - 1:+.0%}"] = replace(device, **{name: new})
    return found


def sensitivity(
    config: SimulationConfig,
    results: Mapping[str, PolicyResult],
    requests: RequestTable,
    on_change: Callable[[str], None] = lambda name: None,
) -> tuple[list[Conclusion], int]:
    """Repeat a comparison of policies with changed constants of the device, one constant at a time.

    Return `(conclusions, number of changes)`: each conclusion lists the changes under which it is false. Raises
    `SimulationError` if the configuration has several kinds of devices, or a calibration.

    Args:
        results: results of the comparison, by policy.
        requests: requests of the comparison.
        on_change: function that receives the name of each change before its simulations.
    """
    if config.calibration is not None or len(config.parts()) > 1:
        raise SimulationError("--sensitivity needs one kind of device, and no calibration")
    names = ranking(results)
    pairs = [
        (one, two)
        for place, one in enumerate(names)
        for two in names[place + 1 :]
        if compare(results[one], results[two]) < 0
    ]
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = {pair: ([], []) for pair in pairs}
    devices = changed_devices(config.device_spec())
    for change, device in devices.items():
        on_change(change)
        changed = {name: simulate(replace(config, device=device), name, requests) for name in names}
        for (one, two), (equal, reverse) in found.items():
            if (order := compare(changed[one], changed[two])) >= 0:
                (reverse if order else equal).append(change)
    return [Conclusion(*pair, tuple(equal), tuple(reverse)) for pair, (equal, reverse) in found.items()], len(devices)


def sensitivity_lines(conclusions: Sequence[Conclusion], changes: int) -> list[str]:
    """Return a sentence for each conclusion. `changes` is the number of changes that were tried."""
    if not conclusions:
        return ["Sensitivity: the policies do not differ."]
    return [f"Sensitivity, each constant of the device {CHANGE:.0%} up and down ({changes} changes):"] + [
        f"- {conclusion.text(changes)}" for conclusion in conclusions
    ]
