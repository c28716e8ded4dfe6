"""Arrays over the devices of a group that share the buffers of the weights' shards."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import jax

from sharding.mesh import SubMesh

Place = tuple[int, bool]
"""Place among the shards that a rank computes with, and whether ranks have different ones."""


class GroupViews:
    """Views that are kept, by the group whose devices they span. A change of buffers forgets those that have them."""

    def __init__(self) -> None:
        self._parameters: dict[tuple[int, int], dict[str, dict[Place, jax.Array]]] = {}
        self._extents: dict[tuple[int, int], dict[int, dict[int, jax.Array]]] = defaultdict(lambda: defaultdict(dict))

    def of_parameter(self, group: SubMesh, name: str) -> dict[Place, jax.Array]:
        """Views of a parameter, to be looked up and added to."""
        return self._parameters.setdefault((group.start, group.tp), {}).setdefault(name, {})

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
        first, stop = group.start, group.start + group.tp
        for (start, tp), views in self._parameters.items():
            if start < stop and first < start + tp:
                for name, degree in degrees.items():
                    if tp < degree:
                        views.pop(name, None)
        for (start, tp), layers in self._extents.items():
            if start < stop and first < start + tp and (extents := layers.get(layer)):
                for place in places:
                    extents.pop(place, None)

    def forget_parameter(self, group: SubMesh, name: str) -> None:
        """Drop the views of a parameter that have buffers of a group's devices."""
        for (start, tp), views in self._parameters.items():
            if start < group.start + group.tp and group.start < start + tp:
                views.pop(name, None)

    def clear(self) -> None:
        """Drop all views."""
        self._parameters.clear()
        self._extents.clear()
