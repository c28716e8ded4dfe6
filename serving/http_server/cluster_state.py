"""State of a server as JSON, for the live page."""

import re
import time
from collections.abc import Iterable
from typing import Any

from amoeba_jax.errors import EngineClosedError
from amoeba_jax.views import InstanceStatus, MemoryReport
from serving.grpc_server.priority_classes import PriorityClass
from serving.grpc_server.request_handler import RequestHandler
from serving.grpc_server.statuses import NotServingError
from serving.runtime.snapshot import Snapshot, take_snapshot
from serving.runtime.timeline import Second
from serving.scheduler import (
    Action,
    Dispatch,
    Evict,
    LimitBatch,
    Migrate,
    Offload,
    Preempt,
    Record,
    Reject,
    Replicate,
    ScaleDown,
    ScaleIn,
    ScaleOut,
    ScaleUp,
)
from sharding.degrees import degrees_up_to
from sharding.owners import Owner

OWNERS = ("embedding and head", "attention and norms", "FFN", "KV cache", "sampling", "padding")
"""Owners of memory, in the order of `layers` and `outside` of a device."""
RECENT_S = 10
"""Seconds of figures and decisions that each message repeats, so that a viewer may miss messages."""
OWNER_INDEX: dict[str, int] = {
    Owner.EMBEDDING: 0,
    Owner.HEAD: 0,
    Owner.FINAL_NORM: 0,
    Owner.ATTENTION: 1,
    Owner.NORM: 1,
    Owner.FFN: 2,
    Owner.KV_CACHE: 3,
    Owner.SAMPLING: 4,
    Owner.HIDDEN: 4,
}
_REQUEST_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")
_PADDING = OWNERS.index("padding")


async def cluster_state(handler: RequestHandler) -> dict[str, Any]:
    """Return the present state: instances, devices, queue, changes, and recent metrics and scheduler decisions.

    If the server is loading or has failed, return only `state` and `time_s`.
    """
    try:
        snapshot = await handler.control(take_snapshot, handler.backend)
    except (NotServingError, EngineClosedError):
        return {"time_s": time.time(), "state": handler.state.name.lower()}
    return _described(handler, snapshot) | recent(handler, RECENT_S)


def recent(handler: RequestHandler, last_s: int | None = None) -> dict[str, Any]:
    """Return recent metrics and scheduler decisions as a dict of two lists, each with the oldest entry first.

    `seconds` has the metrics of each second. `decisions` has the decisions of the scheduler.

    Args:
        last_s: number of seconds to look back. None: all seconds that the server keeps.
    """
    now_s = time.monotonic()
    offset_s = time.time() - now_s
    records = handler.scheduling.records if handler.scheduling is not None else []
    if last_s is not None:
        records = [record for record in records if record.at_s > now_s - last_s]
    return {
        "seconds": [_second(row, offset_s) for row in handler.metrics.timeline.seconds(last_s)],
        "decisions": [_decision(record, offset_s) for record in records],
    }


def _described(handler: RequestHandler, snapshot: Snapshot) -> dict[str, Any]:
    admission, scheduling = handler.admission, handler.scheduling
    ready = {it.degree: it for it in snapshot.stats.degrees}
    degrees = []
    for degree in degrees_up_to(handler.backend.config.max_tp):
        programs = ready.get(degree)
        missing = 0 if programs is None else programs.num_programs - programs.num_ready
        degrees.append({"degree": degree, "missing_programs": missing})
    return {
        "time_s": time.time(),
        "state": handler.state.name.lower(),
        "model": handler.backend.name,
        "policy": None if scheduling is None else scheduling.policy_name,
        "num_layers": handler.backend.dims.config.num_layers,
        "degrees": degrees,
        "instances": [_instance(view) for view in snapshot.instances],
        "devices": _device_list(snapshot.memory, handler.backend.num_devices),
        "queue": [
            {
                "name": it.label.replace("_", " "),
                "requests": admission.requests_by_class[it],
                "tokens": admission.tokens_by_class[it],
            }
            for it in PriorityClass
        ],
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "paused": snapshot.paused,
        "kv_usage": snapshot.kv_usage,
        "changes": _changes(snapshot),
    }


def _instance(view: InstanceStatus) -> dict[str, Any]:
    placement = view.placement
    runs = [] if placement is None else placement.runs
    return {
        "id": view.id,
        "devices": view.devices,
        "degree": view.tensor_parallel_size,
        "phase": view.phase,
        "running": view.running,
        "paused": view.paused,
        "paused_degree": view.paused_degree,
        "kv_used_pages": view.kv_used_pages,
        "kv_total_pages": view.kv_total_pages,
        "kv_cached_pages": view.num_cached_pages,
        # Homes of the modules, without microbatches.
        "runs": [
            {
                "layers": [run.layers.start, run.layers.stop],
                "module": run.module,
                "homes": [[home.start, home.degree] for home in dict.fromkeys(run.homes)],
            }
            for run in runs
        ],
    }


