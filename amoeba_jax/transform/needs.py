"""Programs and memory that a transformation needs.

All programs are compiled before the transformation begins, so that no request waits for a compiler during it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.programs.enumeration import least_specs
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.sampling.rows import SamplerKind, packed_size
from amoeba_jax.transform.options import TransformOptions
from sharding.mesh import SubMesh


def sampler_kinds(instances: list[Instance]) -> set[SamplerKind]:
    """Return the kinds of samplers that the running sequences of instances need."""
    return {sequence.sampling.kind for instance in instances for sequence in instance.running}


def reserve_staging(cluster: Cluster, devices: Iterable[int], num_bytes: int) -> None:
    """Reserve memory for temporaries of a transition on each device.

    If `num_bytes` is 0, reserve the planned staging bytes.

    Raises `MemoryBudgetError`.
    """
    for device in devices:
        cluster.ledgers[device].reserve("staging", max(num_bytes, cluster.memory_plan.staging_bytes))


@dataclass(frozen=True)
class GroupChange:
    """Change of a group of devices from one degree to another.

    Attributes:
        group: the devices, as a group of the higher degree.
        lower: lower degree.
        up: True for a merge, False for a split.
        released: degrees for which weights are released before and after the change.
        memory_first: whether the FFNs of all layers change before any page moves (merge), or after all pages have moved
            (split).
    """

    group: SubMesh
    lower: int
    up: bool
    released: tuple[int, int]
    memory_first: bool = False

    @classmethod
    def of(cls, cluster: Cluster, options: TransformOptions, old: list[Instance]) -> "GroupChange":
        """Return the change of the instances `old`: a merge of several instances, or the split of one."""
        tp, up = options.tensor_parallel_size, len(old) > 1
        group = cluster.sub_meshes.group(old[0].id, sum(instance.tp for instance in old))
        before = max(instance.released for instance in old)
        if not up:
            lower, released = tp, (before, min(before, tp))
        else:
            lower, released = old[0].tp, (before, max(group.tp, before) if options.release_weights else before)
        return cls(group, lower, up, released, options.order == "memory_first" and released[0] != released[1])

    @property
    def target(self) -> int:
        """Degree after the change."""
        return self.group.tp if self.up else self.lower

    def is_view_only(self, options: TransformOptions, old: list[Instance]) -> bool:
        """Return whether the change moves no pages.

        Either requests pause, or paused requests resume and no others run.
        """
        pauses = self.up and options.running == "pause"
        resumes = not self.up and bool(old[0].paused) and not old[0].running
        return pauses or resumes


def needed_programs(cluster: Cluster, options: TransformOptions, old: list[Instance]) -> list[ProgramSpec]:
    """Return the programs that the merge or split of the instances `old` needs.

    These are the programs of steps during the change (if any sequence runs), the programs that move pages and weights,
    and the fewest programs with which the new instances can serve.
    """
    kinds = sampler_kinds(old)
    change = GroupChange.of(cluster, options, old)
    group, buckets = change.group, cluster.buckets(change.lower)
    most = max(len(instance.running) for instance in old)
    rows = min(most, buckets.max_num_seqs)  # a new instance of a split runs no more than this
    needed: list[ProgramSpec] = []
    moves = not change.is_view_only(options, old)
    programs = _compiled_for_steps(cluster, change, rows, kinds) if moves else None
    if moves and programs is None:
        # Compile the largest steps. They serve any number of sequences, also if more start before the change.
        programs = _programs(cluster, change, buckets.max_num_seqs)
        needed += _step_specs(cluster, programs, kinds)
    if programs is not None:
        needed += programs.restore_specs()
        if most or any(instance.lane.cache.num_cached_pages for instance in old):
            needed += programs.exchange_specs()
    for first in range(group.start, group.start + group.tp, change.target):
        part = cluster.sub_meshes.group(first, change.target)
        needed += least_specs(cluster.plan, cluster.executables, part, change.released[1], kinds)
    return needed


def request_programs(cluster: Cluster, options: TransformOptions, groups: list[list[Instance]]) -> int:
    """Compile missing programs for the change of each group in the background.

    Return the number of missing programs.
    """
    specs = [spec for old in groups for spec in needed_programs(cluster, options, old)]
    return 0 if cluster.executables.request(specs) else cluster.executables.num_missing(specs)


def transition_programs(
    cluster: Cluster, change: GroupChange, rows: int, kinds: set[SamplerKind]
) -> TransitionPrograms:
    """Return the programs of a transition during which each lower-degree instance decodes up to `rows` sequences.

    The decode step is the smallest step whose programs are compiled. If there is none, it is the smallest step.
    """
    found = _compiled_for_steps(cluster, change, rows, kinds)
    return found or _programs(cluster, change, cluster.buckets(change.lower).step(rows).num_rows)


def _compiled_for_steps(
    cluster: Cluster, change: GroupChange, rows: int, kinds: set[SamplerKind]
) -> TransitionPrograms | None:
    """Return the transition programs with the fewest rows for which all step programs are compiled.

    Return None if none are.
    """
    for bucket in cluster.buckets(change.lower).decode_sizes:
        if bucket >= rows:
            programs = _programs(cluster, change, bucket)
            if not rows or cluster.executables.available(_step_specs(cluster, programs, kinds)):
                return programs
    return None


def _programs(cluster: Cluster, change: GroupChange, rows: int) -> TransitionPrograms:
    return TransitionPrograms(
        cluster.plan,
        cluster.executables,
        change.group,
        change.lower,
        up=change.up,
        released=change.released,
        rows=rows,
        memory_first=change.memory_first,
    )


def _step_specs(cluster: Cluster, programs: TransitionPrograms, kinds: set[SamplerKind]) -> list[ProgramSpec]:
    """Return the programs of all steps that can run during a transition, with their samplers."""
    specs, rows, slots = cluster.executables.specs, programs.shape.num_rows, cluster.plan.num_slots
    needed = programs.step_specs() + programs.prompt_specs()
    for count in (rows, cluster.buckets(programs.lower).few_rows):
        if kinds - {"greedy"}:
            # Sequences that need the full sampler may end before the others.
            needed.append(specs.sample(programs.group, count, slots, packed_size(count)))
        if "full" in kinds:
            needed.append(specs.sample_full(programs.group, count, slots, packed_size(count, full=True)))
    if "full" in kinds:
        needed.append(specs.set_state(programs.group, slots))
    return needed
