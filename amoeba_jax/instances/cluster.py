"""Cluster: the devices of an engine, with the memory and the instances of these devices."""

import gc
import logging
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import MemoryBudgetError, RequestError
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import SharedPages
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step_sampler import SamplingState
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.background import compile_jobs
from amoeba_jax.programs.compiling import Executable
from amoeba_jax.programs.enumeration import enumerate_programs
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.memory import ACTIVATION_KINDS
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.start_placement import home_pages
from amoeba_jax.weights.loading import OpenWeights
from amoeba_jax.weights.store import WeightStore
from sharding.ledger import Ledger, format_bytes
from sharding.mesh import SubMesh
from sharding.owners import Owner
from sharding.placement import Homes, ModuleKind, Placement

logger = logging.getLogger(__name__)

REVIVE_INTERVAL_S = 1.0
"""Minimum number of seconds between two attempts of `Cluster.revive`."""
_REVIVE_PAUSE = 9
"""Minimum pause after an attempt of `Cluster.revive`, as a multiple of the duration of the attempt.

An attempt may read the weights. With this pause, the dispatcher spends at most a tenth of its time on attempts.
"""
_TAKE_BACK_ATTEMPTS = 3


class Cluster:
    """Devices of an engine with their weights and memory, and the instances (serving replicas) on these devices.

    The constructor loads the weights, and calls `on_load(name)` after each loaded parameter. Then the constructor
    creates the first instances. While the constructor runs, background threads compile the programs of the
    tensor-parallel degrees in `compile_first`.

    Attributes:
        instances: present instances, in the order of their first devices. Paused instances are not included.
        factory: factory of instances and their parts. The attribute exists only after the weights are loaded.
        lost: dict of the device groups that are out of service. The value for a group is the degree whose weights the
            group keeps (`Instance.released`). The memory of these groups stays reserved. Any thread may read the dict,
            because every change replaces the whole dict.
        activation_bytes: number of bytes reserved on each device for temporary arrays of step programs.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        open_weights: OpenWeights,
        on_load: Callable[[str], None],
        compile_first: tuple[int, ...] = (),
    ):
        self.config, self.dims, self.open_weights = config, dims, open_weights
        self.weights = WeightStore(dims, devices)
        self.plan = EnginePlan(config, dims, devices, self.weights)
        self.sub_meshes, self.memory_plan = self.plan.sub_meshes, self.plan.memory
        self.max_model_len = self.plan.max_model_len
        self.ledgers = [Ledger(self.memory_plan.budget_bytes) for _ in devices]
        self.executables = Executables(
            dims, strict=config.strict_compile, beside=config.compile_beside, jobs=compile_jobs(config.compile_jobs)
        )
        self.instances: tuple[Instance, ...] = ()
        self.lost: dict[SubMesh, int] = {}
        self._next_revival_s = 0.0
        self.activation_bytes = self.memory_plan.activation_bytes
        for tp in compile_first:
            self.sub_meshes.check_degree(tp)
        self.executables.compile_later(enumerate_programs(self.plan, self.executables, compile_first))
        try:
            self._fill_memory(on_load)
        except BaseException:
            self.executables.background.close()
            raise

    # Memory of the devices

    def _fill_memory(self, on_load: Callable[[str], None]) -> None:
        """Load the weights, and create the first instances with their buffers.

        Raises `MemoryBudgetError` if a buffer of the instances cannot be allocated.
        """
        plan, tp = self.plan, self.plan.start_tp
        with self.open_weights() as reader:
            self.weights.load(reader, self.ledgers, on_load, plan.start_shards())
        self.factory = InstanceFactory(plan, self.weights, self.executables)
        try:
            if plan.placement is not None:
                self.instances = (self._placed_instance(plan.placement),)
            else:
                for device in plan.start_devices:
                    self.open_device(device, samples=True)
                groups = [group for group in self.sub_meshes.groups(tp) if group.start in plan.start_devices]
                self.instances = tuple(self._empty_instance(group, tp, plan.start_attention) for group in groups)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            memory = self.memory_plan
            raise MemoryBudgetError(
                "a device could not allocate what the engine plans within a budget of "
                f"{format_bytes(memory.budget_bytes)}, of which each layer's KV cache takes "
                f"{format_bytes(memory.num_pages * memory.page_bytes)}: choose a smaller device_memory or "
                "memory_utilization. On a GPU the rest of its memory may be in use, or in pieces "
                "(XLA_PYTHON_CLIENT_PREALLOCATE=false makes pieces)"
            ) from error
        self._unused_bytes = {device: self.ledgers[device].free_bytes for device in plan.start_devices}

    def unused_bytes(self, device: int) -> int:
        """Return how many bytes of a device's memory budget were unused right after the start of the engine.

        For example, the option `kv_cache_tokens` can limit the KV cache and leave bytes unused. If the device had no
        instance at the start, return the smallest number of unused bytes of all devices that had an instance.
        """
        return self._unused_bytes.get(device, min(self._unused_bytes.values()))

    def reserve_temporaries(self, executable: Executable) -> None:
        """Reserve memory for the temporary arrays of a program, on every device.

        Do nothing if enough memory is reserved already. Also do nothing for programs of a change, such as exchanges of
        pages, because these programs have another reservation (`staging_bytes`).

        Raises `MemoryBudgetError`, and changes no reservation, if too little memory is free on a device.
        """
        if executable.info.temp_bytes <= self.activation_bytes or executable.spec.kind not in ACTIVATION_KINDS:
            return
        for ledger in self.ledgers:
            try:
                ledger.reserve("activations", executable.info.temp_bytes)
            except MemoryBudgetError as error:
                for other in self.ledgers:
                    other.reserve("activations", self.activation_bytes)
                raise MemoryBudgetError(
                    f"program {executable.spec} needs {format_bytes(executable.info.temp_bytes)} of temporaries: "
                    f"{error}, or kv_cache_tokens"
                ) from error
        self.activation_bytes = executable.info.temp_bytes

    def release_more(self, instance: Instance, degree: int) -> None:
        """Turn memory of an instance's weights into KV cache.

        Afterwards, the instance keeps only the weights that degree `degree` needs. The instance itself must have at
        least this degree.
        """
        for layer, extents in enumerate(instance.site.kv):
            extents += self.weights.release(instance.group, layer, instance.released, degree)
        instance.site.extent_pages = self.plan.extent_pages(degree)
        new = self.plan.extent_pages(degree)[len(self.plan.extent_pages(instance.released)) :]
        for device in instance.group.device_indices:
            for num_pages in new:
                self.factory.allocators[device].add_extent(num_pages)
        instance.released = degree

    def add_layer(self, site: Site, layer: int) -> None:
        """Allocate the KV extents (page buffers) of a layer at a site. Do nothing if the site already has them.

        The home of `site` must have only one device. Raises `MemoryBudgetError` if the budget is too small. Raises the
        error of JAX if the allocation fails. If an error is raised, nothing has changed.
        """
        if not site.kv[layer]:
            size = sum(site.extent_pages) * self.memory_plan.page_bytes
            self.ledgers[site.group.start].add(Owner.KV_CACHE, size, layer)
            shapes = [(pages, self.dims.pages.page_elems) for pages in site.extent_pages]
            try:
                site.kv[layer] = [jnp.zeros(shape, self.dims.dtype, device=site.group.devices[0]) for shape in shapes]
            except BaseException:
                self.ledgers[site.group.start].remove(Owner.KV_CACHE, size, layer)
                raise

    def drop_layer(self, site: Site, layer: int) -> None:
        """Free the KV extents (page buffers) of a layer at a site. The home of `site` must have only one device."""
        if site.kv[layer]:
            size = sum(site.extent_pages) * self.memory_plan.page_bytes
            self.ledgers[site.group.start].remove(Owner.KV_CACHE, size, layer)
            site.kv[layer] = []

    def open_device(self, device: int, *, samples: bool = False) -> None:
        """Allocate the buffers that a device needs to compute steps, and reserve memory for temporary arrays.

        If `samples`, also allocate the sampling state. Existing buffers are kept. The call waits until the new buffers
        are allocated, so that missing memory is noticed here.

        Raises `MemoryBudgetError` if the budget is too small. Raises the error of JAX if an allocation fails. After an
        error, some of the buffers may exist: `close_device` frees them.
        """
        ledger, plan, factory, at = (
            self.ledgers[device],
            self.memory_plan,
            self.factory,
            self.sub_meshes.devices[device],
        )
        ledger.reserve("activations", self.activation_bytes)
        ledger.reserve("staging", plan.staging_bytes)
        for owner, size in ((Owner.HIDDEN, plan.hidden_bytes), (Owner.SAMPLING, plan.sampling_bytes)):
            if (samples or owner is Owner.HIDDEN) and not ledger.entries[(None, owner)]:
                ledger.add(owner, size)
        factory.hidden.add(device, at)
        if device not in factory.constants:
            numbers = [np.int32(layer) for layer in range(self.dims.load_shape[0])]
            factory.constants[device] = jax.device_put([np.bool_(False), np.bool_(True), *numbers], at)
        if samples and device not in factory.sampling_states:
            state = SamplingState.zeros(self.plan.num_slots, self.dims.config.vocab_size, at)
            jax.block_until_ready((state.flags, state.bias))
            factory.sampling_states[device] = state

    def close_device(self, device: int) -> None:
        """Free the weights and buffers of a device, and end the memory reservations on the device.

        No instance may use the device. The KV cache of the device must already be free.
        """
        factory, ledger = self.factory, self.ledgers[device]
        for layer in (None, *range(self.dims.config.num_layers)):
            self.weights.drop_modules(device, layer)
        if factory.allocators:
            factory.allocators[device].become(factory.empty_allocator(()))
        factory.hidden.drop(device)
        factory.constants.pop(device, None)
        factory.sampling_states.pop(device, None)
        for owner in (Owner.HIDDEN, Owner.SAMPLING):
            ledger.remove(owner, ledger.entries[(None, owner)])
        for what in ("activations", "staging"):
            ledger.reserve(what, 0)

    # Instances

    @property
    def empty_devices(self) -> list[int]:
        """Indices of the devices that are in service and have no modules (attention or FFNs) of any instance."""
        used = {device for instance in self.instances for device in instance.runner.placement.devices}
        used |= {device for group in self.lost for device in group.device_indices}
        return [device for device in range(len(self.sub_meshes.devices)) if device not in used]

    def instance(self, instance_id: int) -> Instance:
        """Return the present instance with the id `instance_id`. Raises `RequestError` if there is no such instance."""
        for instance in self.instances:
            if instance.id == instance_id:
                return instance
        raise RequestError(f"there is no instance {instance_id}: there are {[each.id for each in self.instances]}")

    @property
    def all_instances(self) -> list[Instance]:
        """All present and paused instances. Each present instance is followed by the instances that it has paused."""
        return [each for instance in self.instances for each in (instance, *instance.paused)]

    def instance_of(self, sequence: Sequence) -> Instance:
        """Return the instance to which a running or paused sequence belongs."""
        return next(instance for instance in self.all_instances if sequence in instance.running)

    def swap(self, old: Iterable[Instance], new: Iterable[Instance]) -> None:
        """Replace the present instances `old` by the instances `new` on the same devices.

        The instances in `old` keep their buffers.
        """
        kept = [instance for instance in self.instances if instance not in old]
        self.instances = tuple(sorted([*kept, *new], key=lambda instance: instance.id))

    def replace(self, old: list[Instance], new: list[Instance]) -> None:
        """Replace the present instances `old` by the instances `new` on the same devices, and retire `old`.

        A retired instance drops all its device buffers except the KV cache.
        """
        self.swap(old, new)
        for instance in old:
            instance.retire()

    def sharing(self, instance: Instance) -> list[Instance]:
        """Return `instance` and all present instances that share buffers with it.

        Instances that share buffers with any returned instance are returned too.
        """
        found = [instance]
        for each in found:
            sites = set(each.runner.sites.values())
            found += [o for o in self.instances if o not in found and not sites.isdisjoint(o.runner.sites.values())]
        return found

    def rebuild(self, instances: list[Instance]) -> None:
        """Replace instances by new instances with an empty KV cache in the same buffers, after a program has failed.

        Buffers that the failed program has lost are allocated again. The old instances must have no sequences. Every
        instance that shares buffers with one of `instances` must be in `instances` too.
        """
        for instance in instances:
            for home, site in instance.runner.sites.items():
                site.replace_lost()
                for allocator in instance.allocators.get(home, ()):
                    allocator.become(self.factory.empty_allocator(site.extent_pages))
            instance.sampler.state.replace_lost()
            self.factory.hidden.replace_lost(instance.runner.placement.devices)
        make = self.factory.instance
        new = [make(i.runner.placement, i.runner.sites, i.allocators, i.released, i.width) for i in instances]
        self.replace(instances, new)
        self.link_lanes()

    def link_lanes(self) -> None:
        """Let lanes that have a page allocator in common evict each other's cached pages.

        The lanes of an instance that has paused other instances are left out. `Instance.take_the_place_of` links these
        lanes.
        """
        lanes = [lane for instance in self.instances if not instance.paused for lane in instance.lanes]
        for lane in lanes:
            own = set(lane.pages.allocators)
            others = [o for o in lanes if o is not lane and not own.isdisjoint(o.pages.allocators)]
            lane.cache.lender = SharedPages(lane.pages, others) if others else None

    # Groups that are out of service

    def take_back(self, old: list[Instance]) -> None:
        """Replace the instances `old` by new instances on the same devices, after a change or `rebuild` has failed.

        The new instances have no sequences. Each new instance has the same `Instance.released` as the old instance on
        its devices. With a start placement, there is only one old instance, and the new instance has the start
        placement. The old instances must have no sequences and empty prefix caches.

        The creation of a new instance is tried several times, because old buffers may be freed late. If every attempt
        fails, the devices of the instance go out of service (`lost`).
        """
        for instance in old:
            instance.enter(Phase.LOST)
            self._abandon(instance)
        self.replace(old, [])
        self.lost = {**self.lost, **{instance.group: instance.released for instance in old}}
        failed = {instance.group: "" for instance in old}
        for attempt in range(_TAKE_BACK_ATTEMPTS):
            if attempt and failed:
                gc.collect()
            failed = {group: reason for group in failed if (reason := self._make_again(group)) is not None}
        for group, reason in failed.items():
            logger.warning("%s is out of service: %s", group, reason)
        self._next_revival_s = time.monotonic() + REVIVE_INTERVAL_S

    def _abandon(self, instance: Instance) -> None:
        """Drop the KV buffers of an instance that `take_back` replaces.

        If layers of the instance may have been replicated or migrated, also remove the KV bytes at its TP1 homes from
        the ledgers, because the new instance may have these layers on other devices. Only layers at TP1 homes can be
        replicated or migrated. All other KV bytes stay in the ledgers, because the new instance allocates the same
        buffers again.
        """
        for home, site in instance.runner.sites.items():
            if instance.is_spread and not instance.has_parallel_attention and home.degree == 1:
                for layer in range(len(site.kv)):
                    self.drop_layer(site, layer)
            site.kv.clear()

    def revive(self) -> bool:
        """Try to bring the device groups in `lost` back into service.

        Return whether at least one of these groups is in service again. If the attempt for a group fails, no error is
        raised, and the group stays out of service.

        The dispatcher calls this method often. Do nothing if no group is out of service, or if the latest attempt was a
        short time ago.
        """
        start = time.monotonic()
        if not self.lost or start < self._next_revival_s:
            return False
        gc.collect()
        revived = [group for group in self.lost if self._make_again(group) is None]
        for group in revived:
            logger.warning("%s is in service again", group)
        now = time.monotonic()
        self._next_revival_s = now + max(REVIVE_INTERVAL_S, _REVIVE_PAUSE * (now - start))
        return bool(revived)

    def check_in_service(self, devices: Iterable[int]) -> None:
        """Raise `RequestError` if any device in `devices` is out of service."""
        for group in self.lost:
            if not set(group.device_indices).isdisjoint(devices):
                raise RequestError(
                    f"devices {list(group.device_indices)} are out of service: their instance could not be made again "
                    "after a transformation failed. It is tried again every second: wait until they are back"
                )

    def _make_again(self, group: SubMesh) -> str | None:
        """Create an instance for a group that is out of service. Return None, or the text of an error."""
        try:
            if self.plan.placement is not None:
                instance = self._placed_instance(self.plan.placement)
            else:
                self.factory.hidden.replace_lost(group.device_indices)
                for device in group.device_indices:
                    self.factory.sampling_states[device].replace_lost()
                instance = self._empty_instance(group, self.lost[group])
        except Exception as error:
            drop_frames(error)
            return f"{type(error).__name__}: {error}"
        self.lost = {other: degree for other, degree in self.lost.items() if other != group}
        self.replace([], [instance])
        for device in self.empty_devices if not self.lost else ():  # all moved modules have been copied back
            self.close_device(device)
        return None

    def _placed_instance(self, placement: Placement) -> Instance:
        """Create an instance with a start placement and an empty KV cache.

        Weights that have moved to other devices since the start are copied back to the devices of the placement.
        """
        for device in placement.devices:
            self.open_device(device, samples=device == placement.head.start)
        self.factory.hidden.replace_lost(placement.devices)
        pages = home_pages(placement, self.plan.device_plans)
        kv_bytes: dict[tuple[int, int], int] = defaultdict(int)
        degrees: dict[tuple[int, int, ModuleKind], int] = {}
        kinds: list[tuple[ModuleKind, tuple[Homes, ...]]] = [
            ("attention", placement.attention),
            ("ffn", placement.ffn),
        ]
        for kind, homes_by_layer in kinds:
            for layer, homes in enumerate(homes_by_layer):
                for home in set(homes):
                    for device in home.devices:
                        degrees[device, layer, kind] = home.degree
                        if kind == "attention":
                            kv_bytes[device, layer] += pages[home] * self.memory_plan.page_bytes
        for module, degree in degrees.items():
            if degree == 1:  # modules at homes of a higher degree never move
                self.weights.copy_modules(*module)
        for device, ledger in enumerate(self.ledgers):
            for layer in range(placement.num_layers):
                for kind, _ in kinds:
                    if (device, layer, kind) not in degrees:
                        self.weights.drop_modules(device, layer, kind)
                if change := kv_bytes[device, layer] - ledger.entries.get((layer, Owner.KV_CACHE), 0):
                    (ledger.add if change > 0 else ledger.remove)(Owner.KV_CACHE, abs(change), layer)
        return self.factory.placed_instance(placement)

    def _empty_instance(self, group: SubMesh, released: int, attention_degree: int | None = None) -> Instance:
        """Create an instance with an empty KV cache on a group.

        Each device keeps the weights of degree `released`. Missing weights of this degree are read again. Weights that
        only lower degrees need are dropped, and their memory becomes KV cache.

        If `attention_degree` is below the degree of the group, the instance has data-parallel attention: parts of the
        group compute the attention of different sequences.
        """
        layers, weights = range(self.dims.config.num_layers), self.weights
        base = self.memory_plan.num_pages * self.memory_plan.page_bytes
        for device in group.device_indices:
            for layer in layers:
                held = self.ledgers[device].entries[(layer, Owner.KV_CACHE)]
                if held <= base and group.tp == 1:  # no weight memory is KV cache: missing weights have migrated
                    weights.copy_modules(device, layer)
                self.ledgers[device].add(Owner.KV_CACHE, max(base - held, 0), layer)
        # First release memory. Read weights last, the slowest part. `released_on` is equal on all devices of the group.
        for layer in layers:
            if (present := weights.released_on(group.start, layer)) < released:
                weights.release(group, layer, present, released)
        instance = self.factory.empty_instance(group, released, attention_degree)
        if any(weights.released_on(group.start, layer) > released for layer in layers):
            with self.open_weights() as reader:
                weights.reload(reader, group, [released] * group.tp)
        return instance

    def close(self) -> None:
        """Close all instances, and drop all device buffers, including the weights."""
        for instance in self.instances:
            instance.close()
        self.instances = ()
        self.lost = {}
        self.factory.sampling_states.clear()
        self.factory.constants.clear()
        self.factory.hidden.clear()
        self.weights.release_all()


def drop_frames(error: BaseException) -> None:
    """Clear the stack frames of an error and of the errors that caused it.

    Otherwise, local variables in these frames could keep device buffers alive as long as the error exists.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
