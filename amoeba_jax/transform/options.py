"""Options of `LLM.transform` and of the methods that change a placement."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from amoeba_jax.transform.report import TransformVariant

LayersPerStep: TypeAlias = int | Literal["auto"]
"""Number of layers that switch between two steps, rounded up to whole segments. `"auto"`: the layers of one segment."""

ChangeOrder = Literal["layer", "memory_first"]
"""Order in which the modules (attention and FFNs) of a group of devices change. See `LLM.transform`."""

RunningRequests = Literal["migrate", "pause", "wait"]
"""Treatment of running requests during a transformation. See `LLM.transform`."""


PlacementKind = Literal["replicate", "evict", "migrate", "scale_out", "scale_in"]
"""Name of the `LLM` method that changes the placement of an instance."""

PlacementModules = Literal["layer", "attention", "ffn", "kv"]
"""Modules of a layer that change.

With `kv`, the attention moves with its KV cache, and the old device keeps a copy of the attention weights.
"""


@dataclass(frozen=True)
class PlacementOptions:
    """Arguments of `LLM.replicate`, `evict`, `migrate`, `scale_out` and `scale_in`.

    Attributes:
        kind: name of the method.
        device: index of the device that gets modules (attention or FFNs of layers). In an `evict` or `scale_in`: index
            of the device that loses modules.
        instance: id of the instance that changes, or that takes over the sequences in a `scale_in`.
        layers: range of the indices of the layers that change. None: all layers.
        modules: kinds of modules that change in these layers.
        move_kv: whether attention and KV cache move in a `migrate`. If False, only FFNs move.
        running: treatment of running requests, the same for all of these methods.
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
    """Arguments of `LLM.transform` (described there). If the caller named no devices, `devices` has all devices."""

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

        If data-parallel attention is requested, this degree is lower than `tensor_parallel_size`. Otherwise, it is
        equal to `tensor_parallel_size`.
        """
        return self.tensor_parallel_size if self.attention_degree is None else self.attention_degree

    def is_reached_by(self, degree: int, attention_degree: int) -> bool:
        """Return whether an instance of degree `degree` with attention of degree `attention_degree` need not change."""
        return (degree, attention_degree) == (self.tensor_parallel_size, self.attention)

    @property
    def name(self) -> str:
        return f"the transformation to TP{self.tensor_parallel_size}"