def _device_list(memory: MemoryReport, num_devices: int) -> list[dict[str, Any]]:
    layers: list[dict[int, list[int]]] = [{} for _ in range(num_devices)]
    outside = [[0] * len(OWNERS) for _ in range(num_devices)]
    for entry in memory.entries:
        device, layer, padding = entry.device, entry.layer, entry.padding_bytes
        if layer is None:
            sizes = outside[device]
        elif (sizes := layers[device].get(layer)) is None:
            sizes = layers[device][layer] = [0] * len(OWNERS)
        sizes[OWNER_INDEX[entry.owner]] += entry.num_bytes - padding
        sizes[_PADDING] += padding
    return [
        {
            "device": device,
            "budget_bytes": memory.budget_bytes,
            "live_bytes": sum(outside[device]) + sum(map(sum, layers[device].values())),
            "reserved_bytes": memory.reserved_bytes[device],
            "kv_used_bytes": memory.kv_used_bytes[device],
            "kv_kept_bytes": memory.kv_kept_bytes[device] if memory.kv_kept_bytes else 0,
            # An empty list: the device has nothing of this layer.
            "layers": [layers[device].get(layer, []) for layer in range(max(layers[device], default=-1) + 1)],
            "outside": outside[device],
        }
        for device in range(num_devices)
    ]


def _changes(snapshot: Snapshot) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = [
        {
            "kind": "transform",
            "degree": it.tensor_parallel_size,
            "devices": it.devices,
            "state": it.state,
            "switched": it.layers_switched,
            "layers": it.num_layers,
            "programs_left": it.programs_left,
            "estimated_s": it.estimated_s,
        }
        for it in snapshot.stats.transformations
    ]
    for it in snapshot.stats.placements:
        first, end = it.layers
        changes.append(
            {
                "kind": it.kind,
                "instance": it.instance,
                "devices": [it.device],
                "first": first,
                "end": end,
                "state": it.state,
                "switched": it.layers_switched,
                "layers": end - first,
            }
        )
    return changes


def _second(row: Second, offset_s: float) -> list[float | None]:
    times = (None if it is None else round(it, 6) for it in row[2:])
    return [round(row.start_s + offset_s), row.tokens, *times]


def _decision(record: Record, offset_s: float) -> dict[str, Any]:
    return {
        "number": record.number,
        "at_s": round(record.at_s + offset_s, 3),
        "what": describe(record.action),
        "is_start": isinstance(record.action, Dispatch),
        "reason": _short(_REQUEST_ID.sub(r"\1", record.action.reason)),
        "outcome": record.outcome,
        "detail": _short(record.detail),
    }


def _short(text: str) -> str:
    """Return at most 300 characters of a text."""
    return text if len(text) <= 300 else f"{text[:297]}..."


def describe(action: Action) -> str:
    """Return an action of the scheduler in words, such as `merge devices 0-3 to TP4`."""
    match action:
        case Dispatch(request_id, instance):
            return f"start {request_id[:8]} on instance {instance}"
        case ScaleUp(devices, degree):
            return f"merge {_devices(devices)} to TP{degree}"
        case ScaleDown(devices, degree):
            return f"split {_devices(devices)} to TP{degree}"
        case Preempt(request_id):
            return f"preempt {request_id[:8]}"
        case Offload(request_id):
            return f"offload {request_id[:8]} to host memory"
        case Reject(request_id, kind):
            return f"reject {request_id[:8]}: {kind.value.replace('_', ' ')}"
        case Replicate(instance, layers, device):
            return f"replicate {_layers(layers)} of instance {instance} on device {device}"
        case Evict(instance, layers, device):
            return f"evict {_layers(layers)} of instance {instance} from device {device}"
        case Migrate(instance, layers, device):
            return f"migrate {_layers(layers)} of instance {instance} to device {device}"
        case ScaleOut(instance, device):
            return f"scale instance {instance} out to device {device}"
        case ScaleIn(instance, device):
            return f"end the instance on device {device} for instance {instance}"
        case LimitBatch(instance, size):
            return f"limit instance {instance} to {size or 'all'} requests"


def _devices(devices: Iterable[int]) -> str:
    given = list(devices)
    return f"device {given[0]}" if len(given) == 1 else f"devices {given[0]}-{given[-1]}"


def _layers(layers: tuple[int, int]) -> str:
    first, end = layers
    return f"layer {first}" if end - first == 1 else f"layers {first}-{end - 1}"
