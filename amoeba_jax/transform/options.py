"""Options of a change."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from amoeba_jax.transform.report import TransformVariant

LayersPerStep: TypeAlias = int | Literal["auto"]
"""Layers that switch between two steps, rounded up to whole segments. `"auto"`: one segment."""

ChangeOrder = Literal["layer", "memory_first"]
"""Order in which the modules of a group change. See `LLM.transform`."""

RunningRequests = Literal["migrate", "pause", "wait"]
"""Treatment of running requests. See `LLM.transform`."""


PlacementKind = Literal["replicate", "evict", "migrate", "scale_out", "scale_in"]
"""Change of an instance's placement. See the methods of `LLM` with these names."""

PlacementModules = Literal["layer", "attention", "ffn", "kv"]
"""Modules of a layer that change. `kv`: the KV cache and the attention over it.

The old device keeps the weights too.
"""


@dataclass(frozen=True)
class PlacementOptions:
    """Arguments of `LLM.replicate`, `evict`, `migrate`, `scale_out` and `scale_in`.

    Attributes:
        kind: name of the method.
        device: device that gets modules, or loses them (`evict`, `scale_in`).
        instance: id of the instance. In `scale_in`, the instance that takes over the sequences.
        layers: layers that change. None: all layers.
        modules: modules of these layers.
        move_kv: whether the KV cache of migrated layers, and therefore their attention, moves too.
    """

    kind: PlacementKind
    device: int
    instance: int = 0
    layers: range | None = None
    modules: PlacementModules = "layer"
    move_kv: bool = True
    running: ClassVar[RunningRequests] = "migrate"

    @property
    def name(self) -> str:
        which = "" if self.layers is None else f" of layers {self.layers.start} to {self.layers.stop - 1}"
        return f"{self.kind}{which} (instance {self.instance}, device {self.device})"


@dataclass(frozen=True)
class TransformOptions:
    """Arguments of `LLM.transform`, with `devices` filled in."""

    tensor_parallel_size: int
    devices: tuple[int, ...]
    variant: TransformVariant = TransformVariant.IN_PLACE_OVERLAPPED
    release_weights: bool = True
    layers_per_step: LayersPerStep = "auto"
    running: RunningRequests = "migrate"
    order: ChangeOrder = "layer"
    attention_degree: int | None = None

    @property
    def attention(self) -> int:
        """Degree of the attention. It is less than `tensor_parallel_size` with data-parallel attention."""
        return self.tensor_parallel_size if self.attention_degree is None else self.attention_degree

    def is_reached_by(self, degree: int, attention_degree: int) -> bool:
        """Return whether an instance with these degrees does not change."""
        return (degree, attention_degree) == (self.tensor_parallel_size, self.attention)

    @property
    def name(self) -> str:
        return f"the transformation to TP{self.tensor_parallel_size}"
