"""Actions that a policy requests and an executor carries out. The field `reason` of an action is a text for the log."""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal, get_args

RunningRequests = Literal["migrate", "pause", "wait"]
"""Treatment of the running requests of instances that merge: see `ScaleUp.running`."""
Modules = Literal["layer", "attention", "ffn", "kv"]
"""Modules of a layer that a placement change affects, as in `amoeba_jax.transform.options.PlacementModules`.

"layer": attention and FFN. "attention": attention with its KV cache. "ffn": FFN. "kv": attention with its KV cache,
while the source keeps the weights.
"""


class RejectKind(StrEnum):
    """Reason why a waiting request is rejected. The server answers with a different gRPC status for each reason."""

    NEVER_FITS = "never_fits"
    """The request is larger than every possible instance. gRPC status INVALID_ARGUMENT."""
    DEADLINE = "deadline"
    """The deadline passed while the request waited. gRPC status DEADLINE_EXCEEDED."""
    QUEUE_FULL = "queue_full"
    """The queue is over its limit of requests or tokens. gRPC status RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class Dispatch:
    """Start a waiting request on an instance that has room for it now."""

    request_id: str
    instance_id: int
    reason: str = ""


@dataclass(frozen=True)
class ScaleUp:
    """Merge all instances on `devices` into one instance of tensor-parallel degree `degree`."""

    devices: tuple[int, ...]
    degree: int
    reason: str = ""
    release_weights: bool = True
    """Whether weights that a rank does not need become KV cache.

    If not, the capacity of the merged instance is `ClusterView.kept_tokens`.
    """
    running: RunningRequests = "migrate"
    """Treatment of running requests.

    "migrate": they continue in the merged instance. "pause": they keep their pages and pause until a `ScaleDown` to the
    degree at which they ran. This needs instances of equal degree and `release_weights=False`. "wait": the merge starts
    after they have ended.
    """


@dataclass(frozen=True)
class ScaleDown:
    """Split the instance on `devices` into instances of tensor-parallel degree `degree`.

    Running requests continue, and paused requests resume. If the instance has paused requests, `degree` must be
    `InstanceView.paused_degree`.
    """

    devices: tuple[int, ...]
    degree: int
    reason: str = ""


@dataclass(frozen=True)
class Preempt:
    """Return a running or paused request to the queue, and free its KV pages. Its tokens are computed again later.

    The request keeps its arrival time and priority.
    """

    request_id: str
    reason: str = ""


@dataclass(frozen=True)
class Reject:
    """End a waiting request with an error. The client gets `reason` as the message."""

    request_id: str
    kind: RejectKind
    reason: str


# Placement changes (CoCoServe). An executor on devices maps a change to `Changes.request`, with
# `PlacementOptions(kind, device, instance, range(*layers), modules, move_kv)`. `ScaleOut` and `ScaleIn` have the layers
# None. While a change is in progress, `InstanceView.changes_placement` is true, and steps continue. If
# `ClusterView.layer` is None, the executor refuses placement changes.


@dataclass(frozen=True)
class Replicate:
    """Copy layers of an instance to one more device. All devices that have a layer then share the work of the layer.

    The executor refuses the action if the tensor-parallel degree of the instance is above 1. It also refuses the action
    if an instance with a degree above 1 uses `device`.
    """

    instance_id: int
    layers: tuple[int, int]
    """First layer, and the layer after the last."""
    device: int
    """Device that gets the layers."""
    reason: str = ""
    modules: Modules = "layer"


@dataclass(frozen=True)
class Evict:
    """Remove copies of layers of an instance from a device.

    Other devices with these layers continue the sequences that this device computed. The executor refuses to remove a
    layer from its only device.
    """

    instance_id: int
    layers: tuple[int, int]
    """First layer, and the layer after the last."""
    device: int
    """Device that stops computing the layers."""
    reason: str = ""
    modules: Modules = "layer"


@dataclass(frozen=True)
class Migrate:
    """Move layers of an instance to another device.

    If `move_kv` is false, only the FFNs move, because attention stays with its KV cache. The executor refuses to move a
    layer that several devices have.
    """

    instance_id: int
    layers: tuple[int, int]
    """First layer, and the layer after the last."""
    device: int
    """Device that gets the layers."""
    reason: str = ""
    modules: Modules = "layer"
    move_kv: bool = True


@dataclass(frozen=True)
class ScaleOut:
    """Copy all layers of an instance to an empty device. The copy becomes a separate instance with the id `device`.

    During the copy, the layers that are already on `device` compute a share of the sequences. At the end, the new
    instance keeps these sequences.
    """

    instance_id: int
    device: int
    """Device without an instance and without modules of other instances."""
    reason: str = ""


@dataclass(frozen=True)
class ScaleIn:
    """End the instance on `device`, and empty the device. Another instance (`instance_id`) continues the sequences."""

    instance_id: int
    """Id of the instance that gets the sequences."""
    device: int
    """Device of the instance that ends. It is also the id of this instance."""
    reason: str = ""


@dataclass(frozen=True)
class Offload:
    """Move the KV pages of a running request to host memory, and return the request to the queue.

    A later `Dispatch` copies the pages back. Until then, the request has `WaitingRequest.offloaded` set.
    """

    request_id: str
    reason: str = ""


@dataclass(frozen=True)
class LimitBatch:
    """Limit the number of running requests of an instance (`Engine.limit_batch`).

    Requests that already run continue, even if they are more than the limit.
    """

    instance_id: int
    size: int | None
    """Maximum number of running requests. None: the limit of the instance's degree."""
    reason: str = ""


