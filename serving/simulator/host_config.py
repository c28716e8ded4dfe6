"""Configuration of a simulated host, and entries of the host's queue."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from serving.scheduler import DegreeLimits, Migrate, Replicate, WaitingRequest
from serving.simulator.pricing import Pricing
from serving.simulator.run import Run
from serving.simulator.spread import LayerCost
from serving.simulator.transformation_cost import TransformationCost


class ForbiddenActionError(AssertionError):
    """The host refused an action. Raised only if `HostConfig.strict` is set, for tests of policies."""


class Refusal(Exception):
    """The host refuses an action, for the given reason. `SimExecutor.apply` turns this error into an `Outcome`."""


@dataclass(frozen=True)
class HandoverConfig:
    """Division of a host into prefill and decode instances, and the link between them."""

    num_prefill: int
    """Number of instances, from the first device on, that compute prompts only."""
    token_bytes: Mapping[int, float]
    """Bytes of KV cache that one device of an instance sends for a token, by degree of the sender."""
    rate: float
    """Bytes per second that one device sends."""
    latency_s: float
    """Seconds of the shortest transfer."""


@dataclass(frozen=True)
class HostConfig:
    """Configuration of a simulated host: a scheduler with its devices."""

    num_devices: int
    limits: tuple[DegreeLimits, ...]
    """Limits of an instance of each possible degree, in ascending order."""
    pricing: Pricing
    """Cost of steps."""
    transformation: TransformationCost
    """Cost of transformations."""
    degrees_at_start: tuple[int, ...]
    """Degrees of the instances at the start, in the order of devices. Further devices are empty."""
    page_size: int = 16
    max_model_len: int | None = None
    layers_per_step: int = 1
    """Number of layers that switch to a new degree before each step of a transformation."""
    regroup_s: float = 0.0
    """Seconds without steps when requests pause or resume. The engine rebuilds its views of the cache meanwhile."""
    launches_ahead: bool = False
    """Whether a step is launched when the previous step begins, as in the engine. False: when that step ends."""
    shows_timing: bool = False
    """Whether policies see measured times of steps and transformations, as in the engine."""
    strict: bool = False
    """Whether a refused action raises `ForbiddenActionError`."""
    layers: LayerCost | None = None
    """Costs of placement changes. None: placement changes are refused, and policies see no devices."""
    handover: HandoverConfig | None = None
    """Division into prefill and decode instances. None: all instances do both."""
    placed_at_start: tuple[Replicate | Migrate, ...] = ()
    """Placement changes that have been carried out before the start."""

    @property
    def num_slots(self) -> int:
        """Maximum number of running and paused requests on the devices of one instance."""
        return max(limits.max_requests for limits in self.limits)

    @cached_property
    def base_degree(self) -> int:
        """Lowest tensor-parallel degree at the start. Merged instances split to this degree."""
        return min(self.degrees_at_start)


@dataclass
class Waiting:
    """Queue entry: a waiting request, with data that policies do not see.

    Attributes:
        request: request as policies see it.
        index: row of the request in `tally.Records`.
        output_left: number of tokens left to generate.
        since_s: time at which the request entered the queue.
        last_token_s: time of the latest token before a preemption. None: the request has generated no token.
        offloaded: pair (request as `Run`, steps) if the KV pages are in host memory, otherwise None. `steps` is the
            number of decode steps that the previous instance had run when the request was offloaded.
    """

    request: WaitingRequest
    index: int
    output_left: int
    since_s: float
    last_token_s: float | None = None
    offloaded: tuple[Run, int] | None = None
