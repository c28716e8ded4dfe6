"""Factory of instances, and of the parts of instances: page allocators, sites (buffers of one home) and lanes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.site import KvBuffers, Site
from amoeba_jax.instances.step import ResultReader
from amoeba_jax.instances.step_sampler import SamplingState, StepSampler
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.start_placement import home_pages, placement_width
from amoeba_jax.weights.store import WeightStore
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from kvcache.prefix_cache import PrefixCache
from sharding.mesh import SubMesh, assemble, divide
from sharding.placement import Home, Placement


class InstanceFactory:
    """Factory of instances and their parts, on devices whose weights are loaded. Used by the dispatcher thread only.

    Attributes:
        allocators: list of page allocators, one for each device. When instances merge or split, each device keeps its
            allocator object. With a start placement, the list is empty, because the only instance has its own
            allocators.
        hidden: buffers of hidden states on all devices that hold modules (attention or FFNs). If the model has experts,
            `hidden.loads` counts the tokens of each expert.
        sampling_states: sampling state of each device that samples, by device index.
        constants: `{device index: list of scalar arrays on this device}`, for each device that holds modules. The list
            has False, True and, if the model has experts, the index of each layer. As arguments of a step program,
            these arrays tell whether the program begins the step, and which layer is the first layer of the program.
        on_result: function that the reader threads call after each result of a step. The function must not block.
    """

    def __init__(self, plan: EnginePlan, weights: WeightStore, executables: Executables):
        self._plan, self._weights, self._executables, self._dims = plan, weights, executables, plan.dims
        self.on_result: Callable[[], None] = lambda: None
        self.hidden = HiddenStates(
            (self._dims.config.hidden_size, plan.hidden_tokens), self._dims.dtype, self._dims.load_shape
        )
        self.sampling_states: dict[int, SamplingState] = {}
        self.constants: dict[int, list[jax.Array]] = {}
        count = len(plan.sub_meshes.devices) if plan.placement is None else 0
        self.allocators = [self.empty_allocator(()) for _ in range(count)]

    # Allocators

    def open_allocator(self, index: int, extent_pages: Iterable[int]) -> BuddyAllocator:
        """Return a page allocator for a device that has held no pages so far. All pages of the allocator are free.

        With a start placement, the allocator is a new object. Otherwise, the allocator is the device's object in
        `allocators`.

        Args:
            index: index of the device.
            extent_pages: number of pages of each KV extent (page buffer) of a layer.
        """
        new = self.empty_allocator(extent_pages)
        if not self.allocators:
            return new
        self.allocators[index].become(new)
        return self.allocators[index]

    def new_allocator(self, released: int) -> BuddyAllocator:
        """Return a page allocator for a device that keeps the weights of degree `released`. All pages are free.

        The pages are in extents (page buffers). The first extent of each device is always KV cache. The other extents
        are the memory of weights that only degrees below `released` need.
        """
        return self.empty_allocator(self._plan.extent_pages(released))

    def empty_allocator(self, extent_pages: Iterable[int]) -> BuddyAllocator:
        """Return a page allocator in which all pages are free.

        `extent_pages` has the number of pages of each KV extent (page buffer) of a layer.
        """
        allocator = BuddyAllocator(self._dims.max_tp)
        for num_pages in extent_pages:
            allocator.add_extent(num_pages)
        return allocator

    def allocators_of(self, group: SubMesh) -> list[BuddyAllocator]:
        """Return the page allocators of a group's devices."""
        return [self.allocators[device] for device in group.device_indices]

    def settle_allocators(self, group: SubMesh, planned: list[BuddyAllocator]) -> list[BuddyAllocator]:
        """Replace the contents of the page allocators of a group's devices by the contents of `planned`.

        `planned` has one allocator for each device of the group. Do not use `planned` afterwards. Return the page
        allocators of the devices. The returned allocators are the same objects as before the call.
        """
        own = self.allocators_of(group)
        for allocator, plan in zip(own, planned, strict=True):
            allocator.become(plan)
        return own

    # Parts of instances

    def site(self, group: SubMesh, kv: KvBuffers, extent_pages: tuple[int, ...]) -> Site:
        """Return a site (the buffers of one device group) with the KV extents `kv`.

        `extent_pages` has the number of pages of each KV extent of a layer. If a layer has no extents in `kv`, extents
        can be added later.
        """
        by_rank = [self.constants[device] for device in group.device_indices]
        constants = [assemble(group, buffers, replicated=True) for buffers in zip(*by_rank, strict=True)]
        return Site(group, kv, extent_pages, self._weights, constants)

    def new_lanes(
        self, placement: Placement, allocators: Mapping[Home, SequenceOf[BuddyAllocator]], width: int
    ) -> list[Lane]:
        """Return empty lanes for an instance, one for each microbatch of the placement.

        Args:
            placement: placement of the instance.
            allocators: page allocators of each home, one for each rank of the home.
            width: maximum number of running sequences of the instance, divided by `max_num_seqs`. Each lane may run an
                equal share of these `width * max_num_seqs` sequences.
        """
        most = max(1, self._plan.buckets(width).max_num_seqs // placement.num_microbatches)
        return [
            self.lane({home: self.pool_at(home, allocators) for home in placement.layers_by_home(number)}, most)
            for number in range(placement.num_microbatches)
        ]

    def pool_at(self, home: Home, allocators: Mapping[Home, SequenceOf[BuddyAllocator]]) -> PagePool:
        """Return a page pool for a home. `allocators` has the page allocators of each home."""
        return PagePool(self._dims.pages, allocators[home], home.degree)

    def lane(self, pools: Mapping[Home, PagePool], max_running: int) -> Lane:
        """Return an empty lane for up to `max_running` sequences.

        `pools` has the page pool of each home. A page of the lane consists of one page from each of these pools.
        """
        ranks, first = {}, 0
        for home, pool in pools.items():
            ranks[home] = slice(first, first + pool.tp)
            first += pool.tp
        parts = list(pools.values())
        pool = parts[0] if len(parts) == 1 else PagePool.joined(parts)
        return Lane(pool, PrefixCache(pool, self._plan.config.prefix_caching), ranks, max_running)

    def _new_last_tokens(self, group: SubMesh) -> list[jax.Array]:
        return [jax.device_put(np.zeros(self._plan.num_slots, np.int32), device) for device in group.devices]

    # Instances

    def new_instance(
        self,
        group: SubMesh,
        allocators: list[BuddyAllocator],
        kv: KvBuffers,
        released: int,
        last_tokens: list[jax.Array] | None = None,
    ) -> Instance:
        """Return an instance that computes all layers on one group.

        Args:
            allocators: page allocators of the group, one for each rank.
            kv: KV extents (page buffers) of each layer.
            released: degree whose weights each device keeps. The memory of all other weights is KV cache.
            last_tokens: buffers of the last tokens from previous instances (`Runner.last_tokens`), one for each rank.
                None: new buffers are allocated.
        """
        placement = Placement.uniform(group.home, self._dims.config.num_layers)
        sites = {group.home: self.site(group, kv, self._plan.extent_pages(released))}
        return self.instance(placement, sites, {group.home: allocators}, released, group.tp, last_tokens)

    def _parallel_attention_instance(self, group: SubMesh, degree: int, kv: KvBuffers, released: int) -> Instance:
        """Return an instance with data-parallel attention on a group.

        Parts of the group compute the attention of different sequences. The whole group computes the FFNs.

        Args:
            degree: number of devices of each part, less than the number of devices of the group.
            kv: KV extents (page buffers) of each layer, sharded over the whole group.
            released: degree whose FFN weights each device keeps. The memory of all other FFN weights is KV cache.
        """
        placement = Placement.parallel_attention(group.home, degree, self._dims.config.num_layers)
        extent_pages = self._plan.extent_pages(released)
        sites = {group.home: self.site(group, [[] for _ in kv], extent_pages)}
        for home in placement.attention[0]:
            part = self._plan.sub_meshes.group(home.start, home.degree)
            own = [[array for extent in extents for array in divide(group, extent, [part])] for extents in kv]
            sites[home] = self.site(part, own, extent_pages)
        allocators = {home: [self.allocators[device] for device in home.devices] for home in placement.attention[0]}
        return self.instance(placement, sites, allocators, released, group.tp)

    def empty_instance(self, group: SubMesh, released: int, attention_degree: int | None = None) -> Instance:
        """Return an instance with a new, empty KV cache on a group.

        The call waits until the KV cache is allocated. If memory is missing, this call raises the error.

        Args:
            released: degree whose weights each device keeps. The memory of all other weights is KV cache.
            attention_degree: degree of the attention. If this degree is below the degree of the group, the instance has
                data-parallel attention. None: the degree of the group.
        """
        allocators = self.settle_allocators(group, [self.new_allocator(released) for _ in group.devices])
        layers = range(self._dims.config.num_layers)
        kv = jax.block_until_ready(self._new_extents(group, self._plan.extent_pages(released), layers))
        if attention_degree is not None and attention_degree < group.tp:
            return self._parallel_attention_instance(group, attention_degree, kv, released)
        return self.new_instance(group, allocators, kv, released)

    def placed_instance(self, placement: Placement) -> Instance:
        """Return an instance with a start placement and a new, empty KV cache.

        The placement tells which devices compute which modules. The call waits until the KV cache is allocated. If
        memory is missing, this call raises the error.
        """
        plan = self._plan
        pages = home_pages(placement, plan.device_plans)
        sites: dict[Home, Site] = {}
        for home in sorted({placement.head, *(h for homes in (*placement.attention, *placement.ffn) for h in homes)}):
            mesh, extents = plan.sub_meshes.group(home.start, home.degree), (pages.get(home, 0),)
            layers = [layer for layer, homes in enumerate(placement.attention) if home in homes]
            sites[home] = self.site(mesh, self._new_extents(mesh, extents, layers), extents)
        jax.block_until_ready([site.kv for site in sites.values()])
        allocators = {home: [self.empty_allocator([count]) for _ in home.devices] for home, count in pages.items()}
        return self.instance(placement, sites, allocators, 1, placement_width(placement))

    def instance(
        self,
        placement: Placement,
        sites: Mapping[Home, Site],
        allocators: Mapping[Home, SequenceOf[BuddyAllocator]],
        released: int,
        width: int,
        last_tokens: list[jax.Array] | None = None,
    ) -> Instance:
        """Return an instance with empty lanes.

        Args:
            placement: placement of the instance, which tells which home (device group) computes which modules.
            sites: site (buffers) of each home.
            allocators: page allocators of each home, one for each rank of the home.
            released: degree whose weights each device keeps. The memory of all other weights is KV cache.
            width: maximum number of running sequences of the instance, as a multiple of `max_num_seqs`.
            last_tokens: buffers of the last tokens from previous instances (`Runner.last_tokens`), one for each rank of
                the head's home. None: new buffers are allocated.
        """
        plan, executables = self._plan, self._executables
        head = plan.sub_meshes.group(placement.head.start, placement.head.degree)
        tokens = assemble(head, last_tokens or self._new_last_tokens(head), replicated=True)
        sampler = StepSampler(head, self.sampling_states[head.start], executables)
        reader = ResultReader(f"amoeba-read-{head.start}", lambda: self.on_result())
        return Instance(
            Runner(head, sites, placement, self.hidden, tokens, sampler, reader, plan, executables),
            allocators,
            self.new_lanes(placement, allocators, width),
            released=released,
            width=width,
        )

    def _new_extents(self, group: SubMesh, extent_pages: Iterable[int], layers: Collection[int]) -> KvBuffers:
        """Allocate KV extents (page buffers) of zeros on a group. Return the list of extents of each layer.

        Args:
            extent_pages: number of pages of each extent of a layer, on one rank.
            layers: indices of the layers that get extents. The lists of all other layers are empty.
        """
        shapes = [(group.tp * num_pages, self._dims.pages.page_elems) for num_pages in extent_pages]
        return [
            [jnp.zeros(shape, self._dims.dtype, device=group.sharded) for shape in shapes] if layer in layers else []
            for layer in range(self._dims.config.num_layers)
        ]
