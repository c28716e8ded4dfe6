"""Warm-up: compile every program that serving can need and run it once, because the first call is slower."""

from collections.abc import Callable, Hashable

import jax
import numpy as np

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.site import ExchangePart
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.enumeration import enumerate_programs, kept_weights, steps_of
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.restore import source_place
from amoeba_jax.programs.step_program import HeadKey, StepKey
from amoeba_jax.programs.work import Blocks
from amoeba_jax.sampling.rows import NO_SLOT
from amoeba_jax.transform.options import TransformOptions
from kvcache.migration import PADDING
from sharding.placement import Home, Homes

ON_FIRST = ("sample", "sample_full", "set_state", "token_logprobs", "take_column")
"""Kinds of programs that run only on the first device of an instance."""


def count_programs(engine: Engine, degrees: list[int]) -> int:
    """Return the number of programs in a warm-up of these degrees."""
    return len(_wanted(engine, degrees))


def _wanted(engine: Engine, degrees: list[int]) -> list[ProgramSpec]:
    cluster = engine.cluster
    for tp in degrees:
        cluster.sub_meshes.check_degree(tp)
    return enumerate_programs(cluster.plan, cluster.executables, tuple(sorted(set(degrees)))) + _kept(engine, degrees)


def _kept(engine: Engine, degrees: list[int]) -> list[ProgramSpec]:
    """Return the programs of instances that keep all weights, if pausing is prepared."""
    if not engine.config.prepare_pausing or engine.cluster.plan.placement is not None:
        return []
    return kept_weights(engine.cluster.plan, engine.cluster.executables, tuple(sorted(set(degrees))))


def warm_up(engine: Engine, degrees: list[int], on_program: Callable[[], None]) -> int:
    """Compile missing programs and run each once. Return the number of programs that were missing.

    The instances are the same afterwards. A warm-up of all degrees makes the registry `complete`. Raises `RequestError`
    if requests are waiting or running, `MemoryBudgetError` if the temporaries of the programs exceed the budget, and
    `EngineClosedError` if the engine is closed during the warm-up. Runs in the dispatcher thread.

    Args:
        engine: engine without requests.
        degrees: degrees of the instances.
        on_program: function called when a program is compiled, and again when it has run.
    """

    def passed() -> None:
        on_program()
        if engine.closing:
            raise EngineClosedError("the engine is closed: close() was called during a warm-up")

    executables = engine.cluster.executables
    engine.check_idle("programs cannot be warmed up")
    present = [(instance.tp, instance.group.device_indices) for instance in engine.instances]
    before = executables.num_made
    specs = _wanted(engine, degrees)
    waiting: dict[Hashable, ProgramSpec] = {spec.key: spec for spec in specs}
    kept: dict[Hashable, ProgramSpec] = {spec.key: waiting.pop(spec.key) for spec in _kept(engine, degrees)}
    _clear_caches(engine)
    placement = engine.cluster.plan.placement
    for executable in executables.prepare(specs):
        engine.cluster.reserve_temporaries(executable)
        passed()
        # Programs of the present instances run at once, while others are compiled.
        if placement is None and executable.spec.key not in kept and _run_here(engine, executable.spec):
            waiting.pop(executable.spec.key, None)
            passed()
    if placement is not None:
        _run_placed(engine, engine.instances[0], list(waiting.values()), passed)
        executables.set_complete()
        return executables.num_made - before
    try:
        # The present layout comes first, because it needs no transformation.
        for tp in sorted(set(degrees), key=lambda tp: (tp != present[0][0], tp)):
            engine.set_layout(tp)
            _run_all(engine, waiting, passed)
        for tp in sorted(set(degrees))[1:] if kept else ():
            engine.set_layout(min(degrees))
            engine.set_layout(tp, release_weights=False)
            _run_all(engine, kept, passed, released=min(degrees))
    finally:
        if not engine.closing:
            engine.set_layout(min(tp for tp, _ in present))
            for tp, devices in present:
                engine.transform(TransformOptions(tp, devices))
            engine.end_transformations()
    if set(degrees) == set(engine.cluster.sub_meshes.degrees()):
        executables.set_complete()
    return executables.num_made - before


def _run_placed(engine: Engine, instance: Instance, specs: list[ProgramSpec], on_program: Callable[[], None]) -> None:
    """Run every program of an instance with a start placement: all steps, of padding alone, and all other programs."""
    placement = instance.runner.placement

    def padding(home: Home, group: Homes | None, blocks: Blocks | None, shape: BatchShape) -> StepBatch:
        return StepBatch(shape, home.degree)

    for shape, logits_of, microbatch in steps_of(engine.cluster.plan, placement):
        jax.block_until_ready(instance.launcher.launch_batch(shape, microbatch, padding, logits_of))
    for lane in instance.lanes:
        rows = np.zeros((2, lane.pages.tp), np.int32)
        instance.launcher.copy_page(instance.lanes, lane, *rows)
    for spec in specs:
        if spec.kind in ON_FIRST:
            program = engine.cluster.executables.get(spec)
            jax.block_until_ready(_run_on_first(instance, spec.kind, program))
        on_program()


def _clear_caches(engine: Engine) -> None:
    """Drop cached pages, because restored weights may overwrite them."""
    for instance in engine.instances:
        for lane in instance.lanes:
            lane.cache.clear()


def _run_all(
    engine: Engine,
    waiting: dict[Hashable, ProgramSpec],
    on_program: Callable[[], None],
    released: int | None = None,
) -> None:
    """Run the programs that the present instances can run, and remove them from `waiting`."""
    _clear_caches(engine)
    for spec in list(waiting.values()):
        if _run_here(engine, spec, released):
            del waiting[spec.key]
            on_program()


