"""Warm-up: compiles all programs that serving can need, and runs most of them once, because first runs are slow."""

from collections.abc import Callable, Hashable

import jax
import numpy as np

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError
from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.page_copies import copy_page
from amoeba_jax.instances.site import ExchangePart, Site
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import StepBatch
from amoeba_jax.programs.enumeration import (
    enumerate_programs,
    kept_weights,
    parallel_attention_programs,
    placement_programs,
)
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.restore import source_place
from amoeba_jax.programs.step_program import HeadKey, StepKey
from amoeba_jax.sampling.rows import NO_SLOT
from amoeba_jax.transform.options import TransformOptions
from kvcache.migration import PADDING

ON_FIRST = ("sample", "sample_full", "set_state", "token_logprobs", "take_column")
"""Kinds of programs that run only on the first device of an instance."""
COLUMNS = ("take_columns", "put_columns")
"""Kinds of programs that read or write columns of hidden states, on any one device of an instance."""
Specs = dict[Hashable, ProgramSpec]
"""Descriptions of programs, by the keys of the programs."""


def count_programs(engine: Engine, degrees: list[int]) -> int:
    """Return the number of programs in a warm-up of these degrees. Programs that are already compiled count too."""
    return len({key for specs in _wanted(engine, degrees) for key in specs})


def _wanted(engine: Engine, degrees: list[int]) -> tuple[Specs, Specs, Specs]:
    """Return `(usual, pausing, placements)`: the programs that a warm-up of these degrees needs, by key.

    `usual` is for instances whose unneeded weights have become KV cache. `pausing` is for merged instances that keep
    all weights because they pause the requests of other instances. `usual` and `pausing` include the programs that
    merge and split these instances.

    `placements` is for data-parallel attention, and for replicated or migrated layers. A warm-up compiles the programs
    of `placements`, but does not run them.
    """
    plan, executables, in_order = engine.cluster.plan, engine.cluster.executables, tuple(sorted(set(degrees)))
    for tp in degrees:
        engine.cluster.sub_meshes.check_degree(tp)
    usual, pausing = enumerate_programs(plan, executables, in_order), kept_weights(plan, executables, in_order)
    placements = [*parallel_attention_programs(plan, executables), *placement_programs(plan, executables)]
    return _by_key(usual), _by_key(pausing), _by_key(placements)


def _by_key(specs: list[ProgramSpec]) -> Specs:
    return {spec.key: spec for spec in specs}


def warm_up(engine: Engine, degrees: list[int], on_program: Callable[[], None]) -> int:
    """Compile the missing programs of these degrees, and run most programs once. Return how many programs were missing.

    Programs for data-parallel attention, and for replicated or migrated layers, are compiled but not run.

    Afterwards, the prefix caches are empty. The instances may be new, but they have the devices and degrees of the old
    instances. A warm-up of all degrees sets `Executables.complete`. Runs in the dispatcher thread.

    Args:
        engine: engine without requests and without a change in progress.
        degrees: degrees whose programs are compiled. Programs of transformations between these degrees are included.
        on_program: function that is called for each program when the program is compiled, and again when it has run.

    Raises:
        RequestError: the engine has requests, or a change is in progress.
        MemoryBudgetError: the temporary buffers of a program exceed the memory budget.
        EngineClosedError: `close` was called during the warm-up.
    """

    def passed() -> None:
        on_program()
        if engine.closing:
            raise EngineClosedError("the engine is closed: close() was called during a warm-up")

    def run_all(specs: Specs, released: int | None = None) -> None:
        """Run each program in `specs` that a present instance can run, and remove the program from `specs`."""
        _clear_caches(engine)
        for spec in list(specs.values()):
            if _run_here(engine, spec, released):
                del specs[spec.key]
                passed()

    cluster, executables = engine.cluster, engine.cluster.executables
    engine.check_idle("programs cannot be warmed up")
    present = [(i.tp, i.group.device_indices, i.attention_degree) for i in engine.instances]
    before = executables.num_made
    usual, pausing, placements = _wanted(engine, degrees)
    _clear_caches(engine)
    for executable in executables.prepare({**usual, **pausing, **placements}.values()):
        cluster.reserve_temporaries(executable)
        passed()
        # Run programs of the present instances at once, while other programs are compiled.
        if (spec := usual.get(executable.spec.key)) is not None and _run_here(engine, spec):
            del usual[spec.key]
            passed()
    if cluster.plan.placement is None and not cluster.empty_devices:
        try:
            # The present degree comes first, because it needs no transformation.
            for tp in sorted(set(degrees), key=lambda tp: (tp != present[0][0], tp)):
                engine.set_layout(tp)
                run_all(usual)
            for tp in sorted(set(degrees))[1:] if pausing else ():
                engine.set_layout(min(degrees))
                engine.set_layout(tp, release_weights=False)
                run_all(pausing, released=min(degrees))
        finally:
            if not engine.closing:
                engine.set_layout(min(tp for tp, *_ in present))
                for tp, devices, attention in present:
                    engine.transform(TransformOptions(tp, devices, attention_degree=attention))
                engine.end_transformations()
    if cluster.plan.placement is not None or set(degrees) == set(cluster.plan.degrees):
        executables.complete = True
    return executables.num_made - before


