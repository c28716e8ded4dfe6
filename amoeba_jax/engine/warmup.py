"""Compiling ahead of time what serving at given degrees can need."""

from collections.abc import Callable

from amoeba_jax.engine.buckets import Buckets
from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.instance import Instance
from amoeba_jax.engine.sampling import pack
from amoeba_jax.engine.transformation import TransformOptions


def count_programs(engine: Engine, degrees: list[int]) -> int:
    """Programs that `warm_up` of these degrees goes through."""
    cluster = engine.cluster
    segments = len({plan.shape for plan in cluster.plans})
    return sum(
        len(cluster.sub_meshes.groups(tp))
        * (len(cluster.buckets(tp).all()) * segments + len(_sampler_rows(cluster.buckets(tp))))
        for tp in degrees
    )


def warm_up(engine: Engine, degrees: list[int], on_program: Callable[[], None]) -> int:
    """Compile what is missing, in the dispatcher thread; returns how many programs were. Instances stay as they are.

    Raises `RequestError` while requests are waiting or running, `MemoryBudgetError` if the programs' temporaries
    do not fit the device's budget.
    """
    executables = engine.cluster.executables
    present = [(instance.tp, instance.group.device_indices) for instance in engine.instances]
    before = executables.num_made
    try:
        for tp in degrees:
            engine.set_layout(tp)
            _compile_layout(engine, on_program)
    finally:
        engine.set_layout(min(tp for tp, _ in present))
        for tp, devices in present:
            engine.transform(TransformOptions(tp, devices))
        engine.end_transformations()
    return executables.num_made - before


def _compile_layout(engine: Engine, on_program: Callable[[], None]) -> None:
    cluster = engine.cluster
    requests = [
        (key, plan, instance.group)
        for instance in engine.instances
        for shape in instance.buckets.all()
        for key, plan in zip(instance.step_keys(shape), cluster.plans, strict=True)
    ]
    cluster.executables.prepare(requests, on_program)
    for instance in engine.instances:
        for rows in _sampler_rows(instance.buckets):
            _prepare_draw(engine, instance, rows)
            on_program()
    measured = max((program.temp_bytes for program in cluster.executables.programs), default=0)
    for ledger in cluster.ledgers:
        ledger.reserve("activations", max(measured, cluster.memory_plan.activation_bytes))


def _prepare_draw(engine: Engine, instance: Instance, rows: int) -> None:
    """The sampler of plain requests; the one for penalties, masks and log-probabilities comes with the first."""
    logits = (engine.dims.config.vocab_size, rows)
    engine.cluster.executables.draw(instance.group.devices[0], logits, instance.num_slots, pack([], rows).size)


def _sampler_rows(buckets: Buckets) -> list[int]:
    return sorted({shape.num_rows for shape in buckets.all()})
