"""Division of runs of layers into segments."""

from collections.abc import Sequence

from amoeba_jax.models.decoder import SegmentPlan, module_plan
from amoeba_jax.models.dims import ModelDims
from sharding.placement import ModuleKind


class SegmentCutter:
    """Cutter of runs of layers into segments.

    If a run contains a whole segment of the model, this segment is used. All other layers of the run become segments of
    one layer. The segments of all placements therefore have few different lengths.

    Args:
        dims: sizes of the model.
        segments: segments of the whole model, in order.
    """

    def __init__(self, dims: ModelDims, segments: Sequence[SegmentPlan]):
        self._dims = dims
        self._segments = {segment.start: segment.layers for segment in segments}

    def cut(self, layers: range, module: ModuleKind, *, embeds: bool) -> tuple[SegmentPlan, ...]:
        """Cut consecutive layers into segments, in order. Each segment has the given modules.

        `embeds` tells whether their programs can begin a step (`SegmentPlan.embeds`). Attention or FFN alone is always
        cut into single layers.
        """
        found, layer = [], layers.start
        while layer < layers.stop:
            whole = self._segments.get(layer)
            if module != "layer" or whole is None or whole.stop > layers.stop:
                whole = range(layer, layer + 1)
            found.append(module_plan(self._dims, whole, module, embeds=embeds))
            layer = whole.stop
        return tuple(found)
