"""Arrays over the devices of a group that share the buffers of the weights' shards."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import jax

from amoeba_jax.models.decoder import SegmentPlan
from sharding.mesh import SubMesh

T = TypeVar("T")
Place = tuple[int, bool]
"""Place among the shards that a rank computes with, and whether ranks have different ones."""


class GroupViews:
    """Views that are kept, by the group whose devices they span. A change of buffers forgets those that have them."""

    def __init__(self) -> None:
        self._parameters: dict[tuple[int, int], dict[str, dict[Place, jax.Array]]] = {}
        self._segments: dict[tuple[int, int], dict[SegmentPlan, list[jax.Array]]] = {}
        self._extents: dict[tuple[int, int], dict[int, dict[int, jax.Array]]] = defaultdict(lambda: defaultdict(dict))

    def of_parameter(self, group: SubMesh, name: str) -> dict[Place, jax.Array]:
        """Views of a parameter, to be looked up and added to."""
        return self._parameters.setdefault((group.start, group.tp), {}).setdefault(name, {})

    def of_segments(self, group: SubMesh) -> dict[SegmentPlan, list[jax.Array]]:
        """Views of parameters, as programs of segments take them, to be looked up and added to."""
        return self._segments.setdefault((group.start, group.tp), {})

    def of_extents(self, group: SubMesh, layer: int) -> dict[int, jax.Array]:
        """Views of a layer's shards that may be released, by their place in the order of release."""
        return self._extents[group.start, group.tp][layer]

    def forget_shards(self, group: SubMesh, layer: int, places: Iterable[int], degrees: Mapping[str, int]) -> None:
        """Drop what holds buffers of shards that change their owner on a group's devices.

        Args:
            places: of the shards, in the order of release.
            degrees: by parameter, the degree for which its shards are released. Views of this degree, and of higher
                ones, do not have them.
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
        """Drop the views of a parameter, of a layer or of none, that have buffers of a group's devices."""
        for _, views in _over(group, self._parameters):
            views.pop(name, None)
        self._forget_segments(group, layer)

    def _forget_segments(self, group: SubMesh, layer: int | None, below: int | None = None) -> None:
        """Drop the lists of segments with a layer (None: of all), of degrees below one (None: of all)."""
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
    """What there is of groups that have any of a group's devices."""
    first, stop = group.start, group.start + group.tp
    return [(key, found) for key, found in views.items() if key[0] < stop and first < key[0] + key[1]]