PlacementChange = Replicate | Evict | Migrate | ScaleOut | ScaleIn
Transformation = ScaleUp | ScaleDown
Action = Dispatch | Transformation | PlacementChange | Offload | LimitBatch | Preempt | Reject


def invalid(action: object) -> str | None:
    """Return the reason why an object is not a valid action, or None if it is valid."""
    if isinstance(action, Dispatch):
        return None
    if not isinstance(action, get_args(Action)):
        return f"{type(action).__name__} is not an action"
    if isinstance(action, Reject) and not isinstance(action.kind, RejectKind):
        return f"kind={action.kind!r} is not a RejectKind"
    if isinstance(action, ScaleUp) and action.running not in get_args(RunningRequests):
        return f"running={action.running!r} must be one of {', '.join(get_args(RunningRequests))}"
    devices = getattr(action, "devices", ())
    if not isinstance(devices, tuple):
        return f"devices={devices!r} must be a tuple"
    if isinstance(action, Replicate | Evict | Migrate):
        if action.modules not in get_args(Modules):
            return f"modules={action.modules!r} must be one of {', '.join(get_args(Modules))}"
        layers = action.layers
        if not isinstance(layers, tuple) or len(layers) != 2 or not 0 <= layers[0] < layers[1]:
            return f"layers={layers!r} must be (first, end) with 0 <= first < end"
    if isinstance(action, LimitBatch) and action.size is not None and action.size < 1:
        return f"size={action.size!r} must be at least 1, or None"
    return None


def identity(action: Action) -> tuple[object, ...]:
    """Return a key that identifies an action. Actions that differ only in `reason` have the same key.

    The key of a merge or split has only the devices and the degree. A merge and a split therefore have the same key if
    they have the same devices and the same degree.
    """
    match action:
        case ScaleUp(devices, degree) | ScaleDown(devices, degree):
            return ("transform", devices, degree)
        case Dispatch(request_id, instance_id):
            return ("dispatch", request_id, instance_id)
        case Preempt(request_id) | Reject(request_id):
            return (type(action).__name__, request_id)
        case _:
            values = [getattr(action, field.name) for field in fields(action) if field.name != "reason"]
            return (type(action).__name__, *values)
