"""Plan merges and splits: check the options, find the groups of devices that change, and list the needed programs.

All programs are compiled before a change begins, so that no request waits for a compiler during the change.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from amoeba_jax.errors import LayoutError, MemoryBudgetError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.programs.enumeration import relocation_specs
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.sampling.rows import SamplerKind, packed_size
from amoeba_jax.transform.lanes import LanePages
from amoeba_jax.transform.movers import InPlaceMover
from amoeba_jax.transform.options import PlacementOptions, TransformOptions
from sharding.mesh import SubMesh
from sharding.placement import Home, Placement


def check_options(
    options: TransformOptions, cluster: Cluster, present: Iterable[TransformOptions | PlacementOptions]
) -> None:
    """Check the arguments of `LLM.transform`.

    Raises `LayoutError` if the devices cannot form instances of the requested degree, or if the placement of an
    instance rules out the change. Raises `RequestError` in these cases:

    - an option does not fit another option, a setting of the engine, or the present instance of a device,
    - an unfinished change includes one of the devices,
    - one of the devices is out of service,
    - instances of different degrees would have to pause together,
    - one of the devices has requests that are paused at another degree than the requested degree.

    Args:
        present: options of all unfinished changes.
    """
    tp, devices, chosen = options.tensor_parallel_size, options.devices, set(options.devices)
    meshes = cluster.sub_meshes
    meshes.check_degree(tp)
    if not devices or sorted(set(devices)) != list(devices) or devices[0] < 0 or devices[-1] >= len(meshes.devices):
        raise LayoutError(
            f"devices={list(devices)} must be different indices, in order, of the {len(meshes.devices)} devices"
        )
    if options.running == "pause" and options.release_weights and tp > 1:
        raise RequestError(
            "running='pause' needs release_weights=False: pages of paused requests stay where they are, and released "
            "weights would have to come back while they do"
        )
    if options.attention_degree is not None:
        _check_attention(options, cluster)
    if options.order == "memory_first" and cluster.dims.transform_attention:
        raise RequestError(
            "order='memory_first' needs transform_attention=False: attention weights change together with their pages"
        )
    for instance in cluster.instances:
        placement = instance.runner.placement
        if chosen.isdisjoint(instance.devices):
            continue
        if instance.transition is not None and not instance.transition.changes_degree:
            raise RequestError(f"instance {instance.id} is changing its placement: wait until it is done")
        if cluster.plan.placement is not None and cluster.plan.placement.attention_degree is not None:
            raise LayoutError(
                f"instance {instance.id} ({placement}) has data-parallel attention, and its devices do not hold all "
                "weights: it merges and splits only if the model fits on each device and transform_attention is off"
            )
        if instance.has_parallel_attention and options.running == "pause":
            raise RequestError(
                f"running='pause' is not possible for instance {instance.id}, which has data-parallel attention: its "
                "requests cannot resume there. Use running='migrate'"
            )
        if cluster.plan.placement is not None or (instance.is_spread and not instance.has_parallel_attention):
            raise LayoutError(
                f"instance {instance.id} has a placement of its own ({placement}): only instances whose layers are all "
                "on the same devices merge and split. Evict its replicas and migrate its layers back first"
            )
    if empty := chosen.intersection(cluster.empty_devices):
        raise LayoutError(f"devices {sorted(empty)} are empty: they need an instance first (LLM.scale_out)")
    for other in present:
        if isinstance(other, TransformOptions) and not chosen.isdisjoint(other.devices):
            raise RequestError(f"devices {list(other.devices)} are being transformed: wait until they are done")
    for instance in cluster.instances:
        group = set(instance.group.device_indices)
        if not group.isdisjoint(devices) and not group <= set(devices):
            raise LayoutError(
                f"devices={list(devices)} cut instance {instance.group} in two: name all of its devices, or none"
            )
    for group in meshes.groups(tp) if options.running == "pause" else ():
        found = {i.tp for i in cluster.instances if i.id in group.device_indices and i.id in devices}
        if len(found) > 1:
            raise RequestError(
                f"devices {list(group.device_indices)} have instances of degrees {sorted(found)}: those of one degree "
                "can pause together; transform them to one first"
            )
    for start in range(0, len(meshes.devices), tp):
        named = set(range(start, start + tp)) & set(devices)
        if named and len(named) < tp:
            raise LayoutError(
                f"devices={list(devices)} do not make up TP{tp} instances: devices {start} to {start + tp - 1} "
                "belong together"
            )
    cluster.check_in_service(devices)
    for instance in [i for i in cluster.instances if i.id in devices and i.paused_sequences]:
        if (degree := instance.paused[0].tp) != tp:
            count, group = len(instance.paused_sequences), list(instance.group.device_indices)
            raise RequestError(
                f"{count} requests are paused on devices {group}: transform them to TP{degree} first, which lets them "
                "go on"
            )


def _check_attention(options: TransformOptions, cluster: Cluster) -> None:
    tp, degree = options.tensor_parallel_size, options.attention
    if type(degree) is not int or degree < 1 or degree > tp or degree & (degree - 1):
        raise LayoutError(f"attention_degree={degree} must be a power of two, and at most tensor_parallel_size={tp}")
    if degree < tp and options.running == "pause":
        raise RequestError("running='pause' does not fit attention_degree: paused requests resume at their old degree")
    if degree < tp and cluster.dims.transform_attention:
        raise RequestError(
            "attention_degree needs transform_attention=False: attention of a lower degree needs all attention weights"
        )


ChangeKind = Literal["merge", "split", "join", "divide", "pause", "resume"]


@dataclass(frozen=True)
class RelayoutPlan:
    """Plan to change a group of devices from one degree to another. The change has not begun.

    The kind of the change is one of these:

    - `merge`: several instances become one.
    - `split`: one instance becomes several.
    - `divide`: one instance changes to data-parallel attention. The FFN weights stay where they are.
    - `join`: one instance ends its data-parallel attention. The FFN weights stay where they are.
    - `pause`: several instances pause with their requests, and one larger instance serves. No pages move.
    - `resume`: the larger instance ends, and the paused instances serve again. No pages move.

    Attributes:
        old: instances of the group before the change. There are several in a merge or pause, and otherwise one.
        group: all devices that change, as one group. The size of the group is the higher degree.
        lower: lower degree of the change. In a `divide` or `join`, the degree of the data-parallel attention.
        released: released degrees, as `(before the change, after the change)`. With released degree n, a device keeps
            only the weights that TPn needs. The memory of all other weights is KV cache.
        memory_first: whether the FFNs of all layers change together, so that all unneeded FFN weights are KV cache
            while pages move. If True, a merge changes the FFNs before any page moves, and a split changes the FFNs
            after all pages have moved. If False, a merge or split changes the FFN of a layer together with its pages.
    """

    options: TransformOptions
    old: list[Instance]
    group: SubMesh
    lower: int
    released: tuple[int, int]
    kind: ChangeKind
    memory_first: bool = False

    @classmethod
    def of(cls, cluster: Cluster, options: TransformOptions, old: list[Instance]) -> "RelayoutPlan":
        """Return the plan to change the instances `old`.

        If `old` has several instances, they merge or pause. If `old` has one instance, this instance splits, resumes
        its paused instances, or changes to or from data-parallel attention.
        """
        tp, first = options.tensor_parallel_size, old[0]
        group = cluster.sub_meshes.group(first.id, sum(instance.tp for instance in old))
        before = after = max(instance.released for instance in old)
        kind: ChangeKind
        if len(old) > 1:
            lower, kind = first.tp, "pause" if options.running == "pause" else "merge"
            if options.release_weights:
                after = max(group.tp, before)
        elif first.has_parallel_attention:
            lower, kind = first.attention_degree, "join"
        elif group.tp == tp:
            lower, kind = options.attention, "divide"
        else:
            lower, after = tp, min(before, tp)
            resumes = bool(first.paused) and first.paused[0].tp == tp and not first.running
            kind = "resume" if resumes else "split"
        memory_first = options.order == "memory_first" and before != after
        return cls(options, old, group, lower, (before, after), kind, memory_first)

    @property
    def up(self) -> bool:
        """Whether the change increases the degree. True in a `merge`, `join` or `pause`."""
        return self.kind in ("merge", "join", "pause")

    @property
    def attention_only(self) -> bool:
        """Whether only the attention changes its degree. True in a `divide` or `join`."""
        return self.kind in ("join", "divide")

    @property
    def target(self) -> int:
        """Degree after the change. In a `divide` or `join`, the degree of the attention after the change."""
        return self.group.tp if self.up else self.lower

    @property
    def draining(self) -> list[Instance]:
        """Instances whose steps in flight must end before the change begins.

        In a `pause`, only the instances that must first release weights. In any other change, all instances in `old`.
        """
        if self.kind != "pause":
            return self.old
        return [instance for instance in self.old if instance.released < self.released[0]]

    def programs(self, cluster: Cluster) -> list[ProgramSpec]:
        """Return the specs (descriptions) of the programs that the change needs.

        The list has three kinds of programs. A `pause` or `resume` needs only the last kind:

        - programs of steps during the change, if any sequence runs,
        - programs that move pages, if there are any pages, and programs that restore weights,
        - the fewest programs that the instances need to serve after the change.
        """
        old, group, buckets = self.old, self.group, cluster.plan.buckets(self.lower)
        kinds = sampler_kinds(old)
        lanes = [lane for instance in old for lane in instance.lanes]
        most = max(len(lane.running) for lane in lanes)
        rows = min(most, buckets.max_num_seqs)  # the most that an instance of the lower degree runs
        needed: list[ProgramSpec] = []
        if self.kind not in ("pause", "resume"):
            programs = _programs(cluster, self, rows, kinds)
            if rows:
                needed += _step_specs(cluster, programs, kinds)
            needed += programs.restore_specs()
            if most or any(lane.cache.num_cached_pages for lane in lanes):
                needed += programs.exchange_specs()
        num_layers, extents = cluster.dims.config.num_layers, cluster.plan.extent_pages(self.released[1])
        if self.kind == "divide":
            placements = [Placement.parallel_attention(group.home, self.lower, num_layers)]
        else:
            firsts = range(group.start, group.start + group.tp, self.target)
            placements = [Placement.uniform(Home(first, self.target), num_layers) for first in firsts]
        for placement in placements:
            pages = dict.fromkeys((placement.head, *placement.attention[0]), extents)
            width = placement.head.degree
            needed += relocation_specs(cluster.plan, cluster.executables, placement, width, pages, kinds)
        return needed


def relayout_plans(cluster: Cluster, options: TransformOptions) -> list[RelayoutPlan]:
    """Return a plan for each group of devices that can change now.

    Each plan merges or pauses several instances of equal degree, or changes one instance. Some instances need several
    changes, one after the other. For example, an instance must end its data-parallel attention before it merges or
    splits. When the planned changes have ended, call this function again to get the plans of the next changes.
    """
    tp, devices = options.tensor_parallel_size, set(options.devices)
    mine = [i for i in cluster.instances if i.transition is None and i.id in devices]
    mine = [i for i in mine if not options.is_reached_by(i.tp, i.attention_degree)]
    groups = [[i] for i in mine if i.has_parallel_attention or i.tp > tp or (i.tp == tp and options.attention < tp)]
    size = tp
    while size > 1:
        for start in range(0, len(cluster.sub_meshes.devices), size):
            inside = [i for i in mine if start <= i.id < start + size and i.tp < size]
            if sum(i.tp for i in inside) != size or len({i.tp for i in inside}) != 1:
                continue
            if not any(i in group for group in groups for i in inside):
                groups.append(inside)
        size //= 2
    return [RelayoutPlan.of(cluster, options, old) for old in groups]


class Prepared(NamedTuple):
    """Result of `prepare`: compiled programs, and the size of the reserved memory.

    Attributes:
        programs: programs of the transition.
        mover: launcher of the programs that move pages and restore weights.
        staging_bytes: number of bytes of temporary memory that the programs of `mover` need on a device.
        seconds: duration of `prepare` in seconds. Most of the time is compilation.
    """

    programs: TransitionPrograms
    mover: InPlaceMover
    staging_bytes: int
    seconds: float


def prepare(cluster: Cluster, plan: RelayoutPlan, parts: list[LanePages]) -> Prepared:
    """Compile the programs of a transition between two degrees. Reserve memory for the programs' temporary arrays.

    Raises `RequestError` if the memory budget is too small. Raises `NotCompiledError` if a program is missing and
    `strict_compile` is set.

    Args:
        parts: sequences and cached pages, one `LanePages` for each lane of the transition.
    """
    start = time.perf_counter()
    most = max(len(part.sequences) for part in parts)
    programs = _programs(cluster, plan, most, sampler_kinds(plan.old))
    if most:
        programs.prepare_steps(prompts=any(s.num_uncomputed_tokens > 1 for part in parts for s in part.sequences))
    max_pieces = 0
    if any(part.num_pages for part in parts):
        num_layers, pace = cluster.dims.config.num_layers, plan.options.layers_per_step
        steps = num_layers if pace == "auto" else -(-num_layers // pace)
        new_pages = cluster.plan.buckets(plan.lower).max_num_seqs * (1 + steps // cluster.dims.page_size)
        max_pieces = max(part.num_pages for part in parts) + new_pages
    mover = InPlaceMover(programs, cluster.weights)
    staging_bytes = mover.prepare(max_pieces)
    try:
        reserve_staging(cluster, plan.group.device_indices, staging_bytes)
    except MemoryBudgetError as error:
        raise RequestError(f"{error}, or kv_cache_tokens") from error
    return Prepared(programs, mover, staging_bytes, time.perf_counter() - start)


def _programs(cluster: Cluster, plan: RelayoutPlan, rows: int, kinds: set[SamplerKind]) -> TransitionPrograms:
    """Return the programs of a transition. All decode steps of the transition have the same batch size, chosen here.

    The batch size is the number of sequences that each instance of the lower degree can decode in one step. Choose the
    smallest batch size of at least `rows` whose step programs are all compiled. If there is no such batch size, choose
    the largest batch size, because more sequences may start during the compilation.

    Args:
        rows: minimum batch size. If 0, the transition needs no step programs.
        kinds: kinds of samplers that the steps need.
    """
    executables = cluster.executables
    sizes = [size for size in cluster.plan.buckets(plan.lower).decode_sizes if size >= rows]
    found = [
        TransitionPrograms(
            cluster.plan,
            executables,
            plan.group,
            plan.lower,
            up=plan.up,
            released=plan.released,
            rows=size,
            memory_first=plan.memory_first or plan.attention_only,
        )
        for size in sizes
    ]
    for programs in found:
        if not rows or executables.available(_step_specs(cluster, programs, kinds)):
            return programs
    return found[-1]


def _step_specs(cluster: Cluster, programs: TransitionPrograms, kinds: set[SamplerKind]) -> list[ProgramSpec]:
    """Return the specs of all step programs and sampler programs that a transition can need.

    `kinds` are the kinds of samplers that the running sequences need.
    """
    specs, rows, slots = cluster.executables.specs, programs.shape.num_rows, cluster.plan.num_slots
    needed = programs.step_specs() + programs.prompt_specs()
    for count in (rows, cluster.plan.buckets(programs.lower).few_rows):
        if kinds - {"greedy"}:
            # If all sequences that need the full sampler end, the other sequences need this sampler.
            needed.append(specs.sample(programs.group, count, slots, packed_size(count)))
        if "full" in kinds:
            needed.append(specs.sample_full(programs.group, count, slots, packed_size(count, full=True)))
    if "full" in kinds:
        needed.append(specs.set_state(programs.group, slots))
    return needed


def sampler_kinds(instances: list[Instance]) -> set[SamplerKind]:
    """Return the kinds of samplers that the running sequences of `instances` need."""
    return {sequence.sampling.kind for instance in instances for sequence in instance.running}


def reserve_staging(cluster: Cluster, devices: Iterable[int], num_bytes: int) -> None:
    """Reserve staging memory on each of the devices: memory for temporary arrays of a transition.

    The new reservation replaces the previous reservation of staging memory. The new size is `num_bytes` or the staging
    size in the memory plan, whichever is larger. After a transition, pass 0 to return to the size in the memory plan.
    Raises `MemoryBudgetError` if too little memory is free.
    """
    for device in devices:
        cluster.ledgers[device].reserve("staging", max(num_bytes, cluster.memory_plan.staging_bytes))
