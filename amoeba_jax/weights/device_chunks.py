"""The weights' chunks that one device has."""

from collections.abc import Iterator, Mapping

import jax

ChunkKey = tuple[str, int]
"""Parameter and index of a chunk."""

ReleaseKey = tuple[int, int]
"""Layer, and the degree for which its chunks are released together."""


class DeviceChunks(Mapping[ChunkKey, jax.Array]):
    """Chunks of one device, each a buffer of its own.

    Those that are released together are kept together: taking one array after the other out of a single mapping costs
    the host more than all else in a release.

    Args:
        releases: of each chunk that can be released, with which others it is.
    """

    def __init__(self, releases: Mapping[ChunkKey, ReleaseKey]):
        self._releases = releases
        self._chunks: dict[ReleaseKey | None, dict[ChunkKey, jax.Array]] = {}

    def __getitem__(self, key: ChunkKey) -> jax.Array:
        return self._chunks[self._releases.get(key)][key]

    def __setitem__(self, key: ChunkKey, chunk: jax.Array) -> None:
        self._chunks.setdefault(self._releases.get(key), {})[key] = chunk

    def __iter__(self) -> Iterator[ChunkKey]:
        for chunks in self._chunks.values():
            yield from chunks

    def __len__(self) -> int:
        return sum(len(chunks) for chunks in self._chunks.values())

    def take(self, release: ReleaseKey) -> dict[ChunkKey, jax.Array]:
        """Take out all chunks that are released together. Raises `KeyError` if they are not there."""
        return self._chunks.pop(release)

    def clear(self) -> None:
        """Drop all chunks."""
        self._chunks.clear()
