"""Aligned groups of devices, their meshes, and arrays over them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.degrees import MAX_DEVICES, degrees_up_to, is_degree
from sharding.errors import LayoutError
from sharding.placement import Home

TP_AXIS = "tp"


@dataclass(frozen=True)
class SubMesh:
    """Aligned, contiguous group of devices that compute together. Created by `SubMeshPool`.

    Attributes:
        start: index in the pool of the first device of the group, a multiple of the number of devices in the group.
        devices: devices in rank order. The number of devices is a power of two.
    """

    start: int
    devices: tuple[jax.Device, ...]
    # The pool's first group of this degree, which starts at device 0. None if `start` is 0.
    _first: "SubMesh | None" = field(default=None, compare=False, repr=False)
    # Abstract values of arrays that `assemble` has made, by (replicated, shape, dtype) of their buffers.
    _avals: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree: the number of devices."""
        return len(self.devices)

    @property
    def first(self) -> "SubMesh":
        """Group of the same size that starts at device 0 of the pool."""
        return self._first or self

    @cached_property
    def home(self) -> Home:
        """The devices of this group as a `Home`, for placements (`sharding.placement`)."""
        return Home(self.start, self.tp)

    @cached_property
    def device_indices(self) -> tuple[int, ...]:
        """Indices of the devices in the pool."""
        return tuple(range(self.start, self.start + self.tp))

    @cached_property
    def mesh(self) -> Mesh:
        """One-dimensional mesh over the group, with the axis `tp`."""
        return Mesh(np.array(self.devices), (TP_AXIS,), axis_types=(AxisType.Auto,))

    @cached_property
    def sharded(self) -> NamedSharding:
        """Sharding that splits the leading axis over the ranks."""
        return NamedSharding(self.mesh, PartitionSpec(TP_AXIS))

    @cached_property
    def replicated(self) -> NamedSharding:
        """Sharding with the whole array on every rank."""
        return NamedSharding(self.mesh, PartitionSpec())

    def __str__(self) -> str:
        return f"TP{self.tp}{list(self.device_indices)}"


@dataclass(frozen=True)
class SubMeshPool:
    """Pool of devices, with all aligned groups of these devices. Each group is created once, with one `Mesh` object.

    Attributes:
        devices: all devices of the engine.
        max_tp: largest number of devices in a group.

    Raises `LayoutError` for an unsupported number of devices or `max_tp`.
    """

    devices: tuple[jax.Device, ...]
    max_tp: int
    _cache: dict[tuple[int, int], SubMesh] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not is_degree(len(self.devices)) or len(self.devices) > MAX_DEVICES:
            raise LayoutError(
                f"num_devices={len(self.devices)} is not supported: it must be a power of two, at most {MAX_DEVICES}"
            )
        if not is_degree(self.max_tp) or self.max_tp > len(self.devices):
            raise LayoutError(
                f"max_tensor_parallel_size={self.max_tp} is not supported: it must be a power of two "
                f"and at most num_devices={len(self.devices)}"
            )

    def group(self, start: int, tp: int) -> SubMesh:
        """Return the group of `tp` devices from index `start`.

        Raises `LayoutError` if `tp` is not a degree of this pool, `start` is not a multiple of `tp`, or the group ends
        after the last device.
        """
        self.check_degree(tp)
        if start % tp or not 0 <= start <= len(self.devices) - tp:
            raise LayoutError(
                f"devices {list(range(start, start + tp))} are not an aligned group: a TP{tp} instance starts "
                f"at a multiple of {tp} and ends within {len(self.devices)} devices"
            )
        key = (start, tp)
        if key not in self._cache:
            first = self.group(0, tp) if start else None
            self._cache[key] = SubMesh(start, self.devices[start : start + tp], first)
        return self._cache[key]

    def groups(self, tp: int) -> tuple[SubMesh, ...]:
        """Return the groups of `tp` devices that together cover all devices."""
        self.check_degree(tp)
        return tuple(self.group(start, tp) for start in range(0, len(self.devices), tp))

    def degrees(self) -> tuple[int, ...]:
        """Return the tensor-parallel degrees that instances of this pool can have."""
        return degrees_up_to(self.max_tp)

    def check_degree(self, tp: int) -> None:
        """Raise `LayoutError` if instances of this pool cannot have degree `tp`."""
        if tp not in self.degrees():
            raise LayoutError(f"tensor_parallel_size={tp} is not supported here: it must be one of {self.degrees()}")


