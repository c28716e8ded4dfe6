"""The weights' shards that one device has."""

from collections.abc import Iterator, Mapping

import jax

ShardKey = tuple[str, int]
"""Parameter and index of a shard."""

ReleaseKey = tuple[int, int]
"""Layer, and the degree for which its shards are released together."""


class DeviceShards(Mapping[ShardKey, jax.Array]):
    """Shards of one device, each a buffer of its own.

    Those that are released together are kept together: taking one array after the other out of a single mapping costs
    the host more than all else in a release.

    Args:
        releases: of each shard that can be released, with which others it is.
    """

    def __init__(self, releases: Mapping[ShardKey, ReleaseKey]):
        self._releases = releases
        self._shards: dict[ReleaseKey | None, dict[ShardKey, jax.Array]] = {}

    def __getitem__(self, key: ShardKey) -> jax.Array:
        return self._shards[self._releases.get(key)][key]

    def __setitem__(self, key: ShardKey, shard: jax.Array) -> None:
        self._shards.setdefault(self._releases.get(key), {})[key] = shard

    def __iter__(self) -> Iterator[ShardKey]:
        for shards in self._shards.values():
            yield from shards

    def __len__(self) -> int:
        return sum(len(shards) for shards in self._shards.values())

    def take(self, release: ReleaseKey) -> dict[ShardKey, jax.Array]:
        """Take out all shards that are released together. Raises `KeyError` if they are not there."""
        return self._shards.pop(release)

    def clear(self) -> None:
        """Drop all shards."""
        self._shards.clear()
