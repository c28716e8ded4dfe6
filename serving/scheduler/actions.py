"""Actions that a policy requests from an executor. The field `reason` of each action is text for the log."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

RunningRequests = Literal["migrate", "pause", "wait"]
"""Treatment of the running requests of instances that merge: see `ScaleUp.running`."""


class RejectKind(StrEnum):
    """Reason to end a request without serving it. Servers map each kind to one gRPC status."""

    NEVER_FITS = "never_fits"
    """The request is larger than every possible instance: INVALID_ARGUMENT."""
    DEADLINE = "deadline"
    """The deadline passed while the request waited: DEADLINE_EXCEEDED."""
    QUEUE_FULL = "queue_full"
    """The queue is over its limit of requests or tokens: RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class Dispatch:
    """Start a waiting request on an instance that has room for it now."""

    request_id: str
    instance_id: int
    reason: str = ""


@dataclass(frozen=True)
class ScaleUp:
    """Merge all instances on `devices`, an aligned group, into one instance of degree `degree`."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""
    release_weights: bool = True
    """Whether weights that a rank does not need become KV cache. If not, the capacity of the merged instance is
    `ClusterView.kept_tokens`."""
    running: RunningRequests = "migrate"
    """Treatment of running requests. "migrate": they continue in the merged instance. "pause": they keep their pages
    and pause until a `ScaleDown` to the degree at which they ran. This needs instances of equal degree and
    `release_weights=False`. "wait": the merge starts after they have ended."""


@dataclass(frozen=True)
class ScaleDown:
    """Split the instance on `devices` into instances of `degree`. Running requests continue, and paused requests
    resume. If there are paused requests, `degree` must be `InstanceView.paused_degree`."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""


@dataclass(frozen=True)
class Preempt:
    """Return a running or paused request to the queue, with its original arrival time and priority. Its pages are
    freed, and its tokens are computed again later."""

    request_id: str
    reason: str = ""


@dataclass(frozen=True)
class Reject:
    """End a waiting request with an error. The client receives `reason` as the message."""

    request_id: str
    kind: RejectKind
    reason: str


Transformation = ScaleUp | ScaleDown
Action = Dispatch | Transformation | Preempt | Reject


def invalid(action: object) -> str | None:
    """Return the reason why an object is not a valid action; None if it is valid."""
    if not isinstance(action, get_args(Action)):
        return f"{type(action).__name__} is not an action"
    if isinstance(action, Reject) and not isinstance(action.kind, RejectKind):
        return f"kind={action.kind!r} is not a RejectKind"
    if isinstance(action, ScaleUp) and action.running not in get_args(RunningRequests):
        return f"running={action.running!r} must be one of {', '.join(get_args(RunningRequests))}"
    devices = getattr(action, "devices", ())
    if not isinstance(devices, tuple):
        return f"devices={devices!r} must be a tuple"
    return None
