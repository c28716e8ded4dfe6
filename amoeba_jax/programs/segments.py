"""Segments of arbitrary runs of layers."""

from collections.abc import Sequence

from amoeba_jax.models.decoder import SegmentPlan, module_plan
from amoeba_jax.models.dims import ModelDims
from sharding.placement import ModuleKind


class SegmentCutter:
    """Segments of runs of layers: the model's own segments if a run contains them whole, else single layers.

    Every placement is computed by programs of these lengths alone.

    Args:
        segments: segments of the whole model, in order.
    """

    def __init__(self, dims: ModelDims, segments: Sequence[SegmentPlan]):
        self._dims = dims
        self._segments = {segment.start: segment.layers for segment in segments}

    def cut(self, layers: range, module: ModuleKind, *, embeds: bool) -> tuple[SegmentPlan, ...]:
        """Return the segments of some consecutive layers."""
        found, layer = [], layers.start
        while layer < layers.stop:
            whole = self._segments.get(layer)
            if module != "layer" or whole is None or whole.stop > layers.stop:
                whole = range(layer, layer + 1)
            found.append(module_plan(self._dims, whole, module, embeds=embeds))
            layer = whole.stop
        return tuple(found)
