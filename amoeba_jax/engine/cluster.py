"""The devices of an engine, what lies in their memory, and the instances over them."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.buckets import Buckets
from amoeba_jax.engine.catalogue import step_requests
from amoeba_jax.engine.executables import Executable, Executables
from amoeba_jax.engine.instance import Instance, SamplingState
from amoeba_jax.engine.loading import OpenWeights
from amoeba_jax.engine.memory import ACTIVATION_KINDS
from amoeba_jax.engine.plan import EnginePlan
from amoeba_jax.engine.weights import WeightStore
from amoeba_jax.errors import MemoryBudgetError
from amoeba_jax.models.dims import ModelDims
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from kvcache.prefix_cache import PrefixCache
from sharding.ledger import Ledger, format_bytes
from sharding.mesh import SubMesh, assemble

KvBuffers = list[list[jax.Array]]
"""Extents of each layer."""


class Cluster:
    """Loads the weights onto every device, divides the rest of its memory, and makes instances.

    Attributes:
        instances: the present ones, by their first device.
        allocators: of the pages of each device.
        on_result: called from other threads whenever a step's result has arrived; must not block.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        open_weights: OpenWeights,
        on_load: Callable[[str], None],
    ):
        self.config, self.dims, self.open_weights = config, dims, open_weights
        self.weights = WeightStore(dims, devices)
        self.plan = EnginePlan(config, dims, devices, self.weights)
        self.sub_meshes, self.memory_plan = self.plan.sub_meshes, self.plan.memory
        self.plans, self.max_model_len = self.plan.plans, self.plan.max_model_len
        self.ledgers = [Ledger(self.memory_plan.budget_bytes) for _ in devices]
        with open_weights() as reader:
            self.weights.load(reader, self.ledgers, on_load)
        self._sampling_states = [
            SamplingState.zeros(self.plan.num_slots, dims.config.vocab_size, device) for device in devices
        ]
        for ledger in self.ledgers:
            ledger.add("sampling", self.memory_plan.sampling_bytes)
        self.executables = Executables(dims, strict=config.strict_compile)
        self.on_result: Callable[[], None] = lambda: None
        self.allocators: list[BuddyAllocator] = []
        self.instances: tuple[Instance, ...] = ()
        self._activation_bytes = self.memory_plan.activation_bytes
        self._build(config.tensor_parallel_size)
        for ledger in self.ledgers:
            ledger.reserve("activations", self._activation_bytes)
            ledger.reserve("staging", self.memory_plan.staging_bytes)

    def reserve_temporaries(self, executable: Executable) -> None:
        """Hold a program's temporaries against the budget. Raises `MemoryBudgetError` where they do not fit.

        Those that change layouts have memory set aside for them: see `staging_bytes`.
        """
        if executable.info.temp_bytes <= self._activation_bytes or executable.request.kind not in ACTIVATION_KINDS:
            return
        for ledger in self.ledgers:
            try:
                ledger.reserve("activations", executable.info.temp_bytes)
            except MemoryBudgetError as error:
                for other in self.ledgers:
                    other.reserve("activations", self._activation_bytes)
                raise MemoryBudgetError(
                    f"program {executable.request} needs {format_bytes(executable.info.temp_bytes)} of temporaries: "
                    f"{error}, or kv_cache_tokens"
                ) from error
        self._activation_bytes = executable.info.temp_bytes

    def buckets(self, tp: int) -> Buckets:
        """Step shapes of instances of degree `tp`: each of their devices brings `max_num_seqs`."""
        return self.plan.buckets(tp)

    def capacity_tokens(self, tp: int, released: int) -> int:
        """Tokens that an empty instance of degree `tp` holds, with weights released for a degree."""
        return self.plan.capacity_tokens(tp, released)

    def check_compiled(self, group: SubMesh, tp: int, released: int) -> None:
        """Raise `NotCompiledError` if instances of degree `tp` over a group could not serve with `strict_compile`."""
        shape = self.buckets(tp).step(1)
        for start in range(group.start, group.start + group.tp, tp):
            part = self.sub_meshes.group(start, tp)
            self.executables.check(step_requests(self.plan, self.executables, part, shape, released))

    def new_allocator(self, released: int) -> BuddyAllocator:
        """An empty allocator over the base extent and those that are released for a degree."""
        allocator = BuddyAllocator(self.dims.max_tp)
        for num_pages in self.plan.extent_pages(released):
            allocator.add_extent(num_pages)
        return allocator

    def release_more(self, instance: Instance, degree: int) -> None:
        """Give an instance the weights as cache that are released at a higher degree than its present one."""
        for layer, extents in enumerate(instance.kv):
            extents += self.weights.release(instance.group, layer, instance.released, degree)
        new = self.plan.extent_pages(degree)[len(self.plan.extent_pages(instance.released)) :]
        for device in instance.group.device_indices:
            for num_pages in new:
                self.allocators[device].add_extent(num_pages)
        instance.released = degree

    def new_instance(
        self,
        group: SubMesh,
        allocators: list[BuddyAllocator],
        kv: KvBuffers,
        released: int,
        tokens: list[jax.Array] | None = None,
    ) -> Instance:
        """An instance over extents and the allocators of their pages, one a rank.

        `tokens` are the ranks' `[num_slots]` last tokens of the instances before, of which only the memory is used: a
        slot is read after something was sampled for it. Without them they are made anew.
        """
        pool = PagePool(self.dims.pages, allocators, group.tp)
        if tokens is None:
            last_tokens = jax.device_put(np.zeros(self.plan.num_slots, np.int32), group.replicated)
        else:
            last_tokens = assemble(group, tokens, replicated=True)
        return Instance(
            group,
            pool,
            PrefixCache(pool, self.config.prefix_caching),
            kv,
            self.plans,
            self.weights,
            self.executables,
            self._sampling_states[group.start],
            last_tokens,
            lambda: self.on_result(),
            buckets=self.buckets(group.tp),
            released=released,
        )

    def empty_instance(self, group: SubMesh, released: int) -> Instance:
        """An instance with allocators and extents of its own, all made anew."""
        for device in group.device_indices:
            self.allocators[device] = self.new_allocator(released)
        pages = self.plan.extent_pages(released)
        shapes = [(group.tp * num_pages, self.dims.pages.page_elems) for num_pages in pages]
        kv = [
            [jnp.zeros(shape, self.dims.dtype, device=group.sharded) for shape in shapes]
            for _ in range(self.dims.config.num_layers)
        ]
        return self.new_instance(group, [self.allocators[i] for i in group.device_indices], kv, released)

    def replace(self, old: list[Instance], new: list[Instance]) -> None:
        """Put instances in the place of others over the same devices. Of the old ones only `kv` is of use any more."""
        kept = [instance for instance in self.instances if instance not in old]
        self.instances = tuple(sorted([*kept, *new], key=lambda instance: instance.id))
        for instance in old:
            instance.retire()

    def _build(self, tp: int) -> None:
        """The first instances, of degree `tp`. What their ranks do not need of the weights is KV cache at once."""
        plan, dims = self.memory_plan, self.dims
        for ledger in self.ledgers:
            for layer in range(dims.config.num_layers):
                ledger.add("kv cache", plan.num_pages * plan.page_bytes, layer)
        self.allocators = [self.new_allocator(tp) for _ in self.sub_meshes.devices]
        instances = []
        for group in self.sub_meshes.groups(tp):
            kv = [
                [assemble(group, list(self._base_extents(group))), *self.weights.release(group, layer, 1, tp)]
                for layer in range(dims.config.num_layers)
            ]
            allocators = [self.allocators[device] for device in group.device_indices]
            instances.append(self.new_instance(group, allocators, kv, tp))
        self.instances = tuple(instances)

    def _base_extents(self, group: SubMesh) -> Iterator[jax.Array]:
        shape = (self.memory_plan.num_pages, self.dims.pages.page_elems)
        for device in group.devices:
            yield jnp.zeros(shape, self.dims.dtype, device=device)

    def close(self) -> None:
        """Drop every device buffer."""
        for instance in self.instances:
            instance.close()
        self.instances = ()
        self._sampling_states.clear()
        self.weights.release_all()
