"""Lists of all programs that serving can need.

The lists depend only on the sizes of the model and the engine. No weights or buffers are needed to make them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from amoeba_jax.models.decoder import SegmentPlan, embedding_plan, module_plan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EXTRA_SHARES, EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.start_placement import home_pages, placement_width
from amoeba_jax.programs.step_program import LogitsOf
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.programs.work import copied_columns, work_list, work_specs
from amoeba_jax.sampling.rows import SamplerKind, packed_size
from sharding.mesh import SubMesh
from sharding.placement import Home, ModuleKind, Placement


def enumerate_programs(plan: EnginePlan, executables: Executables, degrees: tuple[int, ...]) -> list[ProgramSpec]:
    """Return the programs of all instances of the given degrees, and of all transitions between these degrees.

    Each program occurs once. The programs of `LLM.logits` are left out. `kept_weights`, `placement_programs` and
    `parallel_attention_programs` return further programs.
    """
    by_degree = enumerate_by_degree(plan, executables, degrees)
    return [spec for specs in by_degree.values() for spec in specs]


def enumerate_by_degree(
    plan: EnginePlan, executables: Executables, degrees: tuple[int, ...]
) -> dict[int, list[ProgramSpec]]:
    """Return the programs of `enumerate_programs`, divided into one list for each degree, in the order of `degrees`.

    The list of a degree has the programs of its instances. It also has the programs of transitions between this degree
    and the degrees that come earlier in `degrees`. Programs that are in an earlier list are left out.

    With a start placement, `degrees` is ignored. There is one list, with all programs of the only instance.
    """
    if plan.placement is not None:
        pages = home_pages(plan.placement, plan.device_plans)
        homes = {plan.placement.head, *(h for of in (*plan.placement.attention, *plan.placement.ffn) for h in of)}
        specs = _instance(plan, executables, plan.placement, {home: (pages.get(home, 0),) for home in homes})
        return {degree: list({spec.key: spec for spec in specs}.values()) for degree in plan.degrees}
    known: set[object] = set()
    by_degree: dict[int, list[ProgramSpec]] = {}
    for index, tp in enumerate(degrees):
        mine = list(_instances(plan, executables, tp, tp))
        for before in degrees[:index]:
            for group in plan.sub_meshes.groups(max(tp, before)):
                mine += _transition(plan, executables, group, min(tp, before), group.tp)
        found = {spec.key: spec for spec in mine if spec.key not in known}
        known |= found.keys()
        by_degree[tp] = list(found.values())
    return by_degree


def kept_weights(plan: EnginePlan, executables: Executables, degrees: tuple[int, ...]) -> list[ProgramSpec]:
    """Return further programs for merged instances that keep all of their weights.

    Usually, a merge turns unneeded weights into KV cache. If the merge pauses requests, the merged instance keeps all
    weights. It then has fewer extents (parts of the KV cache), and needs other programs for this number of extents.
    Programs of changes between the lowest degree and higher degrees are included. Programs of `enumerate_programs` are
    left out.

    The list is empty without `EngineConfig.prepare_pausing`, and with a start placement.
    """
    if not plan.config.prepare_pausing or plan.placement is not None:
        return []
    known = {spec.key for spec in enumerate_programs(plan, executables, degrees)}
    lowest, found = min(degrees), dict[object, ProgramSpec]()
    for tp in degrees:
        specs = list(_instances(plan, executables, tp, lowest)) if tp > lowest else []
        for group in plan.sub_meshes.groups(tp) if tp > lowest else ():
            specs += _transition(plan, executables, group, lowest, lowest)
        found.update((spec.key, spec) for spec in specs if spec.key not in known)
    return list(found.values())


def placement_programs(plan: EnginePlan, executables: Executables) -> list[ProgramSpec]:
    """Return the programs of all placements that TP1 instances can reach by replicating and migrating layers.

    The number of these programs depends on the lengths of segments and on the step shapes, but not on the number of
    placements. Some of these programs are also in `enumerate_programs`.

    The list is empty without `EngineConfig.prepare_placements`, and with a start placement.
    """
    if not plan.config.prepare_placements or plan.placement is not None:
        return []
    specs, buckets, width = executables.specs, plan.buckets(1), plan.hidden_tokens
    base = plan.memory.num_pages
    extents = [(base,), *((base, pages) for share in EXTRA_SHARES if (pages := int(base * share)))]
    alone = [*buckets.all(), *(buckets.step(0, 1, chunk) for chunk in buckets.chunk_sizes)]
    blocks = {size * count for size in buckets.decode_sizes for count in range(1, plan.width + 1)}
    blocks = {rows for rows in blocks if rows <= plan.buckets(plan.width).max_num_seqs}
    shapes = {*alone, *(BatchShape(((rows, 1),), buckets.table_width) for rows in blocks)}
    columns = {copied_columns(shape.num_tokens, width) for shape in alone} | {min(rows, width) for rows in blocks}
    kinds = list(dict.fromkeys(_segment_kinds(plan)))
    prompts = [buckets.step(0, 1, chunk) for chunk in buckets.prompt_logits_chunks]
    found: list[ProgramSpec] = []
    for group in plan.sub_meshes.groups(1):
        found += [plan.head_spec(specs, group, shape, "all") for shape in prompts]
        for shape in shapes:
            found += [plan.layers_spec(specs, group, kind, shape, pages) for kind in kinds for pages in extents]
            found.append(plan.head_spec(specs, group, shape))
        found += _samplers(plan, executables, group, {shape.num_rows for shape in shapes})
        found += [make(group, n, width) for n in sorted(columns) for make in (specs.take_columns, specs.put_columns)]
        for pages in extents:
            found += [make(group, pages, plan.transfer_pages) for make in (specs.page_read, specs.page_write)]
            found.append(specs.page_copy(group, pages))
    return list({spec.key: spec for spec in found}.values())


def _segment_kinds(plan: EnginePlan) -> Iterator[SegmentPlan]:
    """Yield one segment of each kind that `SegmentCutter` can return, with and without the embedding."""
    whole = {segment.kinds: segment.layers for segment in plan.segments}.values()
    kinds = plan.dims.config.kinds
    single = {kind: range(layer, layer + 1) for layer, kind in enumerate(kinds)}.values()
    modules: tuple[tuple[ModuleKind, Collection[range]], ...] = (
        ("layer", [*whole, *single]),
        ("attention", single),
        ("ffn", single),
    )
    yield embedding_plan()
    for module, of in modules:
        for layers in of:
            for embeds in (True, False):
                yield module_plan(plan.dims, layers, module, embeds=embeds)


def parallel_attention_programs(plan: EnginePlan, executables: Executables) -> list[ProgramSpec]:
    """Return the programs of data-parallel attention, and of the changes from and to attention of the whole group.

    If the engine does not start with data-parallel attention, return [].
    """
    if plan.start_attention == plan.start_tp:
        return []
    found: list[ProgramSpec] = []
    tp, degree, num_layers = plan.start_tp, plan.start_attention, plan.dims.config.num_layers
    for group in [group for group in plan.sub_meshes.groups(tp) if group.start in plan.start_devices]:
        placement = Placement.parallel_attention(group.home, degree, num_layers)
        extents = dict.fromkeys((group.home, *placement.attention[0]), plan.extent_pages(tp))
        found += _instance(plan, executables, placement, extents)
        for rows in plan.buckets(degree).decode_sizes:
            for up in (True, False):
                programs = TransitionPrograms(
                    plan, executables, group, degree, up=up, released=(tp, tp), rows=rows, memory_first=True
                )
                found += [*programs.step_specs(), *programs.prompt_specs(), *programs.exchange_specs()]
    return list({spec.key: spec for spec in found}.values())


class StepKind(NamedTuple):
    """Kind of step that an instance may run.

    Attributes:
        shape: shape of the step.
        logits_of: tokens whose logits the head computes. "last": the last token of each row. "all": all tokens.
        microbatch: index of the only microbatch of the step. None: the step has all microbatches.
    """

    shape: BatchShape
    logits_of: LogitsOf = "last"
    microbatch: int | None = None


def steps_of(plan: EnginePlan, placement: Placement) -> list[StepKind]:
    """Return all kinds of steps that an instance with this placement may run."""
    count = placement.num_microbatches
    buckets = plan.buckets(placement_width(placement) // count)
    prompts = [buckets.step(0, 1, chunk) for chunk in buckets.prompt_logits_chunks]
    if count == 1:
        return [*map(StepKind, buckets.all()), *(StepKind(shape, "all") for shape in prompts)]
    found = [StepKind(BatchShape(((rows * count, 1),), buckets.table_width)) for rows in buckets.decode_sizes]
    for microbatch in range(count):
        found += [StepKind(buckets.step(rows), "last", microbatch) for rows in buckets.decode_sizes]
        found += [StepKind(buckets.step(0, 1, chunk), "last", microbatch) for chunk in buckets.chunk_sizes]
        found += [StepKind(shape, "all", microbatch) for shape in prompts]
    return found


def relocation_specs(
    plan: EnginePlan,
    executables: Executables,
    placement: Placement,
    width: int,
    extents: Mapping[Home, tuple[int, ...]],
    kinds: Collection[SamplerKind],
) -> list[ProgramSpec]:
    """Return the few programs that an instance needs to begin to serve at a new placement.

    The list has the programs and samplers of these steps:

    - with one microbatch: a step that decodes as many sequences as possible, and a step that computes a chunk of a
      prompt and decodes in all other rows.
    - with several microbatches: for each microbatch, a step that only decodes and a step that computes a chunk of a
      prompt. Also a step that decodes for all microbatches.

    Args:
        plan: sizes of the engine.
        executables: registry of programs.
        placement: new placement of the instance.
        width: maximum number of running sequences of the instance, divided by `max_num_seqs`.
        extents: number of pages of each extent of a layer, by home.
        kinds: kinds of samplers that the requests need. Requests of kind "greedy" need only the programs of the head.
    """
    count = placement.num_microbatches
    buckets = plan.buckets(max(1, width // count))
    rows = next(size for size in buckets.decode_sizes if size * count >= plan.buckets(width).max_num_seqs)
    chunk = buckets.chunk_sizes[len(buckets.chunk_sizes) // 2]
    if count == 1:
        steps = [StepKind(buckets.step(rows)), StepKind(buckets.step(buckets.mixed_rows[-1] - 1, 1, chunk))]
    else:
        shapes = buckets.step(rows), buckets.step(0, 1, chunk)
        steps = [StepKind(shape, "last", number) for shape in shapes for number in range(count)]
        steps.append(StepKind(BatchShape(((rows * count, 1),), buckets.table_width)))
    found = list(_steps_at(plan, executables, placement, extents, steps))
    specs, head, slots = executables.specs, _head_group(plan, placement), plan.num_slots
    for num_rows in {step.shape.num_rows for step in steps}:
        if set(kinds) - {"greedy"}:
            found.append(specs.sample(head, num_rows, slots, packed_size(num_rows)))
        if "full" in kinds:
            found.append(specs.sample_full(head, num_rows, slots, packed_size(num_rows, full=True)))
            found.append(specs.set_state(head, slots))
    return found


def _head_group(plan: EnginePlan, placement: Placement) -> SubMesh:
    return plan.sub_meshes.group(placement.head.start, placement.head.degree)


def _steps_at(
    plan: EnginePlan,
    executables: Executables,
    placement: Placement,
    extents: Mapping[Home, tuple[int, ...]],
    steps: Iterable[StepKind],
) -> Iterator[ProgramSpec]:
    """Yield the programs of `steps` at a placement. `extents` has the sizes of a layer's extents, by home."""
    for shape, logits_of, microbatch in steps:
        for work in work_list(placement, microbatch, plan.cutter):
            yield from work_specs(plan, executables.specs, work, shape, placement.num_microbatches, extents)
        yield plan.head_spec(executables.specs, _head_group(plan, placement), shape, logits_of)


