"""Options of a transformation."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from amoeba_jax.transform.report import TransformVariant

LayersPerStep: TypeAlias = int | Literal["auto"]
"""Layers that switch between two steps, rounded up to whole segments. `"auto"`: one segment."""

ChangeOrder = Literal["layer", "memory_first"]
"""Order in which the modules of a group change. See `LLM.transform`."""

RunningRequests = Literal["migrate", "pause", "wait"]
"""Treatment of running requests. See `LLM.transform`."""


@dataclass(frozen=True)
class TransformOptions:
    """Arguments of `LLM.transform`, with devices."""

    tensor_parallel_size: int
    devices: tuple[int, ...]
    variant: TransformVariant = TransformVariant.IN_PLACE_OVERLAPPED
    release_weights: bool = True
    layers_per_step: LayersPerStep = "auto"
    running: RunningRequests = "migrate"
    order: ChangeOrder = "layer"
