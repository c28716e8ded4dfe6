"""Weights on all devices. Each shard is in a buffer of its own."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from amoeba_jax.models.decoder import Segment, SegmentPlan, is_sharded, leaf_variables
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.weights.device_shards import DeviceShards, ReleaseKey, ShardKey
from amoeba_jax.weights.group_views import GroupViews
from amoeba_jax.weights.layout import WeightLayout
from amoeba_jax.weights.loading import Parameters, WeightReader, put, read_ahead, staging_bytes
from sharding.ledger import Ledger
from sharding.mesh import SubMesh, assemble, disassemble
from sharding.owners import Owner
from sharding.params import ParamSpec
from sharding.placement import ModuleKind
from sharding.release import ReleasedShard


@dataclass(frozen=True)
class _Change:
    """Shards of one layer that become KV cache or weights together, on the devices of one group.

    Attributes:
        places: positions of the shards in the order of release.
        keys: keys of the shards: `keys[rank][i]` is for the shard of rank `rank` at position `places[i]`.
        releases: release keys of the shards (`DeviceShards.take`).
        sizes: bytes of the shards on one device, by owner. The bytes are equal on all devices.
        degrees: lowest degree that needs none of the shards, by parameter name.
    """

    places: tuple[int, ...]
    keys: tuple[tuple[ShardKey, ...], ...]
    releases: tuple[ReleaseKey, ...]
    sizes: dict[Owner, int]
    degrees: dict[str, int]


class WeightStore(WeightLayout):
    """Weight shards of all devices. The weight arguments of programs share the buffers of the shards."""

    def __init__(self, dims: ModelDims, devices: tuple[jax.Device, ...]):
        super().__init__(dims)
        self.devices = devices
        self._views = GroupViews()
        self._ledgers: list[Ledger] = []
        self._leaves: dict[tuple[SegmentPlan, int], list[tuple[ParamSpec, int, bool]]] = {}
        self._changes: dict[tuple[int, int, int, int, int], _Change] = {}
        self._shards = [DeviceShards(self._releases(device)) for device in range(len(devices))]

    def padding_bytes(self, device: int) -> dict[tuple[int | None, str], int]:
        """Return the number of bytes of padding and copied heads on a device, by layer and owner.

        Shards whose memory is KV cache do not count. The padding of a parameter is divided equally among its shards.
        """
        totals: dict[tuple[int | None, str], int] = defaultdict(int)
        for name, spec in self.specs.items():
            present = sum((name, index) in self._shards[device] for index in range(spec.num_shards))
            padding = (spec.num_elements - spec.model_elements) * self.itemsize
            totals[(spec.layer, spec.owner)] += padding * present // spec.num_shards
        return totals

    def load(
        self,
        reader: WeightReader,
        ledgers: list[Ledger],
        on_load: Callable[[str], None],
        wanted: Mapping[int, Mapping[str, Collection[int]]] | None = None,
    ) -> None:
        """Copy every parameter to its devices, and record the bytes in the memory ledgers of these devices.

        If reading or `on_load` fails, all shards are dropped again.

        Args:
            reader: source of the weights.
            ledgers: ledger of each device. The store keeps them for later changes.
            on_load: function that is called with the name of each parameter when it is on its devices.
            wanted: indices of the shards that each device gets, by device and parameter. None: every device gets all
                shards.
        """
        self._ledgers = ledgers
        try:
            with closing(self._read(reader)) as parameters:
                for spec, shards in parameters:
                    name = spec.name
                    where = [
                        [
                            d
                            for d in range(len(self.devices))
                            if wanted is None or index in wanted.get(d, {}).get(name, ())
                        ]
                        for index in range(len(shards))
                    ]
                    for shard, indices in zip(shards, where, strict=True):
                        for device in indices:
                            ledgers[device].add(spec.owner, shard.nbytes, spec.layer)
                    copies = put(shards, [[self.devices[device] for device in indices] for indices in where])
                    for index, (indices, buffers) in enumerate(zip(where, copies, strict=True)):
                        for device, buffer in zip(indices, buffers, strict=True):
                            self._shards[device][(name, index)] = buffer
                    del shards, copies  # where they are large, their memory is not there to be used again
                    on_load(name)
        except BaseException:
            self.release_all()
            raise

    def _read(self, reader: WeightReader) -> Parameters:
        """Yield every parameter with its shards. The shards are valid until the next parameter is requested.

        Parameters that belong to no layer come first, in descending order of size. They may need extra host memory. At
        the start, most host memory is still free.
        """
        dtype = jnp.dtype(self.dims.dtype)
        order = sorted(self.specs.values(), key=lambda it: 0 if it.layer is not None else -it.num_elements)
        slot_bytes = max(staging_bytes(spec, dtype) for spec in order if spec.layer is not None)
        return read_ahead(order, reader, dtype, slot_bytes)

    def reload(self, reader: WeightReader, group: SubMesh, degrees: Sequence[int]) -> None:
        """Read the weights of a group of devices again, except shards that are KV cache.

        Each shard is replaced only when its new buffer is ready. If reading fails, the group still has a buffer of each
        shard that it had before. Shards that the group did not have before are added at the end.

        Args:
            reader: source of the weights.
            group: devices to read for.
            degrees: tensor-parallel degree of each rank. Shards that are KV cache at this degree (`released`) are not
                read.
        """
        back: list[dict[ShardKey, jax.Array]] = [{} for _ in group.devices]
        with closing(self._read(reader)) as parameters:
            for spec, shards in parameters:
                name, layer = spec.name, spec.layer
                wanted = [set(range(len(shards))) for _ in group.devices]
                for rank, degree in enumerate(degrees):
                    for released in self.released(layer, degree) if layer is not None else ():
                        if released.spec.name == name:
                            wanted[rank].discard(self._shard_on(released, group.device_indices[rank]))
                self._forget_parameter(group, layer, name)
                for index, shard in enumerate(shards):
                    ranks = [rank for rank, indices in enumerate(wanted) if index in indices]
                    (copies,) = put([shard], [[group.devices[rank] for rank in ranks]])
                    for rank, copy in zip(ranks, copies, strict=True):
                        present = self._shards[group.device_indices[rank]]
                        (present if (name, index) in present else back[rank])[(name, index)] = copy
        for rank, device in enumerate(group.device_indices):
            for (name, index), buffer in back[rank].items():
                spec = self.specs[name]
                self._shards[device][(name, index)] = buffer
                self._ledgers[device].transfer(Owner.KV_CACHE, spec.owner, buffer.nbytes, spec.layer)

    def view(self, group: SubMesh, plan: SegmentPlan) -> list[jax.Array]:
        """Return the weight arguments of a segment (compiled part of the model) on a group of devices.

        The list has the order of the program's arguments. The arrays share the buffers of the shards, without a copy.
        The list is cached until one of the shards changes. Do not change the list.
        """
        segments = self._views.of_segments(group)
        if (found := segments.get(plan)) is not None:
            return found
        arrays: list[jax.Array] = []
        for spec, place, sharded in self._segment_leaves(plan, group.tp):
            if sharded:
                arrays.append(self.assembled(group, spec, place))
                continue
            views = self._views.of_parameter(group, spec.name)
            key = (place, sharded)
            if key not in views:
                buffers = [self._shards[device][(spec.name, place)] for device in group.device_indices]
                views[key] = assemble(group, buffers, replicated=True)
            arrays.append(views[key])
        segments[plan] = arrays
        return arrays

    def assembled(self, group: SubMesh, spec: ParamSpec, place: int) -> jax.Array:
        """Return one array over the devices of a group, made of one shard of each rank, without a copy.

        `place` is the index of the shard among the shards that a rank computes with.
        """
        views = self._views.of_parameter(group, spec.name)
        key = (place, True)
        if key not in views:
            buffers = [
                self._shards[device][(spec.name, spec.shard_indices(group.tp, rank)[place])]
                for rank, device in enumerate(group.device_indices)
            ]
            views[key] = assemble(group, buffers)
        return views[key]

    def _segment_leaves(self, plan: SegmentPlan, tp: int) -> list[tuple[ParamSpec, int, bool]]:
        """Return `(spec, index, is_sharded)` for each weight argument of a segment, in the order of the arguments.

        `index` is the index of the shard among the shards of a rank. `is_sharded` tells whether ranks have different
        shards.
        """
        if (plan, tp) not in self._leaves:
            leaves = []
            for variable in leaf_variables(Segment(self.dims, plan, tp)):
                metadata = variable.get_metadata()
                leaves.append((metadata["spec"], metadata["shard"], is_sharded(variable)))
            self._leaves[plan, tp] = leaves
        return self._leaves[plan, tp]

    # Modules that move between devices

    def specs_of(self, layer: int | None, module: ModuleKind = "layer") -> list[ParamSpec]:
        """Return the parameters of a layer, or of its attention or FFN (`module`).

        If `layer` is None, return the parameters that belong to no layer.
        """
        return [
            spec
            for spec in self.specs.values()
            if spec.layer == layer
            and (layer is None or module == "layer" or spec.kind.startswith("attention") == (module == "attention"))
        ]

    def bytes_to_copy(self, device: int, layer: int | None, module: ModuleKind = "layer") -> int:
        """Return the number of bytes that must be copied to a device, so that the device can compute a layer alone.

        `module` selects the whole layer, its attention or its FFN. `layer` None: weights that belong to no layer.
        """
        return sum(
            self.any_shard(spec.name, index).nbytes
            for spec in self.specs_of(layer, module)
            for index in range(spec.num_shards)
            if (spec.name, index) not in self._shards[device]
        )

    def held_bytes(self, device: int, layer: int | None, module: ModuleKind = "layer") -> int:
        """Return the number of bytes of a layer's weights that a device holds.

        `module` selects the whole layer, its attention or its FFN. `layer` None: weights that belong to no layer.
        """
        return sum(
            self._shards[device][spec.name, index].nbytes
            for spec in self.specs_of(layer, module)
            for index in range(spec.num_shards)
            if (spec.name, index) in self._shards[device]
        )

    def copy_modules(self, device: int, layer: int | None, module: ModuleKind = "layer") -> list[jax.Array]:
        """Copy the missing weights of a layer, or of its attention or FFN (`module`), to a device.

        Return the new buffers. The copies may still run when this method returns. If `layer` is None, copy the weights
        that belong to no layer.

        Raises `MemoryBudgetError` if a shard does not fit. Shards that were copied before the error stay on the device.
        """
        copies: list[jax.Array] = []
        for spec in self.specs_of(layer, module):
            for index in range(spec.num_shards):
                key = spec.name, index
                if key in self._shards[device]:
                    continue
                source = self.any_shard(*key)
                self._ledgers[device].add(spec.owner, source.nbytes, layer)
                try:
                    self._shards[device][key] = copy = jax.device_put(source, self.devices[device])
                except BaseException:
                    self._ledgers[device].remove(spec.owner, source.nbytes, layer)
                    raise
                copies.append(copy)
            self._forget_on(device, spec)
        return copies

    def drop_modules(self, device: int, layer: int | None, module: ModuleKind = "layer") -> None:
        """Drop the weights of a layer, or of its attention or FFN (`module`), on a device."""
        for spec in self.specs_of(layer, module):
            for index in range(spec.num_shards):
                if (spec.name, index) in self._shards[device]:
                    self._ledgers[device].remove(spec.owner, self._shards[device][spec.name, index].nbytes, layer)
                    del self._shards[device][spec.name, index]
            self._forget_on(device, spec)

    def _forget_on(self, device: int, spec: ParamSpec) -> None:
        self._views.forget_parameter_on(device, spec.layer, spec.name)

    # Shards that are KV extents at higher degrees

    def prepare_release(self, group: SubMesh, before: int, degree: int) -> None:
        """Build and cache the arrays that `release` returns for the same `before` and `degree`, for all layers.

        Building the arrays is the slowest part of `release`.
        """
        for layer in range(self.dims.config.num_layers):
            change, views = self._change(group, layer, before, degree), self._views.of_extents(group, layer)
            for index, place in enumerate(change.places):
                if place not in views:
                    views[place] = assemble(group, self._held(group, change, index))

    def release(
        self, group: SubMesh, layer: int, before: int, degree: int, spent: list[Any] | None = None
    ) -> list[jax.Array]:
        """Turn the shards that `degree` does not need into KV cache. Return them as extents `[tp * pages, page_elems]`.

        An extent is a KV buffer over all devices of the group. The extents share the buffers of the shards, without a
        copy. The store no longer has the shards.

        Args:
            group: devices to release on.
            layer: layer of the shards.
            before: tensor-parallel degree so far. Shards that this degree does not need are KV cache already.
            degree: tensor-parallel degree from now on, at least `before` and at most the degree of `group`.
            spent: list to which the weight arrays are appended. The caller can drop them at a better time, because
                dropping takes time.
        """
        change, views = self._change(group, layer, before, degree), self._views.of_extents(group, layer)
        extents = [
            views[place] if place in views else assemble(group, self._held(group, change, index))
            for index, place in enumerate(change.places)
        ]
        for device in group.device_indices:
            shards, ledger = self._shards[device], self._ledgers[device]
            taken = [shards.take(release) for release in change.releases]
            if spent is not None:
                spent += taken
            for owner, size in change.sizes.items():
                ledger.transfer(owner, Owner.KV_CACHE, size, layer)
        self._views.forget_shards(group, layer, change.places, change.degrees)
        return extents

    def put_back(self, group: SubMesh, layer: int, before: int, degree: int, extents: list[jax.Array]) -> None:
        """Turn KV extents into weight shards again. The caller has already written the weights into the extents.

        The shards are those that degree `degree` needs and degree `before` does not need. `extents` has one extent for
        each of these shards, in the order of release.
        """
        change = self._change(group, layer, degree, before)
        self._views.forget_shards(group, layer, change.places, change.degrees)
        self._views.of_extents(group, layer).update(zip(change.places, extents, strict=True))
        buffers = zip(*(disassemble(group, extent) for extent in extents), strict=True)
        for device, keys, own in zip(group.device_indices, change.keys, buffers, strict=True):
            for key, shard in zip(keys, own, strict=True):
                self._shards[device][key] = shard
            for owner, size in change.sizes.items():
                self._ledgers[device].transfer(Owner.KV_CACHE, owner, size, layer)

    def _held(self, group: SubMesh, change: _Change, index: int) -> list[jax.Array]:
        """Return the buffer that each rank has for the shard at `change.places[index]`."""
        return [
            self._shards[device][keys[index]] for device, keys in zip(group.device_indices, change.keys, strict=True)
        ]

    def _change(self, group: SubMesh, layer: int, before: int, degree: int) -> _Change:
        """Return the shards of a layer that degree `before` needs and degree `degree` does not need. Cached."""
        key = (group.start, group.tp, layer, before, degree)
        if key not in self._changes:
            released = self.released(layer, degree)
            num_before = len(self.released(layer, before))
            sizes: dict[Owner, int] = defaultdict(int)
            degrees: dict[str, int] = {}
            for shard in released[num_before:]:
                name = shard.spec.name
                elements = shard.spec.num_elements // shard.spec.num_shards
                sizes[shard.spec.owner] += elements * self.itemsize
                degrees[name] = max(shard.degree, degrees.get(name, 1))
            keys = tuple(
                tuple((shard.spec.name, self._shard_on(shard, device)) for shard in released[num_before:])
                for device in group.device_indices
            )
            releases = tuple({(layer, shard.degree): None for shard in released[num_before:]})
            places = tuple(range(num_before, len(released)))
            self._changes[key] = _Change(places, keys, releases, dict(sizes), degrees)
        return self._changes[key]

    def _releases(self, device: int) -> dict[ShardKey, ReleaseKey]:
        """Return the release keys of the shards on a device. Shards that never become KV cache have no release key."""
        return {
            (shard.spec.name, self._shard_on(shard, device)): (layer, shard.degree)
            for layer, released in enumerate(self._released)
            for shard in released
        }

    def _shard_on(self, released: ReleasedShard, device: int) -> int:
        return released.shards[device % self.dims.max_tp]

    def released_on(self, device: int, layer: int) -> int:
        """Return the highest degree at which shards of a layer were released on a device. 1: none were released."""
        shards, held = self.released(layer, self.dims.max_tp), self._shards[device]
        missing = [shard for shard in shards if (shard.spec.name, self._shard_on(shard, device)) not in held]
        return max((shard.degree for shard in missing), default=1)

    def _forget_parameter(self, group: SubMesh, layer: int | None, name: str) -> None:
        """Drop all cached arrays of a parameter on the devices of a group, including arrays that serve as KV cache."""
        self._views.forget_parameter(group, layer, name)
        if layer is not None:
            every = enumerate(self.released(layer, self.dims.max_tp))
            self._views.forget_shards(group, layer, [place for place, shard in every if shard.spec.name == name], {})

    def shard(self, device: int, name: str, index: int) -> jax.Array:
        """Return the buffer of a shard on a device, of shape `ParamSpec.stored_shape`."""
        return self._shards[device][(name, index)]

    def any_shard(self, name: str, index: int) -> jax.Array:
        """Return the buffer of a shard on the first device that has the shard."""
        return next(shards[(name, index)] for shards in self._shards if (name, index) in shards)

    def release_all(self) -> None:
        """Drop all buffers, and all arrays that share the buffers."""
        self._views.clear()
        for buffers in self._shards:
            buffers.clear()