def _instance(
    plan: EnginePlan, executables: Executables, placement: Placement, extents: Mapping[Home, tuple[int, ...]]
) -> Iterator[ProgramSpec]:
    steps = steps_of(plan, placement)
    yield from _steps_at(plan, executables, placement, extents, steps)
    yield from _samplers(plan, executables, _head_group(plan, placement), {step.shape.num_rows for step in steps})
    for home in sorted({home for homes in placement.attention for home in homes}):
        yield executables.specs.page_copy(plan.sub_meshes.group(home.start, home.degree), extents[home])


def _instances(plan: EnginePlan, executables: Executables, tp: int, released: int) -> Iterator[ProgramSpec]:
    for group in plan.sub_meshes.groups(tp):
        placement = Placement.uniform(group.home, plan.dims.config.num_layers)
        yield from _instance(plan, executables, placement, {group.home: plan.extent_pages(released)})


def _samplers(
    plan: EnginePlan, executables: Executables, group: SubMesh, row_counts: set[int]
) -> Iterator[ProgramSpec]:
    buckets, specs, slots = plan.buckets(group.tp), executables.specs, plan.num_slots
    for rows in sorted(row_counts | {1}):
        yield specs.sample(group, rows, slots, packed_size(rows))
        yield specs.sample_full(group, rows, slots, packed_size(rows, full=True))
    for chunk in buckets.prompt_logits_chunks:
        tokens = buckets.step(0, 1, chunk).num_tokens
        yield specs.token_logprobs(group, tokens)
        yield specs.take_column(group, tokens)
    yield specs.set_state(group, slots)


def _transition(
    plan: EnginePlan, executables: Executables, group: SubMesh, lower: int, higher_released: int
) -> Iterator[ProgramSpec]:
    for rows in plan.buckets(lower).decode_sizes:
        for up in (True, False):
            released = (lower, higher_released) if up else (higher_released, lower)
            programs = TransitionPrograms(plan, executables, group, lower, up=up, released=released, rows=rows)
            yield from programs.step_specs()
            yield from programs.exchange_specs()
            yield from programs.restore_specs()
            yield from programs.prompt_copies()
