"""Background warm-up: compile programs while requests run."""

import logging
from collections.abc import Hashable

from amoeba_jax.errors import ProgramsNotReadyError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.programs.enumeration import enumerate_by_degree, kept_weights
from amoeba_jax.views import DegreePrograms

logger = logging.getLogger(__name__)


class BackgroundWarmup:
    """Latest background warm-up, and its progress for each degree. Used by the dispatcher thread only."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._wanted: dict[int, frozenset[Hashable]] = {}
        self._missing: dict[int, set[Hashable]] = {}

    @property
    def degrees(self) -> tuple[DegreePrograms, ...]:
        """Progress of the latest warm-up for each degree, in the order of compilation."""
        return tuple(
            DegreePrograms(tp, len(keys), len(keys) - len(self._missing[tp])) for tp, keys in self._wanted.items()
        )

    def begin(self, degrees: list[int]) -> int:
        """Compile all programs of the degrees, and of transformations between them, while requests run.

        Programs of the present degree are compiled first. After a warm-up of all degrees, the registry of programs is
        marked as `complete`. Return the number of missing programs.
        """
        cluster, executables = self._cluster, self._cluster.executables
        for tp in degrees:
            cluster.sub_meshes.check_degree(tp)
        present = cluster.instances[0].tp
        order = tuple(sorted(set(degrees), key=lambda tp: (tp != present, tp)))
        by_degree = enumerate_by_degree(cluster.plan, executables, order)
        for spec in kept_weights(cluster.plan, executables, tuple(sorted(set(degrees)))):
            by_degree[len(spec.devices)].append(spec)
        missing = executables.compile_later(spec for specs in by_degree.values() for spec in specs)
        absent = {spec.key for spec in missing}
        self._wanted = {tp: frozenset(spec.key for spec in specs) for tp, specs in by_degree.items()}
        self._missing = {tp: set(keys & absent) for tp, keys in self._wanted.items()}
        if not missing:
            self._finish()
        return len(missing)

    def take_arrived(self) -> bool:
        """Store programs that were compiled in the background. Return whether there were any."""
        arrived = set(self._cluster.executables.take_arrived(self._cluster.reserve_temporaries))
        if not arrived:
            return False
        was_busy = any(self._missing.values())
        for tp, missing in self._missing.items():
            if missing and missing <= arrived:
                logger.info("all %d programs for TP%d are ready", len(self._wanted[tp]), tp)
            missing -= arrived
        if was_busy and not any(self._missing.values()):
            self._finish()
        return True

    def is_ready(self, tp: int) -> bool:
        """Return whether all programs of degree `tp` are compiled.

        True if there was no background warm-up of this degree.
        """
        return not self._missing.get(tp)

    def check(self, tp: int) -> None:
        """Raise `ProgramsNotReadyError` if degree `tp` is not ready."""
        if missing := len(self._missing.get(tp, ())):
            raise ProgramsNotReadyError(
                f"TP{tp} is not ready: {missing} of its {len(self._wanted[tp])} programs are still being compiled in "
                "the background. Try later, or wait for the programs"
            )

    def _finish(self) -> None:
        if self._wanted.keys() == set(self._cluster.plan.degrees):
            self._cluster.executables.complete = True
