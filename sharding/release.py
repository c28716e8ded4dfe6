"""Order of the release of weight shards: the buffers of shards become KV cache as the tensor-parallel degree grows."""

from dataclasses import dataclass
from functools import lru_cache

from sharding.degrees import degrees_up_to
from sharding.params import ParamSpec


@dataclass(frozen=True)
class ReleasedShard:
    """Buffer of a layer that can become KV cache. Every device has this buffer.

    The buffer holds a weight shard first, and KV pages after its release.

    Attributes:
        spec: parameter of the shards.
        shards: index of the shard in this buffer, for each device of an aligned group of `max_tp` devices. Devices may
            hold different shards.
        degree: lowest tensor-parallel degree at which the buffer is KV cache.
    """

    spec: ParamSpec
    shards: tuple[int, ...]
    degree: int

    @property
    def num_pages(self) -> int:
        return self.spec.stored_shape[0]


def released_shards(specs: tuple[ParamSpec, ...], max_tp: int) -> tuple[ReleasedShard, ...]:
    """Return the weight buffers of a layer that can become KV cache, in the order of their release.

    A device can release a shard at a tensor-parallel degree if it needs the shard neither at this degree nor at a
    higher degree.

    All devices release equally many shards at a degree, so that one program suits all devices. The device that needs
    the most shards therefore decides how many shards every device keeps. For example, with `max_tp` 4, a device needs
    two shards at degree 2. If its shard of degree 4 is not one of the two, it needs a third shard, and every device
    keeps three.

    Args:
        specs: parameters of the layer that are stored as KV pages.
        max_tp: largest degree.
    """
    released: list[ReleasedShard] = []
    degrees = degrees_up_to(max_tp)
    for degree in degrees[1:]:
        for spec in specs:
            taken = [c.shards for c in released if c.spec is spec]
            spare = []
            for device in range(max_tp):
                needed = {c for p in degrees if p >= degree for c in spec.shard_indices(p, device % p)}
                gone = {shards[device] for shards in taken}
                # Sorted by distance in a butterfly exchange, so that peers trade shards in pairs.
                spare.append(sorted(set(range(max_tp)) - needed - gone, key=lambda c, d=device: c ^ d))
            released += [ReleasedShard(spec, shards, degree) for shards in zip(*spare, strict=False)]
    return tuple(released)


@lru_cache(maxsize=1024)
def holder(spec: ParamSpec, tp: int, shard: int) -> tuple[int, int]:
    """Return `(rank, index)` of a shard at tensor-parallel degree `tp`.

    `rank` is the first rank that computes with the shard. `index` is the index of the shard among the shards of this
    rank.

    Raises `ValueError` if the parameter has no such shard.
    """
    for rank in range(tp):
        indices = spec.shard_indices(tp, rank)
        if shard in indices:
            return rank, indices.index(shard)
    raise ValueError(f"{spec.name} has no shard {shard}")
