"""The devices of an engine, what lies in their memory, and the instances over them."""

import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import MemoryBudgetError, RequestError
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.instances.instance import Instance
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.background import compile_jobs
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.programs.compiling import Executable
from amoeba_jax.programs.enumeration import enumerate_programs
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.memory import ACTIVATION_KINDS, MemoryPlan
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.start_placement import home_pages
from amoeba_jax.weights.loading import OpenWeights
from amoeba_jax.weights.store import WeightStore
from sharding.ledger import Ledger, format_bytes
from sharding.mesh import SubMesh, assemble
from sharding.owners import Owner
from sharding.placement import Placement
from sharding.release import ReleasedShard

logger = logging.getLogger(__name__)

REVIVE_INTERVAL_S = 1.0
"""Seconds between two calls of `Cluster.revive` that try something."""
_REVIVE_PAUSE = 9
"""At least that many times as long as an attempt took lies between it and the next: the thread that launches steps
spends a tenth of its time on attempts at most, though each may read the weights."""
_TAKE_BACK_ATTEMPTS = 3


class Cluster:
    """Loads the weights onto every device, divides the rest of its memory, and makes instances.

    Programs for the degrees `compile_first` are compiled meanwhile, in the background.

    Attributes:
        instances: the present ones, by their first device.
        factory: makes instances, and their parts; there once the weights are loaded.
        lost: groups of devices that are out of service, as their instances could not be made again after a change of
            them failed; with the degree for which their weights are to be released. Their memory stays booked for them.
            Replaced as a whole when it changes, so any thread may read it.
        on_result: called from other threads whenever a step's result has arrived; must not block.
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
        self.on_result: Callable[[], None] = lambda: None
        self.instances: tuple[Instance, ...] = ()
        self.lost: dict[SubMesh, int] = {}
        self._next_revival_s = 0.0
        self._activation_bytes = self.memory_plan.activation_bytes
        for tp in compile_first:
            self.sub_meshes.check_degree(tp)
        self.executables.compile_later(enumerate_programs(self.plan, self.executables, compile_first))
        try:
            self._fill_memory(on_load)
        except BaseException:
            self.executables.background.close()
            raise

    def _fill_memory(self, on_load: Callable[[str], None]) -> None:
        """Load the weights, and make all else that lies on the devices, the first instances among it."""
        plan = self.memory_plan
        with self.open_weights() as reader:
            self.weights.load(reader, self.ledgers, on_load, self.plan.placement)
        with allocation_errors(plan):
            self.factory = InstanceFactory(
                self.plan, self.weights, self.executables, lambda: self.on_result(), self.config.tensor_parallel_size
            )
            for device, memory in self.plan.device_plans.items():
                self.ledgers[device].add(Owner.SAMPLING, memory.sampling_bytes)
                self.ledgers[device].add(Owner.HIDDEN, memory.hidden_bytes)
            if self.plan.placement is None:
                self._build(self.config.tensor_parallel_size)
            else:
                self._build_placed(self.plan.placement)
        for device in self.plan.device_plans:
            self.ledgers[device].reserve("activations", self._activation_bytes)
            self.ledgers[device].reserve("staging", plan.staging_bytes)

    def reserve_temporaries(self, executable: Executable) -> None:
        """Hold a program's temporaries against the budget. Raises `MemoryBudgetError` where they do not fit.

        Those that change layouts have memory set aside for them: see `staging_bytes`.
        """
        if executable.info.temp_bytes <= self._activation_bytes or executable.spec.kind not in ACTIVATION_KINDS:
            return
        for ledger in self.ledgers:
            try:
                ledger.reserve("activations", executable.info.temp_bytes)
            except MemoryBudgetError as error:
                for other in self.ledgers:
                    other.reserve("activations", self._activation_bytes)
                raise MemoryBudgetError(
                    f"program {executable.spec} needs {format_bytes(executable.info.temp_bytes)} of temporaries: "
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
            extents = self.plan.extent_pages(released)
            self.executables.check(self.plan.step_specs(self.executables.specs, part, shape, extents))

    def release_more(self, instance: Instance, degree: int) -> None:
        """Give an instance the weights as cache that are released at a higher degree than its present one."""
        for layer, extents in enumerate(instance.site.kv):
            extents += self.weights.release(instance.group, layer, instance.released, degree)
        instance.site.extent_pages = self.plan.extent_pages(degree)
        new = self.plan.extent_pages(degree)[len(self.plan.extent_pages(instance.released)) :]
        for device in instance.group.device_indices:
            for num_pages in new:
                self.factory.allocators[device].add_extent(num_pages)
        instance.released = degree

    def rebuild(self, instance: Instance) -> None:
        """Put an instance with an empty cache in the place of one that runs nothing, and whose programs may have lost
        buffers: these are made again."""
        for site in instance.runner.sites.values():
            site.replace_lost()
        instance.sampler.state.replace_lost()
        if instance.is_placed:
            self.replace([instance], [self.factory.placed_instance(instance.runner.placement, instance)])
            return
        empty = [self.factory.new_allocator(instance.released) for _ in instance.group.devices]
        allocators = self.factory.settle_allocators(instance.group, empty)
        parts = instance.group, allocators, instance.site.kv, instance.released
        self.replace([instance], [self.factory.new_instance(*parts, self.factory.scratch_of(instance))])

    def replace(self, old: list[Instance], new: list[Instance]) -> None:
        """Put instances in the place of others over the same devices. Of the old ones only `kv` is of use any more."""
        self.swap(old, new)
        for instance in old:
            instance.retire()

    @property
    def all_instances(self) -> list[Instance]:
        """The present instances, and those whose requests are paused."""
        return [each for instance in self.instances for each in (instance, *instance.paused)]

    def swap(self, old: Iterable[Instance], new: Iterable[Instance]) -> None:
        """`replace`, with the old ones kept as they are."""
        kept = [instance for instance in self.instances if instance not in old]
        self.instances = tuple(sorted([*kept, *new], key=lambda instance: instance.id))

    # Groups whose instances are gone

    def take_back(self, old: list[Instance]) -> list[SubMesh]:
        """Put empty instances like the old ones in their place, with the weights that those had, after a change of them
        failed part-way. The old ones run nothing, and have given up their cache.

        Tried several times: what the change has taken may be freed late. Returns the groups for which that did not
        help. They are out of service: see `lost`.
        """
        self.replace(old, [])
        self.lost = {**self.lost, **{instance.group: instance.released for instance in old}}
        groups, reasons = [instance.group for instance in old], {}
        for attempt in range(_TAKE_BACK_ATTEMPTS):
            if attempt:
                gc.collect()
            reasons = {group: reason for group in groups if (reason := self._make_again(group)) is not None}
            groups = list(reasons)
            if not groups:
                break
        for group, reason in reasons.items():
            logger.warning("%s is out of service: %s", group, reason)
        self._next_revival_s = time.monotonic() + REVIVE_INTERVAL_S
        return groups

    def revive(self) -> bool:
        """Try to make instances of groups that are out of service; return whether any is back in service.

        To be called often, in the dispatcher thread: it does nothing while nothing is lost, and nothing within
        `REVIVE_INTERVAL_S` of the attempt before. Does not raise: a group that fails stays lost.
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
        """Raise `RequestError` if any of these devices is out of service."""
        for group in self.lost:
            if not set(group.device_indices).isdisjoint(devices):
                raise RequestError(
                    f"devices {list(group.device_indices)} are out of service: their instance could not be made again "
                    "after a transformation failed. It is tried again every second: wait until they are back"
                )

    def _make_again(self, group: SubMesh) -> str | None:
        """Make the instance of a group that is out of service. Where that fails, return why: the group stays so."""
        try:
            if self.plan.placement is not None:
                instance = self.factory.placed_instance(self.plan.placement)
            else:
                instance = self._empty_instance(group, self.lost[group])
        except Exception as error:
            drop_frames(error)
            return f"{type(error).__name__}: {error}"
        self.lost = {other: degree for other, degree in self.lost.items() if other != group}
        self.replace([], [instance])
        return None

    def _empty_instance(self, group: SubMesh, released: int) -> Instance:
        """Return an instance with an empty cache, with its weights released for a degree or read again."""
        layers = range(self.dims.config.num_layers)
        # Release memory first, and do the slowest part last.
        for layer in layers:
            if (present := self._released_for(group, layer)) < released:
                self.weights.release(group, layer, present, released)
        instance = self.factory.empty_instance(group, released)
        if any(self._released_for(group, layer) > released for layer in layers):
            with self.open_weights() as reader:
                self.weights.reload(reader, group, [released] * group.tp)
        return instance

    def _released_for(self, group: SubMesh, layer: int) -> int:
        """Degree for which weights of a layer are released on a group's devices, all of which have the same."""
        shards = self.weights.released(layer, self.dims.max_tp)
        return max((shard.degree for shard in shards if not self._has(group.start, shard)), default=1)

    def _has(self, device: int, shard: ReleasedShard) -> bool:
        try:
            self.weights.shard(device, shard.spec.name, shard.shards[device % self.dims.max_tp])
        except KeyError:
            return False
        return True

    def _build(self, tp: int) -> None:
        """The first instances, of degree `tp`. What their ranks do not need of the weights is KV cache at once."""
        plan, dims = self.memory_plan, self.dims
        for ledger in self.ledgers:
            for layer in range(dims.config.num_layers):
                ledger.add(Owner.KV_CACHE, plan.num_pages * plan.page_bytes, layer)
        instances = []
        for group in self.sub_meshes.groups(tp):
            kv = [
                [assemble(group, extents), *self.weights.release(group, layer, 1, tp)]
                for layer, extents in enumerate(self._base_extents(group))
            ]
            instances.append(self.factory.new_instance(group, self.factory.allocators_of(group), kv, tp))
        self.instances = tuple(instances)

    def _build_placed(self, placement: Placement) -> None:
        """Make the only instance of a start placement."""
        pages = home_pages(placement, self.plan.device_plans)
        for layer, homes in enumerate(placement.attention):
            for home in set(homes):
                for device in home.devices:
                    size = pages[home] * self.memory_plan.page_bytes
                    self.ledgers[device].add(Owner.KV_CACHE, size, layer)
        self.instances = (self.factory.placed_instance(placement),)

    def _base_extents(self, group: SubMesh) -> list[list[jax.Array]]:
        """Each layer's pages that are cache at every degree, on each of a group's devices, once they are there."""
        shape, dtype = (self.memory_plan.num_pages, self.dims.pages.page_elems), self.dims.dtype
        layers = range(self.dims.config.num_layers)
        return jax.block_until_ready([[jnp.zeros(shape, dtype, device=d) for d in group.devices] for _ in layers])

    def close(self) -> None:
        """Drop every device buffer."""
        for instance in self.instances:
            instance.close()
        self.instances = ()
        self.lost = {}
        self.factory.close()
        self.weights.release_all()


@contextlib.contextmanager
def allocation_errors(plan: MemoryPlan) -> Iterator[None]:
    """Raise `MemoryBudgetError`, which names the budget, for an allocation that fails within. What is allocated has to
    be awaited within, too: JAX makes arrays later, and would tell with the first step."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryBudgetError(
            f"a device could not allocate what the engine plans within a budget of {format_bytes(plan.budget_bytes)}, "
            f"of which each layer's KV cache takes {format_bytes(plan.num_pages * plan.page_bytes)}: choose a smaller "
            "device_memory or memory_utilization. On a GPU the rest of its memory may be in use, or in pieces "
            "(XLA_PYTHON_CLIENT_PREALLOCATE=false makes pieces)"
        ) from error


def drop_frames(error: BaseException) -> None:
    """Clear the frames that an error and its causes hold: device buffers in them would live as long as the error."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