def _run_here(engine: Engine, spec: ProgramSpec, released: int | None = None) -> bool:
    """Run a program if a present instance has the buffers for it. Return whether it ran.

    The instance must have its weights released for degree `released`, by default its own degree.
    """
    for instance in engine.instances:
        if spec.kind in ("take_columns", "put_columns") and spec.devices[0] in instance.group.device_indices:
            run_once(engine, instance, spec)
            return True
        if instance.id == spec.devices[0] and instance.released == (released or instance.tp):
            if spec.kind not in ON_FIRST and len(spec.devices) != instance.tp:
                return False
            run_once(engine, instance, spec)
            return True
    return False


def run_once(engine: Engine, instance: Instance, spec: ProgramSpec) -> None:
    """Run a program with arguments that change no data in use, and wait for the results.

    The instance must have no sequences. It must have the degree of the program, except for kinds in `ON_FIRST`.
    """
    program = engine.cluster.executables.get(spec)
    site = instance.site
    if isinstance(spec.key, StepKey):
        results = _run_layers(instance, spec, program)
    elif isinstance(spec.key, HeadKey):
        assert spec.plan is not None, "a head is a segment"
        states = instance.runner.hidden.take(instance.group)
        instance.runner.hidden.put(instance.group, states)
        results = program(site.weights(spec.plan), states, _filled(program, 2), instance.runner.last_tokens)
    elif spec.kind in ON_FIRST:
        results = _run_on_first(instance, spec.kind, program)
    elif spec.kind in ("split", "join"):
        hidden = instance.runner.hidden
        results = program(hidden.take(instance.group, replicated=False), _filled(program, 1))
        hidden.put(instance.group, results, replicated=False)
    elif spec.kind in ("take_columns", "put_columns"):
        results = _run_columns(engine, instance, spec, program)
    elif spec.kind == "page_copy":
        instance.launcher.copy_page(instance.lanes, instance.lane, *np.zeros((2, instance.tp), np.int32))
        results = site.kv
    elif spec.kind == "exchange":
        site.kv[0] = program(site.kv[0], _filled(program, 1, PADDING), _filled(program, 2, PADDING))
        results = site.kv[0]
    else:
        results = _run_restore(engine, instance, spec, program)
    jax.block_until_ready(results)


def _run_layers(instance: Instance, spec: ProgramSpec, program: jax.stages.Compiled):
    """Run a step that consists of padding."""
    assert isinstance(spec.key, StepKey), "layers have a step key"
    assert spec.plan is not None, "layers are a segment"
    site, hidden, tokens = instance.site, instance.runner.hidden, instance.runner.last_tokens
    packed = jax.device_put(StepBatch(spec.key.batch, instance.tp).packed, instance.group.sharded)
    exchanges: dict[SegmentPlan, ExchangePart] = {}
    if (exchange := spec.key.exchange) is not None:
        start, stop = spec.plan.layers.start, spec.plan.layers.stop
        first = start - exchange.num_layers if start >= exchange.num_layers else stop
        others = range(first, first + exchange.num_layers)
        exchanges[spec.plan] = ExchangePart(program, others, *(_filled(program, index, PADDING) for index in (7, 8)))
    states = site.run([spec.plan], [program], hidden.take(instance.group), packed, tokens, exchanges)
    hidden.put(instance.group, states)
    return [site.kv[layer] for layer in spec.plan.layers]


def _run_columns(engine: Engine, instance: Instance, spec: ProgramSpec, program: jax.stages.Compiled):
    """Copy columns from a buffer of hidden states, or zeros into it."""
    hidden, device = instance.runner.hidden, engine.cluster.sub_meshes.group(spec.devices[0], 1)
    states = hidden.take(device)
    if spec.kind == "take_columns":
        results = program(states, np.int32(0))
    else:
        results = states = program(states, np.int32(0), _filled(program, 2))
    hidden.put(device, states)
    return results


def _run_on_first(instance: Instance, kind: str, program: jax.stages.Compiled):
    """Run a program of the sampler with rows that store nothing, or with an unused slot."""
    state = instance.sampler.state
    if kind == "set_state":
        state.flags, state.bias = program(state.flags, state.bias, *(_filled(program, index) for index in (2, 3, 4)))
        return state.flags
    if kind == "sample_full":
        arguments = _filled(program, 0), _filled(program, 1), state.flags, state.bias, _filled(program, 4, NO_SLOT)
        _, state.flags, result = program(*arguments)
        return result
    fill = NO_SLOT if kind == "sample" else 0
    count = len(program.args_info[0])
    return program(*(_filled(program, index) for index in range(count - 1)), _filled(program, count - 1, fill))


def _run_restore(engine: Engine, instance: Instance, spec: ProgramSpec, program: jax.stages.Compiled):
    """Write weights over unused pages."""
    weights, group, kv = engine.cluster.weights, instance.group, instance.site.kv[0]
    places = [source_place(one, weights.dims.max_tp, group) for one in spec.restored]
    sources = [weights.assembled(group, one.spec, place) for one, place in zip(spec.restored, places, strict=True)]
    released = weights.released(0, instance.released)
    indices = [1 + released.index(one) for one in spec.restored]  # the first extent never holds weights
    for index, extent in zip(indices, program(sources, [kv[index] for index in indices]), strict=True):
        kv[index] = extent
    return kv


def _filled(program: jax.stages.Compiled, index: int, value: int = 0) -> jax.Array:
    """Return an argument of a program, filled with one value."""
    info, sharding = program.args_info[0][index], program.input_shardings[0][index]
    return jax.device_put(np.full(info.shape, value, info.dtype), sharding)
