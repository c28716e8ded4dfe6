"""Division of consecutive layers into segments. Each segment is compiled as one program."""

from collections.abc import Sequence

from amoeba_jax.models.decoder import SegmentPlan, module_plan
from amoeba_jax.models.dims import ModelDims
from sharding.placement import ModuleKind


class SegmentCutter:
    """Object that cuts consecutive layers into segments.

    Layers that form a whole segment of the model become one segment. Each other layer becomes a segment of its own. For
    example, if the model has the segments 0-3, 4-7 and 8-11, the layers 2-9 become 2, 3, 4-7, 8 and 9. The segments of
    all placements therefore have few different lengths.

    Args:
        dims: sizes of the model.
        segments: segments of the whole model, in order.
    """

    def __init__(self, dims: ModelDims, segments: Sequence[SegmentPlan]):
        self._dims = dims
        self._segments = {segment.start: segment.layers for segment in segments}

    def cut(self, layers: range, module: ModuleKind, *, embeds: bool) -> tuple[SegmentPlan, ...]:
        """Return the segments of consecutive layers, in order.

        With `module="attention"` or `module="ffn"`, each layer is a segment of its own.

        Args:
            layers: layers to cut.
            module: modules of each layer that the segments compute.
            embeds: whether the programs of the segments can begin a step with the embeddings (`SegmentPlan.embeds`).
        """
        found, layer = [], layers.start
        while layer < layers.stop:
            whole = self._segments.get(layer)
            if module != "layer" or whole is None or whole.stop > layers.stop:
                whole = range(layer, layer + 1)
            found.append(module_plan(self._dims, whole, module, embeds=embeds))
            layer = whole.stop
        return tuple(found)
