"""Sizes of a model's weights and shards, and the shards that become KV cache at each degree. No buffers."""

from collections import defaultdict
from dataclasses import dataclass

import jax.numpy as jnp

from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.owners import Owner
from sharding.params import ParamSpec
from sharding.placement import Home, Placement
from sharding.release import ReleasedShard, released_shards


@dataclass(frozen=True)
class Padding:
    """Number of elements of one kind of parameter: as stored (with padding and copies), and in the model."""

    stored: int
    model: int

    @property
    def ratio(self) -> float:
        return self.stored / self.model


class WeightLayout:
    """Parameters of a model, and their division into shards.

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
        sizes = {tuple((shard.degree, shard.num_pages) for shard in released) for released in self._released}
        assert len(sizes) == 1, f"layers release shards of different sizes: {sizes}"

    @property
    def itemsize(self) -> int:
        """Bytes per element of a weight."""
        return jnp.dtype(self.dims.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters if each shard is stored once."""
        return sum(spec.num_elements for spec in self.specs.values()) * self.itemsize

    def shards_at(self, placement: Placement) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the indices of the shards that each device of a placement needs, by device and parameter name.

        A device needs the shards of its rank (`ParamSpec.shard_indices`) for the modules that its homes compute. The
        devices of `Placement.head` also need the embedding, the final norm and the output projection. If the embeddings
        are tied, the devices of the head need all shards of the projection, because each rank looks up the embeddings
        of all tokens.
        """
        found: dict[int, dict[str, set[int]]] = {device: defaultdict(set) for device in placement.devices}
        for name, spec in self.specs.items():
            for home, whole in self._homes(spec, placement):
                for rank, device in enumerate(home.devices):
                    indices = range(spec.num_shards) if whole else spec.shard_indices(home.degree, rank)
                    found[device][name].update(indices)
        return {
            device: {name: tuple(sorted(indices)) for name, indices in parameters.items()}
            for device, parameters in found.items()
        }

    def _homes(self, spec: ParamSpec, placement: Placement) -> set[tuple[Home, bool]]:
        """Return `(home, whole)` for each home that computes with a parameter.

        If `whole` is true, every rank of the home needs all shards.
        """
        if spec.layer is None:
            return {(placement.head, spec.owner is Owner.HEAD and self.dims.config.tied_embeddings)}
        modules = placement.attention if spec.kind.startswith("attention") else placement.ffn
        return {(home, False) for home in modules[spec.layer]}

    def padding(self) -> dict[str, Padding]:
        """Return the numbers of stored elements and of model elements, by kind of parameter (`attention.qkv` etc.)."""
        totals: dict[str, list[int]] = {}
        for spec in self.specs.values():
            total = totals.setdefault(spec.kind, [0, 0])
            total[0] += spec.num_elements
            total[1] += spec.model_elements
        return {kind: Padding(stored, model) for kind, (stored, model) in totals.items()}

    def released(self, layer: int, degree: int) -> tuple[ReleasedShard, ...]:
        """Return the shards of a layer that are KV cache at degree `degree`, in the order of release.

        Shards that are already KV cache at a lower degree are included. At degree 1, the result is empty.
        """
        return tuple(shard for shard in self._released[layer] if shard.degree <= degree)

    def extent_pages(self, degree: int) -> tuple[int, ...]:
        """Return the number of KV pages of each shard that is KV cache at degree `degree`, in the order of release.

        The numbers are the same for all layers.
        """
        return tuple(shard.num_pages for shard in self.released(0, degree))
