"""Memory for what a change of layout takes besides what there is."""

from collections.abc import Iterable

from amoeba_jax.instances.cluster import Cluster


def reserve_staging(cluster: Cluster, devices: Iterable[int], num_bytes: int) -> None:
    """Set aside what a transition takes, or, with none under way, what the memory plan has for it.

    Raises `MemoryBudgetError`.
    """
    for device in devices:
        cluster.ledgers[device].reserve("staging", max(num_bytes, cluster.memory_plan.staging_bytes))
