"""What a simulated host is made of, and what waits there."""

from dataclasses import dataclass

from serving.scheduler import DegreeLimits, WaitingRequest
from serving.simulator.launch_ahead import LaunchAhead
from serving.simulator.pricing import Pricing
from serving.simulator.transformation_cost import TransformationCost


class ForbiddenActionError(AssertionError):
    """A policy asked for what it must never ask for. Raised by strict executors instead of a refusal."""


class Refusal(Exception):
    """Why an action is not taken on."""


@dataclass(frozen=True)
class HostConfig:
    """What a host is made of. `limits` has the degrees that its instances may have, lowest first."""

    num_devices: int
    limits: tuple[DegreeLimits, ...]
    pricing: Pricing
    transformation: TransformationCost
    degrees_at_start: tuple[int, ...]
    """Degrees of the instances at the start, in the order of devices."""
    page_size: int = 16
    max_model_len: int | None = None
    layers_per_step: int = 1
    regroup_s: float = 0.0
    """Seconds for which no step runs when requests pause, or go on: only views of buffers change."""
    launch_ahead: LaunchAhead | None = None
    """When an instance launches its next step. None: when the present one ends."""
    shows_timing: bool = False
    """Snapshots tell what steps and transformations took, as those of an engine do."""
    strict: bool = False
    """Raise `ForbiddenActionError` for what a policy must never ask for, instead of refusing it."""

    @property
    def num_slots(self) -> int:
        """Requests that the devices of one instance may have, paused ones included."""
        return max(limits.max_requests for limits in self.limits)

    @property
    def base_degree(self) -> int:
        """Degree that instances start with and split to."""
        return min(self.degrees_at_start)


@dataclass
class Waiting:
    """A request in the queue, and what only the simulation knows of it."""

    request: WaitingRequest
    index: int
    output_left: int
    since_s: float
    last_token_s: float | None = None
