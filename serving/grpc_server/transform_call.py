"""Transformations (merges and splits of instances) that clients request."""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from amoeba_jax.errors import LayoutError, MemoryBudgetError, RequestError
from amoeba_jax.transform.report import TransformReport, TransformVariant
from amoeba_jax.views import InstanceStatus
from serving.grpc_server.request_handler import RequestHandler, State
from serving.grpc_server.statuses import PreconditionError


def kinds_of(instances: Sequence[InstanceStatus], degree: int, devices: Collection[int]) -> list[str]:
    """Return the kinds of a transformation to `degree`, for the metrics.

    `scale_up`: an instance gets a higher degree. `scale_down`: an instance gets a lower degree. Both are possible in
    one transformation. If no degree changes, the only kind is `unchanged`.

    Args:
        instances: present instances.
        degree: tensor-parallel degree after the transformation.
        devices: devices of the instances to transform. Empty: all instances.
    """
    named = [i for i in instances if not devices or not set(devices).isdisjoint(i.devices)] or instances
    changes = {"scale_up": any(i.tensor_parallel_size < degree for i in named)}
    changes["scale_down"] = any(i.tensor_parallel_size > degree for i in named)
    return [kind for kind, changed in changes.items() if changed] or ["unchanged"]


async def transform_instances(
    handler: RequestHandler,
    degree: int,
    devices: Sequence[int],
    variant: TransformVariant = TransformVariant.IN_PLACE_OVERLAPPED,
    **options: Any,
) -> TransformReport:
    """Merge or split instances, and count the transformation in the metrics.

    If the calling task is cancelled, the transformation continues and is still counted.

    Args:
        degree: tensor-parallel degree after the transformation.
        devices: devices of the instances to transform. Empty: all devices.
        variant: method of the transformation.
        options: further arguments of `LLM.transform`.

    Raises:
        RequestError: there are more `devices` than the server has.
        PreconditionError: the transformation is not possible now. Nothing has changed.
        LimitError: too many transformations run or wait.
    """
    if len(devices) > (most := handler.backend.num_devices):
        raise RequestError(f"devices has {len(devices)} elements: this server has {most} devices")
    if handler.state is not State.READY:
        raise PreconditionError("the server is shutting down: instances can no longer be transformed")
    call = partial(handler.backend.transform, degree, list(devices) or None, variant, **options)
    return await asyncio.shield(asyncio.ensure_future(_counted(handler, call, degree, devices, variant)))


async def _counted(
    handler: RequestHandler,
    call: "partial[TransformReport]",
    degree: int,
    devices: Sequence[int],
    variant: TransformVariant,
) -> TransformReport:
    before = await handler.control(lambda: handler.backend.instances)
    kinds = kinds_of(before, degree, devices)
    try:
        report = await handler.transform(call)
    except Exception as error:
        refused = isinstance(error, LayoutError | RequestError | MemoryBudgetError)
        for kind in kinds:
            handler.metrics.not_transformed(kind, str(variant), "refused" if refused else "failed")
        if refused:
            raise PreconditionError(str(error)) from error
        raise
    handler.metrics.transformed(report)
    return report
