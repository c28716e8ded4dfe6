"""Options of `LLM.transform` and of the methods that change a placement."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from amoeba_jax.transform.report import TransformVariant

LayersPerStep: TypeAlias = int | Literal["auto"]
"""Number of layers that switch between two steps. It is rounded up to whole segments. `"auto"`: one segment."""

ChangeOrder = Literal["layer", "memory_first"]
"""Order in which the modules of a group change. See `LLM.transform`."""

RunningRequests = Literal["migrate", "pause", "wait"]
"""Treatment of running requests. See `LLM.transform`."""


PlacementKind = Literal["replicate", "evict", "migrate", "scale_out", "scale_in"]
"""Ways to change the placement of an instance. See the methods of `LLM` with these names."""

PlacementModules = Literal["layer", "attention", "ffn", "kv"]
"""Modules of a layer that change.

With `kv`, the KV cache and the attention over it move. The old device also keeps the attention weights.
"""


@dataclass(frozen=True)
class PlacementOptions:
    """Arguments of `LLM.replicate`, `evict`, `migrate`, `scale_out` and `scale_in`.

    A module is the attention or the FFN of a layer.

    Attributes:
        kind: name of the method.
        device: index of the device that gets modules. For `evict` and `scale_in`, the device that loses modules.
        instance: id of the instance that changes. For `scale_in`, the instance that takes over the sequences.
        layers: layers that change. None: all layers.
        modules: kinds of modules that change in these layers.
        move_kv: argument of `migrate`. If False, only FFNs move. The KV cache and the attention stay.
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
    """Arguments of `LLM.transform`, which describes them. If the caller named no devices, `devices` has all devices."""

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
        """Requested degree of the attention.

        With data-parallel attention, this degree is lower than `tensor_parallel_size`. Without it, the two are equal.
        """
        return self.tensor_parallel_size if self.attention_degree is None else self.attention_degree

    def is_reached_by(self, degree: int, attention_degree: int) -> bool:
        """Return whether these are the requested degrees of an instance and of its attention."""
        return (degree, attention_degree) == (self.tensor_parallel_size, self.attention)

    @property
    def name(self) -> str:
        return f"the transformation to TP{self.tensor_parallel_size}"
