"""Buffers of hidden states, one on each device. Each program of a step reads the result of the program before."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from sharding.mesh import SubMesh, assemble, disassemble, is_lost


class HiddenStates:
    """One buffer `[D, hidden_tokens]` for each device. Its first columns are the tokens of a step.

    All instances with modules on a device use its buffer in turn. This is possible because the programs of a step are
    launched one right after another. Programs get buffers donated: `take` removes a buffer, and `put` stores the buffer
    that the program returns. Used by the dispatcher thread only.

    Args:
        shape: shape of a buffer.
        dtype: data type of the buffers.
    """

    def __init__(self, shape: tuple[int, int], dtype: str):
        self._shape, self._dtype = shape, dtype
        self._devices: dict[int, jax.Device] = {}
        self._arrays: dict[tuple[int, ...], jax.Array] = {}
        """Arrays by their devices. After a program on several devices, their buffers are one array."""

    def add(self, index: int, device: jax.Device) -> None:
        """Allocate the buffer of a device. Wait for it, so that missing memory is found here."""
        if index not in self._devices:
            buffer = jnp.zeros(self._shape, self._dtype, device=device)
            self._arrays[(index,)] = jax.block_until_ready(buffer)
            self._devices[index] = device

    def drop(self, index: int) -> None:
        """Free the buffer of a device."""
        if index in self._devices:
            self._take_apart((index,))
            self._arrays.pop((index,), None)
            del self._devices[index]

    def take(self, group: SubMesh, *, replicated: bool = True) -> jax.Array:
        """Remove the buffers of a group, and return them as one array `[D, hidden_tokens]`.

        If `replicated` is False, the array has the shape `[tp * D, hidden_tokens]`.
        """
        indices = group.device_indices
        if replicated and (whole := self._arrays.pop(indices, None)) is not None:
            return whole
        self._take_apart(indices)
        return assemble(group, [self._arrays.pop((index,)) for index in indices], replicated=replicated)

    def put(self, group: SubMesh, array: jax.Array, *, replicated: bool = True) -> None:
        """Store the buffers of a group, given as an array in the form that `take` returns."""
        if replicated:
            self._arrays[group.device_indices] = array
        else:
            buffers = disassemble(group, array)
            self._arrays.update(((index,), buffer) for index, buffer in zip(group.device_indices, buffers, strict=True))

    def replace_lost(self, devices: Iterable[int]) -> None:
        """Put zeros in place of each buffer on these devices that a failed program has lost. Waits for steps."""
        for indices, array in list(self._arrays.items()):
            if not set(indices).isdisjoint(devices) and is_lost(array):
                del self._arrays[indices]
        present = {index for indices in self._arrays for index in indices}
        for index in devices:
            if index in self._devices and index not in present:
                self._arrays[(index,)] = jnp.zeros(self._shape, self._dtype, device=self._devices[index])

    def are_lost(self, devices: Iterable[int]) -> bool:
        """Return whether a failed program has lost the buffer of one of these devices. Waits for the launched steps."""
        found: set[int] = set()
        for indices, array in self._arrays.items():
            if not set(indices).isdisjoint(devices):
                if is_lost(array):
                    return True
                found.update(indices)
        return not found.issuperset(set(devices) & self._devices.keys())

    def clear(self) -> None:
        """Drop all buffers."""
        self._arrays.clear()
        self._devices.clear()

    def _take_apart(self, devices: tuple[int, ...]) -> None:
        """Split the stored arrays of these devices into one array for each device."""
        for indices, array in list(self._arrays.items()):
            if len(indices) > 1 and not set(indices).isdisjoint(devices):
                del self._arrays[indices]
                shards = {shard.device: shard.data for shard in array.addressable_shards}
                self._arrays.update(((index,), shards[self._devices[index]]) for index in indices)
