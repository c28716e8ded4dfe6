"""How far a warm-up in the background has come, by the degree that its programs are for."""

import logging
from collections.abc import Hashable, Iterable, Mapping

from amoeba_jax.errors import ProgramsNotReadyError
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.views import DegreePrograms

logger = logging.getLogger(__name__)


class Readiness:
    """Which degrees instances may be given. Without a warm-up in the background: all. Used by the dispatcher thread."""

    def __init__(self) -> None:
        self._all: dict[int, frozenset[Hashable]] = {}
        self._missing: dict[int, set[Hashable]] = {}

    @property
    def busy(self) -> bool:
        """Programs are still to come."""
        return any(self._missing.values())

    @property
    def degrees(self) -> tuple[DegreePrograms, ...]:
        """The degrees of the latest warm-up, in the order in which they become ready."""
        return tuple(
            DegreePrograms(tp, len(keys), len(keys) - len(self._missing[tp])) for tp, keys in self._all.items()
        )

    def begin(self, requests: Mapping[int, Iterable[ProgramSpec]], missing: Iterable[ProgramSpec]) -> None:
        """A warm-up begins, of the programs of each degree, some of which are missing."""
        absent = {request.key for request in missing}
        self._all = {tp: frozenset(request.key for request in mine) for tp, mine in requests.items()}
        self._missing = {tp: set(keys & absent) for tp, keys in self._all.items()}

    def arrived(self, keys: Iterable[Hashable]) -> None:
        """Programs are there."""
        arrived = set(keys)
        for tp, missing in self._missing.items():
            if missing and not missing.difference(arrived):
                logger.info("all %d programs for TP%d are ready", len(self._all[tp]), tp)
            missing -= arrived

    def is_ready(self, tp: int) -> bool:
        """Whether instances can be given a degree without waiting for the compiler."""
        return not self._missing.get(tp)

    def check(self, tp: int) -> None:
        """Raise `ProgramsNotReadyError` for a degree that is not ready."""
        if missing := len(self._missing.get(tp, ())):
            raise ProgramsNotReadyError(
                f"TP{tp} is not ready: {missing} of its {len(self._all[tp])} programs are still being compiled in the "
                "background; try later, or ask to wait for them"
            )