def _clear_caches(engine: Engine) -> None:
    """Empty the prefix caches of all instances, because programs that restore weights may overwrite cached pages."""
    for instance in engine.instances:
        for lane in instance.lanes:
            lane.cache.clear()


def _run_here(engine: Engine, spec: ProgramSpec, released: int | None = None) -> bool:
    """Run a program on a present instance that has the program's buffers. Return False if there is no such instance.

    Use only instances that keep exactly the weights of degree `released`. If `released` is None, use only instances
    that keep exactly the weights of their own degree.
    """
    for instance in engine.instances:
        if spec.kind in COLUMNS:
            fits = spec.devices[0] in instance.group.device_indices
        else:
            has_buffers = instance.id == spec.devices[0] and instance.released == (released or instance.tp)
            fits = has_buffers and (spec.kind in ON_FIRST or len(spec.devices) == instance.tp)
            fits &= not instance.has_parallel_attention
        if fits or engine.cluster.plan.placement is not None:
            run_once(engine, instance, spec)
            return True
    return False


def run_once(engine: Engine, instance: Instance, spec: ProgramSpec) -> None:
    """Run a program once without changing data in use, and wait for the results.

    The instance must have the buffers that the program updates, and must have no sequences.
    """
    program, hidden = engine.cluster.executables.get(spec), instance.runner.hidden
    sites = instance.runner.sites.values()
    site = next((site for site in sites if site.group.device_indices == spec.devices), instance.site)
    if isinstance(spec.key, StepKey):
        results = _run_layers(site, hidden, spec, program)
    elif isinstance(spec.key, HeadKey):
        assert spec.plan is not None, "a head is a segment"
        states = hidden.take(instance.group)
        hidden.put(instance.group, states)  # the head only reads the states
        results = program(site.weights(spec.plan), states, _filled(program, 2), instance.runner.last_tokens)
    elif spec.kind in ON_FIRST:
        results = _run_on_first(instance, spec.kind, program)
    elif spec.kind in ("split", "join"):
        results = program(hidden.take(site.group, replicated=False), _filled(program, 1))
        hidden.put(site.group, results, replicated=False)
    elif spec.kind in COLUMNS:
        results = _run_columns(engine, instance, spec, program)
    elif spec.kind == "page_copy":
        for lane in instance.lanes:  # copy page 0 to itself
            copy_page(instance, lane, *np.zeros((2, lane.pages.tp), np.int32))
        results = site.kv
    elif spec.kind == "exchange":
        site.kv[0] = program(site.kv[0], _filled(program, 1, PADDING), _filled(program, 2, PADDING))
        results = site.kv[0]
    else:
        results = _run_restore(engine, instance, spec, program)
    jax.block_until_ready(results)


