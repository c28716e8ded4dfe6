"""Background warm-up: compilation of programs while requests run."""

import logging
from collections.abc import Hashable

from amoeba_jax.errors import ProgramsNotReadyError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.programs.enumeration import enumerate_by_degree, kept_weights
from amoeba_jax.views import DegreePrograms

logger = logging.getLogger(__name__)


class BackgroundWarmup:
    """Compilation of programs while requests run, and a record of its progress. Used by the dispatcher thread only."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._wanted: dict[int, frozenset[Hashable]] = {}
        self._missing: dict[int, set[Hashable]] = {}

    @property
    def degrees(self) -> tuple[DegreePrograms, ...]:
        """Progress of the latest background warm-up: one entry for each degree, in the order of compilation."""
        return tuple(
            DegreePrograms(tp, len(keys), len(keys) - len(self._missing[tp])) for tp, keys in self._wanted.items()
        )

    def begin(self, degrees: list[int]) -> int:
        """Start to compile all programs of some degrees in the background. Return the number of programs to compile.

        The programs are compiled degree by degree. The degree of the present instances comes first. Programs of
        transformations between these degrees are included. If `degrees` has all degrees of the engine,
        `Executables.complete` becomes True when all programs are compiled.
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
        """Store new results of the compile threads (programs or errors). Return whether there were any new results."""
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
        """Return whether the latest background warm-up has completed the compilation of all programs of degree `tp`.

        The result is also True if the latest warm-up did not include this degree, or if there has been no warm-up.
        """
        return not self._missing.get(tp)

    def check(self, tp: int) -> None:
        """Raise `ProgramsNotReadyError` if the background warm-up is still compiling programs of degree `tp`."""
        if missing := len(self._missing.get(tp, ())):
            raise ProgramsNotReadyError(
                f"TP{tp} is not ready: {missing} of its {len(self._wanted[tp])} programs are still being compiled in "
                "the background. Try later, or wait for the programs"
            )

    def _finish(self) -> None:
        if self._wanted.keys() == set(self._cluster.plan.degrees):
            self._cluster.executables.complete = True
