"""Configuration of a simulated host, and its queue entries."""

from dataclasses import dataclass

from serving.scheduler import DegreeLimits, WaitingRequest
from serving.simulator.pricing import Pricing
from serving.simulator.transformation_cost import TransformationCost


class ForbiddenActionError(AssertionError):
    """Forbidden action of a policy. Strict executors raise it in place of a refusal."""


class Refusal(Exception):
    """Refused action, with the reason."""


@dataclass(frozen=True)
class HostConfig:
    """Configuration of a host. `limits` has the possible degrees of instances in ascending order."""

    num_devices: int
    limits: tuple[DegreeLimits, ...]
    pricing: Pricing
    transformation: TransformationCost
    degrees_at_start: tuple[int, ...]
    """Degrees of the first instances, in the order of devices."""
    page_size: int = 16
    max_model_len: int | None = None
    layers_per_step: int = 1
    regroup_s: float = 0.0
    """Seconds without steps when requests pause or resume, because views of buffers change."""
    launches_ahead: bool = False
    """Whether the next step is launched when the running step begins, as in the engine, or when it ends."""
    shows_timing: bool = False
    """Whether snapshots contain measured times, like snapshots of an engine."""
    strict: bool = False
    """Whether to raise `ForbiddenActionError` for forbidden actions, in place of refusing them."""

    @property
    def num_slots(self) -> int:
        """Maximum number of running and paused requests on the devices of one instance."""
        return max(limits.max_requests for limits in self.limits)

    @property
    def base_degree(self) -> int:
        """Lowest degree of the first instances, to which instances split."""
        return min(self.degrees_at_start)


@dataclass
class Waiting:
    """Waiting request, with data that policies do not see."""

    request: WaitingRequest
    index: int
    output_left: int
    since_s: float
    last_token_s: float | None = None
