"""Reports about the state of an engine, for `LLM`. All functions run in the dispatcher thread."""

from dataclasses import replace

import numpy as np

from amoeba_jax.engine.engine import Engine
from amoeba_jax.expert_loads import ExpertLoadReport, load_imbalance, model_order
from amoeba_jax.stats import EngineStats
from amoeba_jax.views import ExecutableInfo, InstanceStatus, MemoryEntry, MemoryReport, PlacementStatus, TransformStatus
from kvcache.allocator import BuddyAllocator
from sharding.owners import Owner


def instance_views(engine: Engine) -> tuple[InstanceStatus, ...]:
    """Return the present status of each instance, except paused instances."""
    counts = {instance: instance.page_counts() for instance in engine.instances}
    if (loads := engine.cluster.factory.hidden.loads) is not None:
        loads.collect()
    return tuple(
        InstanceStatus(
            id=instance.id,
            devices=instance.group.device_indices,
            tensor_parallel_size=instance.tp,
            running=len(instance.running),
            waiting=len(engine.waiting) + len(engine.sequences.siblings.held),
            kv_used_pages=counts[instance].total - counts[instance].available,
            kv_total_pages=counts[instance].total,
            num_cached_pages=counts[instance].cached,
            paused=(paused := len(instance.paused_sequences)),
            paused_degree=instance.paused[0].tp if paused else 0,
            placement=instance.runner.placement,
            phase=instance.phase,
            expert_load_imbalance=(
                None if loads is None else load_imbalance(engine.dims, instance.runner.placement, loads.totals)
            ),
        )
        for instance in engine.instances
    )


def expert_load_report(engine: Engine) -> ExpertLoadReport:
    """Return how many tokens each expert has computed, and the load imbalance between the ranks of each instance.

    Steps that `ExpertLoads.collect` has not counted yet are left out. The model must have experts.
    """
    loads, dims = engine.cluster.factory.hidden.loads, engine.dims
    assert loads is not None, "the model has experts"
    tokens = sum(loads.totals.values(), start=np.zeros(dims.load_shape, np.int64))
    placements = {instance.id: instance.runner.placement for instance in engine.instances}
    imbalance = {id: load_imbalance(dims, placement, loads.totals) for id, placement in placements.items()}
    return ExpertLoadReport(model_order(dims, tokens), imbalance)


def memory_report(engine: Engine) -> MemoryReport:
    """Return the numbers of bytes that weights, KV cache and other buffers take on each device."""
    dims = engine.dims
    cluster = engine.cluster
    padding_bytes = [cluster.weights.padding_bytes(device) for device in range(len(cluster.ledgers))]
    copied_heads = 1 - 1 / dims.heads.kv_padding
    entries = tuple(
        MemoryEntry(
            device,
            layer,
            owner,
            size,
            padding_bytes=(
                round(size * copied_heads) if owner == Owner.KV_CACHE else padding_bytes[device].get((layer, owner), 0)
            ),
        )
        for device, ledger in enumerate(cluster.ledgers)
        for (layer, owner), size in ledger.entries.items()
    )
    used, kept = page_bytes(engine)
    padding = {kind: padding.ratio for kind, padding in cluster.weights.padding().items()}
    padding[Owner.KV_CACHE] = dims.heads.kv_padding
    reserved = tuple(sum(ledger.reserved.values()) for ledger in cluster.ledgers)
    return MemoryReport(cluster.memory_plan.budget_bytes, entries, used, reserved, padding, kv_kept_bytes=kept)


def page_bytes(engine: Engine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `(used, kept)`. Both are tuples with a number of bytes for each device.

    `used` is the size of the KV pages that sequences use. `kept` is the size of the KV pages that only the prefix cache
    holds.
    """
    cluster, dims = engine.cluster, engine.dims
    unit_bytes = cluster.memory_plan.page_bytes // dims.max_tp
    live, kept = [0] * len(cluster.ledgers), [0] * len(cluster.ledgers)
    counted: set[BuddyAllocator] = set()
    for instance in engine.instances:
        sites = instance.runner.sites
        num_layers = {home: sum(map(bool, site.kv)) for home, site in sites.items()}
        if instance.transition is not None and instance.transition.changes_degree:
            num_layers = dict.fromkeys(num_layers, dims.config.num_layers)
        for home, allocators in instance.allocators.items():
            for device, allocator in zip(home.devices, allocators, strict=True):
                if allocator not in counted:
                    counted.add(allocator)
                    used = allocator.total_units - allocator.free_units
                    live[device] += used * unit_bytes * num_layers[home]
        for each in (instance, *instance.paused):
            for lane in each.lanes:
                for home in each.allocators.keys() & lane.ranks.keys():
                    units = lane.cache.num_evictable_pages * dims.pages.units_per_page(home.degree)
                    for device in home.devices:
                        kept[device] += units * unit_bytes * num_layers.get(home, dims.config.num_layers)
    return tuple(total - cached for total, cached in zip(live, kept, strict=True)), tuple(kept)


def engine_stats(engine: Engine) -> EngineStats:
    """Return a copy of the statistics that the engine has collected since its start."""
    stats, statuses = engine.stats, engine.changes.statuses
    return replace(
        stats,
        steps_by_tokens=list(stats.steps_by_tokens),
        compiled_programs=engine.cluster.executables.num_made,
        late_programs=engine.cluster.executables.num_late,
        awaited_programs=engine.cluster.executables.num_awaited,
        degrees=engine.background_warmup.degrees,
        transformations=tuple(status for status in statuses if isinstance(status, TransformStatus)),
        placements=tuple(status for status in statuses if isinstance(status, PlacementStatus)),
    )


def executable_infos(engine: Engine) -> tuple[ExecutableInfo, ...]:
    """Return a description of each compiled program."""
    return tuple(executable.info for executable in engine.cluster.executables)