def _run_layers(site: Site, hidden: HiddenStates, spec: ProgramSpec, program: jax.stages.Compiled):
    """Run a program of layers on a batch of padding. Return arrays that are ready when the program ends."""
    assert isinstance(spec.key, StepKey), "layers have a step key"
    assert spec.plan is not None, "layers are a segment"
    packed = jax.device_put(StepBatch(spec.key.batch, site.group.tp).packed, site.group.sharded)
    tokens = _filled(program, 4) if spec.plan.embeds else None
    exchanges: dict[SegmentPlan, ExchangePart] = {}
    if (exchange := spec.key.exchange) is not None:
        start, stop = spec.plan.layers.start, spec.plan.layers.stop
        first = start - exchange.num_layers if start >= exchange.num_layers else stop
        others = range(first, first + exchange.num_layers)
        exchanges[spec.plan] = ExchangePart(program, others, *(_filled(program, index, PADDING) for index in (-2, -1)))
    states = site.run([spec.plan], [program], hidden.take_states(site.group), packed, tokens, exchanges)
    hidden.put_states(site.group, states)
    return states, [site.kv[layer] for layer in spec.plan.layers]


def _run_columns(engine: Engine, instance: Instance, spec: ProgramSpec, program: jax.stages.Compiled):
    """Run a program that reads or writes columns of hidden states. Return an array that is ready when the program ends.

    A column is the hidden state of one token. A program that writes columns writes zeros.
    """
    hidden, device = instance.runner.hidden, engine.cluster.sub_meshes.group(spec.devices[0], 1)
    states = hidden.take(device)
    if spec.kind == "take_columns":
        results = program(states, np.int32(0))
    else:
        results = states = program(states, np.int32(0), _filled(program, 2))
    hidden.put(device, states)
    return results


def _run_on_first(instance: Instance, kind: str, program: jax.stages.Compiled):
    """Run a program on the first device of an instance. Return arrays that are ready when the program ends.

    `kind` is one of `ON_FIRST`. The arguments are zeros or padding. Data in use does not change.
    """
    state = instance.sampler.state
    if kind == "set_state":
        state.flags, state.bias = program(state.flags, state.bias, *(_filled(program, index) for index in (2, 3, 4)))
        return state.flags
    if kind == "sample_full":
        packed, masks = _filled(program, 4, NO_SLOT), _filled(program, 5)
        _, state.flags, result = program(
            _filled(program, 0), _filled(program, 1), state.flags, state.bias, packed, masks
        )
        return result
    fill = NO_SLOT if kind == "sample" else 0
    count = len(program.args_info[0])
    return program(*(_filled(program, index) for index in range(count - 1)), _filled(program, count - 1, fill))


def _run_restore(engine: Engine, instance: Instance, spec: ProgramSpec, program: jax.stages.Compiled):
    """Run a program that restores weights. Return arrays that are ready when the program ends.

    The program writes weights over pages of the KV cache. No sequence uses these pages.
    """
    weights, group, kv = engine.cluster.weights, instance.group, instance.site.kv[0]
    places = [source_place(one, weights.dims.max_tp, group) for one in spec.restored]
    sources = [weights.assembled(group, one.spec, place) for one, place in zip(spec.restored, places, strict=True)]
    released = weights.released(0, instance.released)
    indices = [1 + released.index(one) for one in spec.restored]  # the first extent never holds weights
    for index, extent in zip(indices, program(sources, [kv[index] for index in indices]), strict=True):
        kv[index] = extent
    return kv


def _filled(program: jax.stages.Compiled, index: int, value: int = 0) -> jax.Array:
    """Return an array for argument `index` of a program. All elements of the array are `value`."""
    info, sharding = program.args_info[0][index], program.input_shardings[0][index]
    return jax.device_put(np.full(info.shape, value, info.dtype), sharding)
