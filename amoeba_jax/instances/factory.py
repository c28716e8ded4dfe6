"""Construction of instances and their parts: allocators, sites, lanes and scratch buffers."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.result_reader import ResultReader
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.site import KvBuffers, Site
from amoeba_jax.instances.step_sampler import SamplingState, StepSampler
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.start_placement import home_pages, placement_width
from amoeba_jax.weights.store import WeightStore
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from kvcache.prefix_cache import PrefixCache
from sharding.mesh import SubMesh, assemble, disassemble, is_lost
from sharding.placement import Home, Homes, Placement


class Scratch(NamedTuple):
    """Buffers that the next instance on the same devices uses again. Their contents are not needed.

    Attributes:
        last_tokens: `[num_slots]` of each rank of the head.
        hidden: `[D, hidden_tokens]` of each device.
    """

    last_tokens: list[jax.Array]
    hidden: list[jax.Array]

    @classmethod
    def joined(cls, parts: Iterable["Scratch"]) -> "Scratch":
        """Join the buffers of groups side by side."""
        parts = list(parts)
        return cls([t for part in parts for t in part.last_tokens], [h for part in parts for h in part.hidden])

    def split(self, size: int) -> list["Scratch"]:
        """Divide the buffers among groups of `size` ranks."""
        return [
            Scratch(self.last_tokens[first : first + size], self.hidden[first : first + size])
            for first in range(0, len(self.hidden), size)
        ]


class InstanceFactory:
    """Makes instances and their parts, over devices whose weights are loaded. Used by the dispatcher thread only.

    Args:
        on_result: called from other threads after each result of a step; must not block.
        released: degree for which weights are released at first.

    Attributes:
        allocators: page allocator of each device. It stays when instances change. Empty with a start placement.
    """

    def __init__(
        self,
        plan: EnginePlan,
        weights: WeightStore,
        executables: Executables,
        on_result: Callable[[], None],
        released: int,
    ):
        self._plan, self._weights, self._executables, self._on_result = plan, weights, executables, on_result
        self._dims = plan.dims
        devices, placement = dict(enumerate(plan.sub_meshes.devices)), plan.placement
        if placement is not None:  # other devices stay empty
            devices = {index: devices[index] for index in placement.devices}
        samplers = devices if placement is None else (placement.head.start,)
        self._sampling_states = {
            index: SamplingState.zeros(plan.num_slots, self._dims.config.vocab_size, devices[index])
            for index in samplers
        }
        jax.block_until_ready([(state.flags, state.bias) for state in self._sampling_states.values()])
        self._begins = {
            index: jax.device_put((np.bool_(False), np.bool_(True)), device) for index, device in devices.items()
        }
        self.allocators = [] if placement is not None else [self.new_allocator(released) for _ in devices]

    # Allocators

    def new_allocator(self, released: int) -> BuddyAllocator:
        """Return an empty allocator over the base extent and the extents that are released for a degree."""
        return self._allocator(self._plan.extent_pages(released))

    def _allocator(self, extent_pages: Iterable[int]) -> BuddyAllocator:
        allocator = BuddyAllocator(self._dims.max_tp)
        for num_pages in extent_pages:
            allocator.add_extent(num_pages)
        return allocator

    def allocators_of(self, group: SubMesh) -> list[BuddyAllocator]:
        """Return the allocators of a group's devices."""
        return [self.allocators[device] for device in group.device_indices]

    def settle_allocators(self, group: SubMesh, planned: list[BuddyAllocator]) -> list[BuddyAllocator]:
        """Give the allocators of a group's devices the state of planned ones. Return the devices' allocators."""
        own = self.allocators_of(group)
        for allocator, plan in zip(own, planned, strict=True):
            allocator.become(plan)
        return own

    # Parts of instances

    def new_site(self, group: SubMesh, kv: KvBuffers, released: int) -> Site:
        """Return a site over extents, with weights released for a degree."""
        return self._site(group, kv, self._plan.extent_pages(released))

    def _site(self, group: SubMesh, kv: KvBuffers, extent_pages: tuple[int, ...]) -> Site:
        flags = [[self._begins[device][flag] for device in group.device_indices] for flag in (0, 1)]
        begins = assemble(group, flags[0], replicated=True), assemble(group, flags[1], replicated=True)
        return Site(group, kv, extent_pages, self._plan, self._weights, self._executables, begins)

    def new_lane(self, pool: PagePool, group: SubMesh) -> Lane:
        """Return the lane of an instance in steady state."""
        return self._lane({(group.home,): pool})

    def _lane(self, pools: Mapping[Homes, PagePool]) -> Lane:
        """Return a lane with a pool for each page group."""
        ranks, first = {}, 0
        for group, pool in pools.items():
            ranks[group] = slice(first, first + pool.tp)
            first += pool.tp
        parts = list(pools.values())
        pool = parts[0] if len(parts) == 1 else PagePool.joined(parts)
        cache = PrefixCache(pool, self._plan.config.prefix_caching)
        return Lane(pool, cache, ranks, self._plan.buckets(min(part.tp for part in parts)).max_num_seqs)

    def scratch_of(self, instance: Instance) -> Scratch:
        """Take the scratch buffers of an instance that launches no more steps. Lost buffers are made again."""
        runner = instance.runner
        if is_lost(runner.last_tokens):
            runner.last_tokens = jax.device_put(np.zeros(self._plan.num_slots, np.int32), instance.group.replicated)
        return Scratch(disassemble(instance.group, runner.last_tokens), list(runner.hidden.release().values()))

    def _new_scratch(self, head: SubMesh, devices: Iterable[int]) -> Scratch:
        shape = (self._dims.config.hidden_size, self._plan.hidden_tokens)
        present = self._plan.sub_meshes.devices
        hidden = [jnp.zeros(shape, self._dims.dtype, device=present[index]) for index in devices]
        tokens = [jax.device_put(np.zeros(self._plan.num_slots, np.int32), device) for device in head.devices]
        return Scratch(tokens, jax.block_until_ready(hidden))

    # Instances

    def new_instance(
        self,
        group: SubMesh,
        allocators: list[BuddyAllocator],
        kv: KvBuffers,
        released: int,
        scratch: Scratch | None = None,
    ) -> Instance:
        """Return an instance that computes all layers on a group, over extents and their allocators, one for each rank.

        Args:
            scratch: buffers of the previous instances. Default: new buffers.
        """
        lane = self.new_lane(PagePool(self._dims.pages, allocators, group.tp), group)
        sites = {group.home: self.new_site(group, kv, released)}
        placement = Placement.uniform(group.home, self._dims.config.num_layers)
        return self._instance(placement, sites, [lane], scratch, released)

    def empty_instance(self, group: SubMesh, released: int) -> Instance:
        """Return an instance over new extents, with an empty cache.

        Waits for the extents, so that missing memory is found here and not by the first step.
        """
        allocators = self.settle_allocators(group, [self.new_allocator(released) for _ in group.devices])
        layers = range(self._dims.config.num_layers)
        kv = jax.block_until_ready(self._new_extents(group, self._plan.extent_pages(released), layers))
        return self.new_instance(group, allocators, kv, released)

    def placed_instance(self, placement: Placement, old: Instance | None = None) -> Instance:
        """Return an instance with a start placement and an empty cache.

        Args:
            old: instance with the same placement, whose buffers are used again. Default: new buffers.
        """
        plan, groups = self._plan, placement.page_groups
        pages = home_pages(placement, plan.device_plans)
        sites: dict[Home, Site] = {}
        for home in sorted({placement.head, *(h for homes in (*placement.attention, *placement.ffn) for h in homes)}):
            mesh, extents = plan.sub_meshes.group(home.start, home.degree), (pages.get(home, 0),)
            layers = [layer for layer, homes in enumerate(placement.attention) if home in homes]
            kv = self._new_extents(mesh, extents, layers) if old is None else old.runner.sites[home].kv
            sites[home] = self._site(mesh, kv, extents)
        jax.block_until_ready([site.kv for site in sites.values()])
        allocators = {
            (group, device): self._allocator([pages[home]])
            for group in groups
            for home in set(group)
            for device in home.devices
        }
        lanes = []
        for number in range(placement.num_microbatches):
            pools = {}
            for group in groups:
                own = [allocators[group, device] for device in group[number].devices]
                pools[group] = PagePool(self._dims.pages, own, group[number].degree)
            lanes.append(self._lane(pools))
        scratch = None if old is None else self.scratch_of(old)
        owned = [(allocator, device, len(groups[group])) for (group, device), allocator in allocators.items()]
        return self._instance(placement, sites, lanes, scratch, 1, owned)

    def _new_extents(self, group: SubMesh, extent_pages: Iterable[int], layers: Collection[int]) -> KvBuffers:
        """Make extents with these numbers of pages on a rank, for some of the layers."""
        shapes = [(group.tp * num_pages, self._dims.pages.page_elems) for num_pages in extent_pages]
        return [
            [jnp.zeros(shape, self._dims.dtype, device=group.sharded) for shape in shapes] if layer in layers else []
            for layer in range(self._dims.config.num_layers)
        ]

    def _instance(
        self,
        placement: Placement,
        sites: Mapping[Home, Site],
        lanes: list[Lane],
        scratch: Scratch | None,
        released: int,
        page_allocators: Collection[tuple[BuddyAllocator, int, int]] = (),
    ) -> Instance:
        plan, devices = self._plan, placement.devices
        head = plan.sub_meshes.group(placement.head.start, placement.head.degree)
        scratch = scratch or self._new_scratch(head, devices)
        hidden = HiddenStates(dict(zip(devices, scratch.hidden, strict=True)))
        last_tokens = assemble(head, scratch.last_tokens, replicated=True)
        width = placement_width(placement)
        return Instance(
            Runner(head, sites, placement, hidden, last_tokens, plan, self._executables),
            lanes,
            StepSampler(head, self._sampling_states[head.start], self._executables),
            ResultReader(f"amoeba-read-{head.start}", self._on_result),
            self._executables,
            buckets=plan.buckets(width),
            lane_buckets=plan.buckets(width // placement.num_microbatches),
            released=released,
            page_allocators=page_allocators,
        )

    def close(self) -> None:
        """Drop the device buffers that instances share."""
        self._sampling_states.clear()
        self._begins.clear()
