"""Sizes of a model's weights, and the shards that each degree releases. Needs no buffers."""

from collections import defaultdict
from dataclasses import dataclass

import jax.numpy as jnp

from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec
from sharding.release import ReleasedShard, released_shards


@dataclass(frozen=True)
class Padding:
    """Stored elements and model elements of one kind of parameter."""

    stored: int
    model: int

    @property
    def ratio(self) -> float:
        return self.stored / self.model


class WeightLayout:
    """Parameters of a model and their shards.

    Attributes:
        dims: sizes of the model.
        specs: all parameters by name.
    """

    def __init__(self, dims: ModelDims):
        self.dims = dims
        self.specs = model_specs(dims)
        by_layer: dict[int, list[ParamSpec]] = defaultdict(list)
        for spec in self.specs.values():
            if spec.layer is not None and spec.page_elems is not None:
                by_layer[spec.layer].append(spec)
        self._released = [released_shards(tuple(by_layer[i]), dims.max_tp) for i in range(dims.config.num_layers)]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return jnp.dtype(self.dims.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(spec.num_elements for spec in self.specs.values()) * self.itemsize

    def padding(self) -> dict[str, Padding]:
        """Return the cost of padding and copied heads, by kind of parameter (`attention.qkv`, `mlp.down` and so on)."""
        totals: dict[str, list[int]] = {}
        for spec in self.specs.values():
            total = totals.setdefault(spec.kind, [0, 0])
            total[0] += spec.num_elements
            total[1] += spec.model_elements
        return {kind: Padding(stored, model) for kind, (stored, model) in totals.items()}

    def released(self, layer: int, degree: int) -> tuple[ReleasedShard, ...]:
        """Return the shards of a layer that a degree releases to the KV cache, in the order of release."""
        return tuple(shard for shard in self._released[layer] if shard.degree <= degree)

    def extent_pages(self, degree: int) -> tuple[int, ...]:
        """Return the pages of each released shard of a layer at a degree. All layers have the same."""
        return tuple(shard.num_pages for shard in self.released(0, degree))
