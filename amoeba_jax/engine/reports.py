"""Pictures of an engine at the moment of asking. Called in the dispatcher thread."""

from amoeba_jax.engine.engine import Engine
from amoeba_jax.views import InstanceView, MemoryEntry, MemoryReport


def instance_views(engine: Engine) -> tuple[InstanceView, ...]:
    """The serving replicas."""
    return tuple(
        InstanceView(
            id=instance.id,
            devices=instance.group.device_indices,
            tensor_parallel_size=instance.tp,
            running=len(instance.running),
            waiting=len(engine.waiting),
            kv_used_pages=instance.pages.num_total_pages - instance.pages.num_free_pages,
            kv_total_pages=instance.pages.num_total_pages,
        )
        for instance in engine.instances
    )


def memory_report(engine: Engine) -> MemoryReport:
    """Who owns which bytes on each device."""
    entries = tuple(
        MemoryEntry(device, layer, owner, size)
        for device, ledger in enumerate(engine.ledgers)
        for (layer, owner), size in ledger.entries.items()
    )
    dims = engine.dims
    unit_bytes = engine.memory_plan.page_bytes // dims.max_tp * dims.config.num_layers
    used = tuple((a.total_units - a.free_units) * unit_bytes for a in engine.allocators)
    padding = {kind: padding.ratio for kind, padding in engine.weights.padding().items()}
    padding["kv cache"] = dims.heads.kv_padding
    ledger = engine.ledgers[0]
    return MemoryReport(ledger.budget_bytes, entries, used, sum(ledger.reserved.values()), padding)
