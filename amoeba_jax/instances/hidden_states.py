"""Buffers of hidden states that the programs of a step pass on, one on each device of an instance."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sharding.mesh import SubMesh, assemble, disassemble, is_lost


class HiddenStates:
    """One buffer `[D, hidden_tokens]` for each device, whose first columns are a step's tokens. Used by the dispatcher
    thread only.

    Programs take buffers donated: `take` removes them, and `put` stores the buffers that the program returns.

    Args:
        buffers: buffers by the index of their device.
    """

    def __init__(self, buffers: Mapping[int, jax.Array]):
        self._buffers: dict[int, jax.Array | None] = dict(buffers)
        first = next(iter(buffers.values()))
        self._shape, self._dtype = first.shape, first.dtype
        self._devices = {index: next(iter(buffer.devices())) for index, buffer in buffers.items()}
        self._whole: tuple[SubMesh, jax.Array] | None = None
        """All buffers as one array, if the latest program ran on all devices."""

    def take(self, group: SubMesh, *, replicated: bool = True) -> jax.Array:
        """Remove the buffers of a group of devices, as one array `[D, hidden_tokens]`.

        The array is `[tp * D, hidden_tokens]` if not `replicated`.
        """
        if self._whole is not None:
            if replicated and self._whole[0] is group:
                whole, self._whole = self._whole[1], None
                return whole
            self._disassemble()
        buffers = []
        for device in group.device_indices:
            buffer, self._buffers[device] = self._buffers[device], None
            if buffer is not None:
                buffers.append(buffer)
        return assemble(group, buffers, replicated=replicated)

    def put(self, group: SubMesh, array: jax.Array, *, replicated: bool = True) -> None:
        """Store the buffers of a group of devices, in the form in which `take` returns them."""
        if replicated and group.tp == len(self._buffers):
            self._whole = group, array
        else:
            self._buffers.update(zip(group.device_indices, disassemble(group, array), strict=True))

    def release(self, *, check: bool = True) -> dict[int, jax.Array]:
        """Remove all buffers, for the next instance on these devices.

        With `check`, lost buffers are replaced first, which waits for the launched steps.
        """
        if check:
            self.replace_lost()
        self._disassemble()
        return {device: buffer for device, buffer in self._buffers.items() if buffer is not None}

    def replace_lost(self) -> None:
        """Replace the buffers that failed programs have lost by zeros."""
        if self._whole is not None:
            if not is_lost(self._whole[1]):
                return
            self._whole, self._buffers = None, dict.fromkeys(self._buffers)
        for device, buffer in self._buffers.items():
            if buffer is None or is_lost(buffer):
                self._buffers[device] = jnp.zeros(self._shape, self._dtype, device=self._devices[device])

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has lost any buffer."""
        if self._whole is not None:
            return is_lost(self._whole[1])
        return any(buffer is None or is_lost(buffer) for buffer in self._buffers.values())

    def _disassemble(self) -> None:
        if self._whole is not None:
            group, array = self._whole
            self._buffers.update(zip(group.device_indices, disassemble(group, array), strict=True))
            self._whole = None
