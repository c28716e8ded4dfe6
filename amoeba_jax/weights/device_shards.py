"""Weight shards of one device."""

from collections.abc import Iterator, Mapping, MutableMapping

import jax

ShardKey = tuple[str, int]
"""Name of a parameter (`ParamSpec.name`), and index of the shard."""

ReleaseKey = tuple[int, int]
"""Key of the shards that become KV cache at once: their layer, and the lowest degree at which they are KV cache."""


class DeviceShards(MutableMapping[ShardKey, jax.Array]):
    """Weight shards of one device, each in its own buffer.

    Shards that become KV cache at the same time are in one inner dictionary, so that `take` removes all of them at
    once. Removing each shard from one large dictionary would take most of the time of a release.

    Args:
        releases: release key of each shard that can become KV cache. Shards with equal keys become KV cache together.
    """

    def __init__(self, releases: Mapping[ShardKey, ReleaseKey]):
        self._releases = releases
        self._shards: dict[ReleaseKey | None, dict[ShardKey, jax.Array]] = {}

    def __getitem__(self, key: ShardKey) -> jax.Array:
        return self._shards[self._releases.get(key)][key]

    def __setitem__(self, key: ShardKey, shard: jax.Array) -> None:
        self._shards.setdefault(self._releases.get(key), {})[key] = shard

    def __delitem__(self, key: ShardKey) -> None:
        del self._shards[self._releases.get(key)][key]

    def __iter__(self) -> Iterator[ShardKey]:
        for shards in self._shards.values():
            yield from shards

    def __len__(self) -> int:
        return sum(len(shards) for shards in self._shards.values())

    def take(self, release: ReleaseKey) -> dict[ShardKey, jax.Array]:
        """Remove and return all shards with this release key. Raises `KeyError` if the device has no such shard."""
        return self._shards.pop(release)

    def clear(self) -> None:
        """Drop all shards."""
        self._shards.clear()
