"""Programs that are compiled while requests run."""

from amoeba_jax.engine.readiness import Readiness
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.programs.enumeration import enumerate_by_degree, kept_weights


class BackgroundWarmup:
    """Used by the dispatcher thread only.

    Attributes:
        readiness: the degrees whose programs are there.
    """

    def __init__(self, cluster: Cluster):
        self._cluster, self.readiness = cluster, Readiness()

    def begin(self, degrees: list[int]) -> int:
        """Have all programs of some degrees, and of transformations between them, compiled while requests run, those of
        the present degree first. Return how many are missing.

        Where these are all degrees, the registry is `complete` once the last has come.
        """
        cluster, executables = self._cluster, self._cluster.executables
        for tp in degrees:
            cluster.sub_meshes.check_degree(tp)
        present = cluster.instances[0].tp
        order = tuple(sorted(set(degrees), key=lambda tp: (tp != present, tp)))
        by_degree = enumerate_by_degree(cluster.plan, executables, order)
        if cluster.config.prepare_pausing:
            for spec in kept_weights(cluster.plan, executables, tuple(sorted(set(degrees)))):
                by_degree[len(spec.devices)].append(spec)
        missing = executables.compile_later(spec for mine in by_degree.values() for spec in mine)
        self.readiness.begin(by_degree, missing)
        if not missing and self._is_complete:
            executables.set_complete()
        return len(missing)

    def take_arrived(self) -> bool:
        """Take in programs that were compiled meanwhile. Return whether there were any."""
        executables, warming = self._cluster.executables, self.readiness.busy
        arrived = executables.take_arrived(self._cluster.reserve_temporaries)
        if arrived:
            self.readiness.arrived(arrived)
            if warming and not self.readiness.busy and self._is_complete:
                executables.set_complete()
        return bool(arrived)

    @property
    def _is_complete(self) -> bool:
        """Whether the latest warm-up is one of all degrees."""
        return {it.degree for it in self.readiness.degrees} == set(self._cluster.sub_meshes.degrees())
