"""What instances are made of: allocators of pages, sites, lanes, scratch, and instances over them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.scratch import Scratch
from amoeba_jax.instances.site import KvBuffers, Site
from amoeba_jax.instances.step_plan import SamplingState
from amoeba_jax.instances.step_sampler import StepSampler
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.start_placement import home_pages, placement_width
from amoeba_jax.weights.store import WeightStore
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool
from kvcache.prefix_cache import PrefixCache
from sharding.mesh import SubMesh, assemble, disassemble, is_lost
from sharding.placement import Home, Placement


class InstanceFactory:
    """Makes instances and their parts, over devices whose weights are loaded. Used by the dispatcher thread only.

    Args:
        on_result: called from other threads whenever a step's result has arrived; must not block.

    Attributes:
        allocators: of the pages of each device, for its life.
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

    def new_allocator(self, released: int) -> BuddyAllocator:
        """An empty allocator over the base extent and those that are released for a degree."""
        allocator = BuddyAllocator(self._dims.max_tp)
        for num_pages in self._plan.extent_pages(released):
            allocator.add_extent(num_pages)
        return allocator

    def allocators_of(self, group: SubMesh) -> list[BuddyAllocator]:
        """The allocators of a group's devices."""
        return [self.allocators[device] for device in group.device_indices]

    def settle_allocators(self, group: SubMesh, planned: list[BuddyAllocator]) -> list[BuddyAllocator]:
        """Have a group's devices go on with what was planned on others. Returns their own, which stay."""
        own = self.allocators_of(group)
        for allocator, plan in zip(own, planned, strict=True):
            allocator.become(plan)
        return own

    def new_site(self, group: SubMesh, kv: KvBuffers, released: int) -> Site:
        """A home of layers, over extents."""
        return self._site(group, kv, self._plan.extent_pages(released))

    def _site(self, group: SubMesh, kv: KvBuffers, extent_pages: tuple[int, ...]) -> Site:
        flags = [[self._begins[device][flag] for device in group.device_indices] for flag in (0, 1)]
        begins = assemble(group, flags[0], replicated=True), assemble(group, flags[1], replicated=True)
        return Site(group, kv, extent_pages, self._plan, self._weights, self._executables, begins)

    def new_lane(self, pool: PagePool, group: SubMesh) -> Lane:
        """A lane of an instance in steady state."""
        cache = PrefixCache(pool, self._plan.config.prefix_caching)
        return Lane(pool, cache, {(group.home,): slice(0, group.tp)}, self._plan.buckets(group.tp).max_num_seqs)

    def placed_instance(self, placement: Placement, old: Instance | None = None) -> Instance:
        """Return an instance with a placement of its own, over empty extents.

        Args:
            old: instance with the same placement, whose buffers are used again. Default: new buffers.
        """
        plan, dims = self._plan, self._dims
        groups, pages = placement.page_groups, home_pages(placement, plan.device_plans)
        sites: dict[Home, Site] = {}
        homes = {home for homes in (*placement.attention, *placement.ffn, (placement.head,)) for home in homes}
        for home in sorted(homes):
            mesh, extents = plan.sub_meshes.group(home.start, home.degree), pages.get(home, 0)
            present = old.runner.sites[home].kv if old is not None else self._new_extents(placement, home, extents)
            sites[home] = self._site(mesh, present, (extents,))
        jax.block_until_ready([site.kv for site in sites.values()])
        allocators = {
            (group, device): self._placed_allocator(pages[home])
            for group in groups
            for home in set(group)
            for device in home.devices
        }
        lanes = []
        for number in range(placement.num_microbatches):
            pools, ranks, first = [], {}, 0
            for group in groups:
                home = group[number]
                own = [allocators[group, device] for device in home.devices]
                pools.append(PagePool(dims.pages, own, home.degree))
                ranks[group] = slice(first, first + home.degree)
                first += home.degree
            pool = pools[0] if len(pools) == 1 else PagePool.joined(pools)
            degree = min(group[number].degree for group in groups)
            cache = PrefixCache(pool, plan.config.prefix_caching)
            lanes.append(Lane(pool, cache, ranks, plan.buckets(degree).max_num_seqs))
        head = plan.sub_meshes.group(placement.head.start, placement.head.degree)
        tokens = [jax.device_put(np.zeros(plan.num_slots, np.int32), device) for device in head.devices]
        if old is None:
            hidden = {index: self._new_hidden(plan.sub_meshes.devices[index]) for index in placement.devices}
        else:
            hidden = old.runner.hidden.release()
        runner = Runner(
            head,
            sites,
            placement,
            HiddenStates(jax.block_until_ready(hidden)),
            assemble(head, tokens, replicated=True),
            plan,
            self._executables,
        )
        sampler = StepSampler(head, self._sampling_states[head.start], self._executables)
        buckets = plan.buckets(placement_width(placement))
        instance = Instance(runner, lanes, sampler, self._on_result, self._executables, buckets=buckets, released=1)
        instance.lane_buckets = plan.buckets(placement_width(placement) // placement.num_microbatches)
        instance.page_allocators = [
            (allocator, device, len(groups[group])) for (group, device), allocator in allocators.items()
        ]
        return instance

    def _placed_allocator(self, num_pages: int) -> BuddyAllocator:
        allocator = BuddyAllocator(self._dims.max_tp)
        allocator.add_extent(num_pages)
        return allocator

    def _new_extents(self, placement: Placement, home: Home, num_pages: int) -> KvBuffers:
        """Make the extents of a home: one for each layer whose attention it computes."""
        mesh = self._plan.sub_meshes.group(home.start, home.degree)
        shape = (home.degree * num_pages, self._dims.pages.page_elems)
        return [
            [jnp.zeros(shape, self._dims.dtype, device=mesh.sharded)] if home in homes else []
            for homes in placement.attention
        ]

    def new_instance(
        self,
        group: SubMesh,
        allocators: list[BuddyAllocator],
        kv: KvBuffers,
        released: int,
        scratch: Scratch | None = None,
    ) -> Instance:
        """An instance over extents and the allocators of their pages, one a rank.

        `scratch` is what the instances before had; without it, it is recreated.
        """
        scratch = scratch or self._new_scratch(group)
        site = self.new_site(group, kv, released)
        runner = Runner(
            group,
            {group.home: site},
            Placement.uniform(group.home, self._dims.config.num_layers),
            HiddenStates(dict(zip(group.device_indices, scratch.hidden, strict=True))),
            assemble(group, scratch.last_tokens, replicated=True),
            self._plan,
            self._executables,
        )
        return Instance(
            runner,
            [self.new_lane(PagePool(self._dims.pages, allocators, group.tp), group)],
            StepSampler(group, self._sampling_states[group.start], self._executables),
            self._on_result,
            self._executables,
            buckets=self._plan.buckets(group.tp),
            released=released,
        )

    def _new_scratch(self, group: SubMesh) -> Scratch:
        hidden = [self._new_hidden(device) for device in group.devices]
        return Scratch(
            [jax.device_put(np.zeros(self._plan.num_slots, np.int32), device) for device in group.devices],
            jax.block_until_ready(hidden),
        )

    def _new_hidden(self, device: jax.Device) -> jax.Array:
        shape = (self._dims.config.hidden_size, self._plan.hidden_tokens)
        return jnp.zeros(shape, self._dims.dtype, device=device)

    def scratch_of(self, instance: Instance) -> Scratch:
        """What an instance, which nothing is launched on any more, has of it. Of what is lost, the other is kept."""
        runner = instance.runner
        if is_lost(runner.last_tokens):
            runner.last_tokens = jax.device_put(np.zeros(self._plan.num_slots, np.int32), instance.group.replicated)
        return Scratch(disassemble(instance.group, runner.last_tokens), list(runner.hidden.release().values()))

    def empty_instance(self, group: SubMesh, released: int) -> Instance:
        """An instance with allocators and extents of its own, all new, once they are there: where memory is short, that
        is known here and not with the first step."""
        allocators = self.settle_allocators(group, [self.new_allocator(released) for _ in group.devices])
        pages = self._plan.extent_pages(released)
        shapes = [(group.tp * num_pages, self._dims.pages.page_elems) for num_pages in pages]
        kv = [
            [jnp.zeros(shape, self._dims.dtype, device=group.sharded) for shape in shapes]
            for _ in range(self._dims.config.num_layers)
        ]
        return self.new_instance(group, allocators, jax.block_until_ready(kv), released)

    def close(self) -> None:
        """Drop the device buffers that instances share."""
        self._sampling_states.clear()
        self._begins.clear()
