"""Buffers that the programs of a step update one after another: hidden states, and loads of experts.

Each device has buffers of its own. The load of an expert is the number of tokens that this expert has computed.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding.mesh import SubMesh, assemble, disassemble, is_lost


class StepStates(NamedTuple):
    """Hidden states and expert loads of a device group. Step programs take both as arguments, and return both updated.

    Attributes:
        hidden: hidden states, `[D, hidden_tokens]`, with one column for each token.
        loads: number of tokens that each expert of each layer has computed, `[layers, E]`. None: the model has no
            experts.
    """

    hidden: jax.Array
    loads: jax.Array | None


class DeviceBuffers:
    """Buffers of equal shape, one on each device. Used by the dispatcher thread only.

    If several instances have modules on a device, their steps use the buffer of this device one after another. The
    steps do not interfere, because all programs of a step are launched before any program of the next step.

    Programs take the buffers as donated arguments. `take` removes a buffer from this object before a program runs, and
    `put` stores the new buffer that the program returns.

    Args:
        shape: shape of each buffer.
        dtype: data type of the buffers.
    """

    def __init__(self, shape: tuple[int, int], dtype: str):
        self._shape, self._dtype = shape, dtype
        self._devices: dict[int, jax.Device] = {}
        self._arrays: dict[tuple[int, ...], jax.Array] = {}
        """Arrays by device indices. After a program on several devices, the buffers of these devices are one array."""

    def add(self, index: int, device: jax.Device) -> None:
        """Allocate the buffer of a device. Do nothing if the device already has a buffer.

        The call waits until the buffer is allocated. If memory is missing, this call raises the error.
        """
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
        """Take the buffers of a group's devices out of this object, and return the buffers as one array.

        If `replicated`, the array has the shape of one buffer, and each device has the whole array. Otherwise, the
        array is the concatenation of the buffers along the first axis.
        """
        indices = group.device_indices
        if replicated and (whole := self._arrays.pop(indices, None)) is not None:
            return whole
        self._take_apart(indices)
        return assemble(group, [self._arrays.pop((index,)) for index in indices], replicated=replicated)

    def put(self, group: SubMesh, array: jax.Array, *, replicated: bool = True) -> None:
        """Give each device of a group a new buffer. A later `take` returns these buffers.

        `array` lies on the devices of the group. If `replicated`, each device has the whole `array` as its buffer.
        Otherwise, `array` is the concatenation of the buffers along the first axis.
        """
        if replicated:
            self._arrays[group.device_indices] = array
        else:
            buffers = disassemble(group, array)
            self._arrays.update(((index,), buffer) for index, buffer in zip(group.device_indices, buffers, strict=True))

    def replace_lost(self, devices: Iterable[int]) -> None:
        """Replace each lost buffer on `devices` by a new buffer of zeros.

        A buffer is lost if it was donated to a program that has failed. The call waits until launched steps have ended.
        """
        for indices, array in list(self._arrays.items()):
            if not set(indices).isdisjoint(devices) and is_lost(array):
                del self._arrays[indices]
        present = {index for indices in self._arrays for index in indices}
        for index in devices:
            if index in self._devices and index not in present:
                self._arrays[(index,)] = jnp.zeros(self._shape, self._dtype, device=self._devices[index])

    def clear(self) -> None:
        """Drop all buffers."""
        self._arrays.clear()
        self._devices.clear()

    def _take_apart(self, devices: tuple[int, ...]) -> None:
        """Split each stored array that is on any of `devices` into single-device arrays."""
        for indices, array in list(self._arrays.items()):
            if len(indices) > 1 and not set(indices).isdisjoint(devices):
                del self._arrays[indices]
                shards = {shard.device: shard.data for shard in array.addressable_shards}
                self._arrays.update(((index,), shards[self._devices[index]]) for index in indices)


class ExpertLoads(DeviceBuffers):
    """Loads of experts: the number of tokens that each expert of each layer has computed.

    Each device has one buffer of counters, u32 `[layers, E]`. A program counts tokens only on the first rank of its
    home (device group). The experts of a layer are in the order of the weight shards (`ModelDims.expert_order`).
    `collect` takes the buffers, and gives each device a new buffer of zeros. Used by the dispatcher thread only.

    Attributes:
        totals: sum of all collected counters of each device, int64 `[layers, E]`, by device index.
    """

    def __init__(self, shape: tuple[int, int]):
        super().__init__(shape, "uint32")
        self.totals: dict[int, np.ndarray] = {}
        self._pending: list[tuple[int, Any]] = []

    def collect(self) -> list[jax.Array]:
        """Add the counters of the devices to `totals`, without waiting for launched steps.

        First take the buffers of all devices, and put buffers of zeros in their place. Skip this part if an earlier
        call has taken buffers that are not added yet. Then add each taken buffer that is already computed. Return the
        taken buffers that are not computed yet. Later calls add these buffers. Buffers that a failed program has lost
        are left out.
        """
        if not self._pending:
            self._take_apart(tuple(self._devices))
            self._pending = [(index, self._arrays[(index,)]) for index in self._devices if (index,) in self._arrays]
            for index, array in self._pending:
                self._arrays[(index,)] = jax.device_put(np.zeros(array.shape, array.dtype), self._devices[index])
        waiting = []
        for index, array in self._pending:
            if not array.is_deleted() and not array.is_ready():
                waiting.append((index, array))
            elif not is_lost(array):
                self.totals[index] = self.totals.get(index, 0) + np.asarray(array).astype(np.int64)
        self._pending = waiting
        return [array for _, array in waiting]


class HiddenStates(DeviceBuffers):
    """Hidden states: one buffer `[D, hidden_tokens]` on each device, with one column for each token.

    A step uses the first columns of the buffers.

    Attributes:
        loads: loads of experts on each device. None: the model has no experts.
    """

    def __init__(self, shape: tuple[int, int], dtype: str, load_shape: tuple[int, int] = (0, 0)):
        super().__init__(shape, dtype)
        self.loads = ExpertLoads(load_shape) if load_shape[1] else None

    def take_states(self, group: SubMesh) -> StepStates:
        """Take the hidden states and the expert loads of a device group out of this object, and return both."""
        return StepStates(self.take(group), None if self.loads is None else self.loads.take(group))

    def put_states(self, group: SubMesh, states: StepStates) -> None:
        """Store the hidden states and the expert loads that a program has returned for a device group."""
        self.put(group, states.hidden)
        if self.loads is not None and states.loads is not None:
            self.loads.put(group, states.loads)

    def add(self, index: int, device: jax.Device) -> None:
        super().add(index, device)
        if self.loads is not None:
            self.loads.add(index, device)

    def drop(self, index: int) -> None:
        super().drop(index)
        if self.loads is not None:
            self.loads.drop(index)

    def replace_lost(self, devices: Iterable[int]) -> None:
        devices = tuple(devices)
        super().replace_lost(devices)
        if self.loads is not None:
            self.loads.replace_lost(devices)

    def clear(self) -> None:
        super().clear()
        if self.loads is not None:
            self.loads.clear()