def assemble(group: SubMesh, buffers: Sequence[jax.Array], *, replicated: bool = False) -> jax.Array:
    """Combine single-device buffers of equal shape, one for each rank, into one array. Copies nothing.

    At TP1, return the only buffer. JAX accepts it in place of an array over a mesh of one device.

    JAX checks the shapes and dtypes only in the first call for each combination of `replicated`, shape and dtype. If
    JAX checked them in each call, the checks would take 80% of the time of the call.

    Args:
        group: devices of the array.
        buffers: buffers `[n, ...]` in rank order.
        replicated: whether all buffers are equal copies. If True, the array has shape `[n, ...]`. If False, the array
            has shape `[tp * n, ...]`, and rank r has rows `range(r*n, (r+1)*n)`.
    """
    tp = len(group.devices)
    if tp == 1:
        return buffers[0]
    first = buffers[0]
    shape, sharding = first.shape, group.replicated if replicated else group.sharded
    kind = (replicated, shape, first.dtype)
    aval = group._avals.get(kind)
    if aval is not None:
        make: Any = type(first)
        return make(aval, sharding, list(buffers), committed=True, _skip_checks=True)
    whole = shape if replicated else (shape[0] * tp, *shape[1:])
    view = jax.make_array_from_single_device_arrays(whole, sharding, list(buffers))
    group._avals[kind] = view.aval
    return view


def disassemble(group: SubMesh, array: jax.Array) -> list[jax.Array]:
    """Return the single-device buffers of an array over the devices of `group`, in rank order. Copies nothing.

    Raises `RuntimeError` if the array was donated or deleted. This is not checked at TP1.
    """
    if group.tp == 1:
        return [array]
    if array.is_deleted():
        raise RuntimeError(f"an array of shape {array.shape} has been deleted or donated")
    if not array.is_fully_replicated:
        # A private attribute of JAX, in mesh order. `addressable_data` for each rank takes 20% longer,
        # `addressable_shards` ten times as long.
        return list(array._arrays)  # type: ignore[attr-defined]
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in group.devices]


def combine(group: SubMesh, arrays: Iterable[jax.Array], parts: Iterable[SubMesh]) -> jax.Array:
    """Combine arrays over smaller groups into one array over `group`, along the leading axis. Copies nothing.

    Args:
        group: devices of the result.
        arrays: one sharded array for each group of `parts`, all of equal shape.
        parts: groups of equal size that together make up `group`, in order.
    """
    return assemble(group, [b for part, array in zip(parts, arrays, strict=True) for b in disassemble(part, array)])


def divide(group: SubMesh, array: jax.Array, parts: Iterable[SubMesh]) -> list[jax.Array]:
    """Divide a sharded array over `group` into one array for each smaller group in `parts`. Copies nothing."""
    buffers, start = disassemble(group, array), group.start
    return [assemble(part, buffers[part.start - start : part.start - start + part.tp]) for part in parts]


def is_lost(array: jax.Array) -> bool:
    """Wait for an array. Return whether its contents are lost.

    The contents are lost if the array was donated or deleted, or if the program that should compute it failed.
    """
    if array.is_deleted():
        return True
    try:
        array.block_until_ready()
    except Exception:  # the error of the program, of any type
        return True
    return False


def replaced_if_lost(arrays: Sequence[jax.Array], group: SubMesh) -> list[jax.Array]:
    """Wait for all arrays. Return them, with zeros in place of each array whose contents are lost (`is_lost`).

    The zeros are sharded over the ranks of `group` along the leading axis. A lost array must have had this sharding.

    Call this function before the buffers of the arrays become part of other arrays (`assemble`). For an assembled
    array, JAX reports a failed program only in the buffer of the first rank.
    """
    return [jnp.zeros(a.shape, a.dtype, device=group.sharded) if is_lost(a) else a for a in arrays]
