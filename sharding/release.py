"""Which weight shards a device gives up for KV cache as the TP degree rises, in which order, and who has them then."""

from dataclasses import dataclass
from functools import lru_cache

from sharding.degrees import DEGREES
from sharding.params import ParamSpec


@dataclass(frozen=True)
class ReleasedShard:
    """One extent of a layer that holds KV pages in place of weights.

    Attributes:
        spec: the parameter.
        shards: the shard that it holds as weights, by the device's place among `max_tp` aligned ones.
        degree: the lowest degree at which it is released.
    """

    spec: ParamSpec
    shards: tuple[int, ...]
    degree: int

    @property
    def num_pages(self) -> int:
        return self.spec.stored_shape[0]


def released_shards(specs: tuple[ParamSpec, ...], max_tp: int) -> tuple[ReleasedShard, ...]:
    """Extents of a layer that can become KV cache, in the order in which they do.

    At degree `p` those whose `degree` is at most `p` are not needed by their device, at this degree or any higher one.
    All devices release as many, so that one program runs on all of them: where some need more shards than others (a
    rank of TP2 that at TP4 computes with a shard that is not among its two), the others keep as many.

    Args:
        specs: the layer's parameters that are stored as extents.
        max_tp: the largest degree.
    """
    released: list[ReleasedShard] = []
    for degree in DEGREES[1:]:
        if degree > max_tp:
            break
        for spec in specs:
            taken = [c.shards for c in released if c.spec is spec]
            spare = []
            for device in range(max_tp):
                needed = {c for p in DEGREES if degree <= p <= max_tp for c in spec.shard_indices(p, device % p)}
                gone = {shards[device] for shards in taken}
                # The nearest in the sense of a butterfly exchange first: so peers trade shards pairwise.
                spare.append(sorted(set(range(max_tp)) - needed - gone, key=lambda c, d=device: c ^ d))
            released += [ReleasedShard(spec, shards, degree) for shards in zip(*spare, strict=False)]
    return tuple(released)


@lru_cache(maxsize=1024)
def holder(spec: ParamSpec, tp: int, shard: int) -> tuple[int, int]:
    """`(rank, place)`: the rank that computes with `shard` at degree `tp`, and its place among that rank's shards."""
    for rank in range(tp):
        indices = spec.shard_indices(tp, rank)
        if shard in indices:
            return rank, indices.index(shard)
    raise ValueError(f"{spec.name} has no shard {shard}")
