"""What a policy may ask an executor to do. Every action says why, in words for the log."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

RunningRequests = Literal["migrate", "pause", "wait"]
"""What becomes of the requests on instances that merge: see `ScaleUp.running`."""


class RejectKind(StrEnum):
    """Why a request ends unserved. Servers map each to one status."""

    NEVER_FITS = "never_fits"
    """No instance that could be made holds it: INVALID_ARGUMENT."""
    DEADLINE = "deadline"
    """The deadline passed while the request waited: DEADLINE_EXCEEDED."""
    QUEUE_FULL = "queue_full"
    """More requests or tokens wait than may: RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class Dispatch:
    """Give a waiting request to an instance, which has room for it now."""

    request_id: str
    instance_id: int
    reason: str = ""


@dataclass(frozen=True)
class ScaleUp:
    """Merge all instances on `devices`, an aligned group, into one of `degree`."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""
    release_weights: bool = True
    """Weights that its ranks do not need become KV cache. Without it the instance holds what its members hold together:
    `ClusterView.kept_tokens`."""
    running: RunningRequests = "migrate"
    """Requests that run there go on in the merged instance ("migrate"); keep their pages and pause until a `ScaleDown`
    to the degree of the members ("pause": at once, of instances of one degree, with weights kept); or are waited for
    before the merge begins ("wait")."""


@dataclass(frozen=True)
class ScaleDown:
    """Split the instance on `devices` into instances of `degree`. Running requests go on, and so do paused ones: while
    there are any, `degree` must be theirs."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""


@dataclass(frozen=True)
class Preempt:
    """Take a running or paused request off its instance. It waits again, with the arrival time and priority that it
    had, and is computed again from its tokens."""

    request_id: str
    reason: str = ""


@dataclass(frozen=True)
class Reject:
    """End a waiting request with an error; `reason` is for the client."""

    request_id: str
    kind: RejectKind
    reason: str


Transformation = ScaleUp | ScaleDown
Action = Dispatch | Transformation | Preempt | Reject


def unknown(action: object) -> str | None:
    """Why something is no action that an executor could be asked for; None if it is one."""
    if not isinstance(action, get_args(Action)):
        return f"{type(action).__name__} is no kind of action"
    if isinstance(action, Reject) and not isinstance(action.kind, RejectKind):
        return f"kind={action.kind!r} is no RejectKind"
    if isinstance(action, ScaleUp) and action.running not in get_args(RunningRequests):
        return f"running={action.running!r} must be one of {', '.join(get_args(RunningRequests))}"
    devices = getattr(action, "devices", ())
    if not isinstance(devices, tuple):
        return f"devices={devices!r} must be a tuple"
    return None
