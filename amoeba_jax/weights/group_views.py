"""Cache of weight arrays over the devices of a group."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import jax

from amoeba_jax.models.decoder import SegmentPlan
from sharding.mesh import SubMesh

T = TypeVar("T")
Place = tuple[int, bool]
"""Key of a view of a parameter: index of a shard among a rank's shards, and True if ranks have different shards."""


class GroupViews:
    """Cached views by group of devices. A view is an array over the devices. It shares the buffers of the shards.

    Building a view takes time, so a view is kept until one of its buffers changes. The methods `of_...` return dicts of
    cached views, and the caller adds new views to these dicts. The methods `forget_...` drop views.
    """

    def __init__(self) -> None:
        self._parameters: dict[tuple[int, int], dict[str, dict[Place, jax.Array]]] = {}
        self._segments: dict[tuple[int, int], dict[SegmentPlan, list[jax.Array]]] = {}
        self._extents: dict[tuple[int, int], dict[int, dict[int, jax.Array]]] = defaultdict(lambda: defaultdict(dict))

    def of_parameter(self, group: SubMesh, name: str) -> dict[Place, jax.Array]:
        """Return the cached views of a parameter on a group of devices, by `Place`. The caller adds missing views."""
        return self._parameters.setdefault((group.start, group.tp), {}).setdefault(name, {})

    def of_segments(self, group: SubMesh) -> dict[SegmentPlan, list[jax.Array]]:
        """Return the cached weight arguments of programs on a group of devices, by segment.

        The caller adds missing entries to the dict.
        """
        return self._segments.setdefault((group.start, group.tp), {})

    def of_extents(self, group: SubMesh, layer: int) -> dict[int, jax.Array]:
        """Return the cached views of those shards of a layer that can become KV cache, on a group of devices.

        The key of a view is the position of its shard in the order of release (`WeightLayout.released`). The caller
        adds missing views to the dict.
        """
        return self._extents[group.start, group.tp][layer]

    def forget_shards(self, group: SubMesh, layer: int, places: Iterable[int], degrees: Mapping[str, int]) -> None:
        """Drop the views of some shards of a layer. The shards become KV cache, or become weights again.

        Args:
            group: devices of the shards. Views on all groups that share a device with this group are dropped.
            layer: layer of the shards.
            places: positions of the shards in the order of release.
            degrees: lowest degree that needs none of the shards, by parameter name. Views on groups of this degree or a
                higher degree do not contain the shards and are kept.
        """
        for (_, tp), views in _over(group, self._parameters):
            for name, degree in degrees.items():
                if tp < degree:
                    views.pop(name, None)
        self._forget_segments(group, layer, max(degrees.values(), default=0))
        for _, layers in _over(group, self._extents):
            if extents := layers.get(layer):
                for place in places:
                    extents.pop(place, None)

    def forget_parameter(self, group: SubMesh, layer: int | None, name: str) -> None:
        """Drop all views of a parameter on all groups that share a device with `group`.

        On these groups, also drop the cached weight arguments of the segments that contain `layer`. If `layer` is None
        (the parameter belongs to no layer), drop the weight arguments of all segments.
        """
        for _, views in _over(group, self._parameters):
            views.pop(name, None)
        self._forget_segments(group, layer)

    def forget_parameter_on(self, device: int, layer: int | None, name: str) -> None:
        """Drop all views of a parameter on all groups that contain `device`.

        On these groups, also drop the cached weight arguments of the segments that contain `layer`, and the views of
        `of_extents` for this layer. If `layer` is None, drop the weight arguments of all segments.
        """
        for (start, tp), views in self._parameters.items():
            if start <= device < start + tp:
                views.pop(name, None)
        for (start, tp), segments in self._segments.items():
            if start <= device < start + tp:
                for plan in [plan for plan in segments if layer is None or layer in plan.layers]:
                    del segments[plan]
        if layer is not None:
            for (start, tp), layers in self._extents.items():
                if start <= device < start + tp:
                    layers.pop(layer, None)

    def _forget_segments(self, group: SubMesh, layer: int | None, below: int | None = None) -> None:
        """Drop the cached weight arguments of the segments that contain `layer`, or of all segments if `layer` is None.

        Only groups that share a device with `group` are affected. If `below` is given, only groups with fewer devices
        than `below` are affected.
        """
        for (_, tp), segments in _over(group, self._segments):
            if below is None or tp < below:
                for plan in [plan for plan in segments if layer is None or layer in plan.layers]:
                    del segments[plan]

    def clear(self) -> None:
        """Drop all views."""
        self._parameters.clear()
        self._segments.clear()
        self._extents.clear()


def _over(group: SubMesh, views: Mapping[tuple[int, int], T]) -> list[tuple[tuple[int, int], T]]:
    """Return the pairs `(key, value)` of `views` for all groups that share a device with `group`.

    A key is the index of the first device of a group, and the number of devices of the group.
    """
    first, stop = group.start, group.start + group.tp
    return [(key, found) for key, found in views.items() if key[0] < stop and first < key[0] + key[1]]
