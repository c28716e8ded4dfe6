"""Order in which the buffers of weight shards become KV cache as the tensor-parallel degree grows."""

from dataclasses import dataclass
from functools import lru_cache

from sharding.degrees import degrees_up_to
from sharding.params import ParamSpec


@dataclass(frozen=True)
class ReleasedShard:
    """One weight shard on each device. The buffers of these shards hold KV pages at higher tensor-parallel degrees.

    Attributes:
        spec: parameter of the shards.
        shards: index of the shard, for each device of an aligned group of `max_tp` devices. Devices may have different
            shards.
        degree: lowest tensor-parallel degree at which the buffers are KV cache.
    """

    spec: ParamSpec
    shards: tuple[int, ...]
    degree: int

    @property
    def num_pages(self) -> int:
        return self.spec.stored_shape[0]


def released_shards(specs: tuple[ParamSpec, ...], max_tp: int) -> tuple[ReleasedShard, ...]:
    """Return the weight shards of a layer whose buffers can become KV cache, in release order.

    At a degree p, a device keeps the shards that it needs at degree p or at a higher degree. It can release the others.

    All devices release equally many shards, so that one program suits all devices. For example, with `max_tp` 4, each
    device needs two of four shards at degree 2. If one device needs a third shard at degree 4, it must keep three
    shards. Every device then keeps three shards and releases one.

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
