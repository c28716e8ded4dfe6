"""Aligned device groups and the meshes over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.degrees import DEGREES
from sharding.errors import LayoutError
from sharding.placement import Home

TP_AXIS = "tp"


@dataclass(frozen=True)
class SubMesh:
    """An aligned, contiguous group of 1, 2 or 4 devices that serves as one instance."""

    start: int
    devices: tuple[jax.Device, ...]
    # The first group of its degree; None for that one itself.
    _first: "SubMesh | None" = field(default=None, compare=False, repr=False)
    # Of the kinds of views that `assemble` has made.
    _avals: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree: the number of devices."""
        return len(self.devices)

    @property
    def first(self) -> "SubMesh":
        """The first group of its degree in the pool."""
        return self._first or self

    @cached_property
    def home(self) -> Home:
        """The group's name in placements."""
        return Home(self.start, self.tp)

    @cached_property
    def device_indices(self) -> tuple[int, ...]:
        """Places of the group's devices in the pool."""
        return tuple(range(self.start, self.start + self.tp))

    @cached_property
    def mesh(self) -> Mesh:
        """One-dimensional mesh over the group, axis `tp`."""
        return Mesh(np.array(self.devices), (TP_AXIS,), axis_types=(AxisType.Auto,))

    @cached_property
    def sharded(self) -> NamedSharding:
        """Leading axis split over the ranks."""
        return NamedSharding(self.mesh, PartitionSpec(TP_AXIS))

    @cached_property
    def replicated(self) -> NamedSharding:
        """Every rank holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def __str__(self) -> str:
        return f"TP{self.tp}{list(self.device_indices)}"


@dataclass(frozen=True)
class SubMeshPool:
    """All sub-meshes of a device list. Each is made once, so that equal groups share one `Mesh` object."""

    devices: tuple[jax.Device, ...]
    max_tp: int
    _cache: dict[tuple[int, int], SubMesh] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.devices) not in (1, 2, 4, 8):
            raise LayoutError(f"num_devices={len(self.devices)} is not supported: it must be 1, 2, 4 or 8")
        if self.max_tp not in DEGREES or self.max_tp > len(self.devices):
            raise LayoutError(
                f"max_tensor_parallel_size={self.max_tp} is not supported: it must be 1, 2 or 4 "
                f"and at most num_devices={len(self.devices)}"
            )

    def group(self, start: int, tp: int) -> SubMesh:
        """The group of `tp` devices from index `start`, which must be a multiple of `tp`."""
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
        """All groups of degree `tp`, side by side over all devices."""
        self.check_degree(tp)
        return tuple(self.group(start, tp) for start in range(0, len(self.devices), tp))

    def degrees(self) -> tuple[int, ...]:
        """Degrees that instances can have here."""
        return tuple(d for d in DEGREES if d <= self.max_tp)

    def check_degree(self, tp: int) -> None:
        """Raise `LayoutError` unless instances can have degree `tp`."""
        if tp not in self.degrees():
            raise LayoutError(f"tensor_parallel_size={tp} is not supported here: it must be one of {self.degrees()}")


def assemble(group: SubMesh, buffers: Sequence[jax.Array], *, replicated: bool = False) -> jax.Array:
    """View single-device buffers, one per rank and all of one shape, as one array. Copies nothing.

    Sharded: global shape `[tp * n, ...]`, rank r holding rows `r*n .. (r+1)*n`. Replicated: global shape `[n, ...]`.
    The only buffer of a group is its own view: JAX takes its sharding for that of a mesh of one device.

    JAX checks the first view of a kind. That takes four times as long as making one, so others are made by what it
    found, with an argument that JAX keeps to itself: a model changes its views all at once, as many as it has layers.
    Buffers of any other shapes or dtypes than the first one's are not found out then.
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
    """The single-device buffers behind an assembled array, in rank order. Copies nothing.

    Raises `RuntimeError` for an array of several devices that was donated or deleted.
    """
    if group.tp == 1:
        return [array]
    if array.is_deleted():
        raise RuntimeError(f"an array of shape {array.shape} has been deleted or donated")
    if not array.is_fully_replicated:
        # In the order of the mesh's devices. JAX keeps this to itself: `addressable_data` of each rank takes a fifth
        # longer, and making `addressable_shards` ten times as long.
        return list(array._arrays)  # type: ignore[attr-defined]
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in group.devices]


def is_lost(array: jax.Array) -> bool:
    """Whether an array's buffers are gone with a program that failed: donated to it, or never computed by it.

    Waits for the array.
    """
    if array.is_deleted():
        return True
    try:
        array.block_until_ready()
    except Exception:  # whatever the program failed with
        return True
    return False


def replaced_if_lost(arrays: Sequence[jax.Array], group: SubMesh) -> list[jax.Array]:
    """Arrays that are sharded over a group's ranks, with zeros in the place of those that are lost (see `is_lost`).

    To be asked before they are viewed with others: JAX then tells of the first rank's buffers alone.
    """
    return [jnp.zeros(a.shape, a.dtype, device=group.sharded) if is_lost(a) else a for a in arrays]
