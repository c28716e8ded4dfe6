"""Weight shards that devices release to the KV cache at each TP degree, in order, and the ranks that keep them."""

from dataclasses import dataclass
from functools import lru_cache

from sharding.degrees import degrees_up_to
from sharding.params import ParamSpec


@dataclass(frozen=True)
class ReleasedShard:
    """Buffer of a layer on every device: it holds a weight shard, or KV pages after the shard is released.

    Attributes:
        spec: parameter of the shards.
        shards: index of the shard that each of `max_tp` neighboring devices holds in this buffer.
        degree: lowest degree at which the shards are released.
    """

    spec: ParamSpec
    shards: tuple[int, ...]
    degree: int

    @property
    def num_pages(self) -> int:
        return self.spec.stored_shape[0]


def released_shards(specs: tuple[ParamSpec, ...], max_tp: int) -> tuple[ReleasedShard, ...]:
    """Return the extents of a layer that can become KV cache, in the order of their release.

    A shard is released at the lowest degree from which on its device no longer needs it. All devices release the same
    number of shards at a degree, so that one program runs on all of them. Some devices need more shards than others: at
    TP2 a device keeps two shards, and a third if its TP4 shard is not one of the two. The other devices then keep as
    many.

    Args:
        specs: parameters of the layer that are stored as extents.
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
    """Return the rank that computes with `shard` at degree `tp`, and the index among the shards of this rank.

    Raises `ValueError` if the parameter has no such shard.
    """
    for rank in range(tp):
        indices = spec.shard_indices(tp, rank)
        if shard in indices:
            return rank, indices.index(shard)
    raise ValueError(f"{spec.name} has no shard {shard}")
