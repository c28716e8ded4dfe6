"""What a policy may ask an executor to do. Every action says why, in words for the log."""

from dataclasses import dataclass
from enum import StrEnum
from typing import get_args


class PreemptKind(StrEnum):
    """What becomes of the pages of a preempted request."""

    SOFT = "soft"
    """They are freed, and the request is computed again from its tokens."""
    HARD = "hard"
    """They stay, and the request goes on from them. No policy asks for it yet."""


class RejectKind(StrEnum):
    """Why a request ends unserved. Servers map each to one status."""

    NEVER_FITS = "never_fits"
    """No instance that could be made holds it: INVALID_ARGUMENT."""
    DEADLINE = "deadline"
    """Its deadline passed while it waited: DEADLINE_EXCEEDED."""
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
    """Merge all instances on `devices`, an aligned group, into one of `degree`. Running requests go on."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""


@dataclass(frozen=True)
class ScaleDown:
    """Split the instance on `devices` into instances of `degree`. Running requests go on."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""


@dataclass(frozen=True)
class Preempt:
    """Take a running request off its instance. It waits again, with the arrival time and priority that it had."""

    request_id: str
    kind: PreemptKind = PreemptKind.SOFT
    reason: str = ""


@dataclass(frozen=True)
class Reject:
    """End a waiting request with an error; `reason` is for the client."""

    request_id: str
    kind: RejectKind
    reason: str


@dataclass(frozen=True)
class BindGroup:
    """Run `devices` as one instance of `degree` with all weights kept, so that the change moves no page that is not in
    use and can be taken back at once (Flying Serving). No policy asks for it yet."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""


@dataclass(frozen=True)
class ReleaseGroup:
    """Take back a `BindGroup`. No policy asks for it yet."""

    devices: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class ReplicateLayers:
    """Run layers `first_layer .. first_layer + num_layers` of an instance on further devices too, which share its
    batch (CoCoServe). No policy asks for it yet."""

    instance_id: int
    first_layer: int
    num_layers: int
    devices: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class MigrateLayers:
    """Move layers `first_layer .. first_layer + num_layers` of an instance to other devices (CoCoServe). No policy asks
    for it yet."""

    instance_id: int
    first_layer: int
    num_layers: int
    devices: tuple[int, ...]
    reason: str = ""


Transformation = ScaleUp | ScaleDown
Action = Dispatch | Transformation | Preempt | Reject | BindGroup | ReleaseGroup | ReplicateLayers | MigrateLayers


def unknown(action: object) -> str | None:
    """Why something is no action that an executor could be asked for; None if it is one."""
    if not isinstance(action, get_args(Action)):
        return f"{type(action).__name__} is no kind of action"
    if isinstance(action, Reject) and not isinstance(action.kind, RejectKind):
        return f"kind={action.kind!r} is no RejectKind"
    if isinstance(action, Preempt) and not isinstance(action.kind, PreemptKind):
        return f"kind={action.kind!r} is no PreemptKind"
    devices = getattr(action, "devices", ())
    if not isinstance(devices, tuple):
        return f"devices={devices!r} must be a tuple"
    return None
