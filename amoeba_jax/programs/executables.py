"""The registry of compiled programs."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

import jax

from amoeba_jax.cpu_cache import ProgramStore
from amoeba_jax.errors import NotCompiledError
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.background import Arrival, BackgroundCompiler
from amoeba_jax.programs.compiling import Executable, compile_family, compile_programs
from amoeba_jax.programs.program_specs import ProgramSpec, ProgramSpecs

logger = logging.getLogger(__name__)

# A program that failed, and that others stand in for, is compiled again after this time, that many times at most: it
# may have been memory that was short for a while.
_RETRY_S = 600.0
_MAX_RETRIES = 3


class Executables:
    """Holds one program for each key, compiled on first use or ahead of time by `prepare`. Used by one thread.

    Segments of equal shape share a program, whatever layers they are.

    Attributes:
        specs: makes the specs that this takes.
        strict: what was never there when it is `complete` is refused, and not compiled. What was dropped for others
            (see `ProgramStore`) is loaded again.
        num_late: programs that were compiled, or loaded, since it was `complete`.
        num_awaited: programs that were compiled, or loaded, when they were needed, and not ahead of time.
        background: compiles what `request` and `compile_later` are asked for.

    Args:
        beside: whether `request` has programs compiled in the background, or leaves them to `get`.
        jobs: programs to compile at once in the background.
    """

    def __init__(self, dims: ModelDims, *, strict: bool = False, beside: bool = False, jobs: int = 1):
        self.specs = ProgramSpecs(dims)
        self.strict, self._beside = strict, beside
        self.num_late = self.num_awaited = 0
        self._complete = False
        self._known: set[Hashable] = set()
        self._store: ProgramStore[Executable] = ProgramStore()
        self._failed: dict[Hashable, Exception] = {}
        self._num_retries: Counter[Hashable] = Counter()
        self._retry_at = math.inf  # by `time.monotonic()`
        self._prepared: list[Hashable] = []  # keys that `take_arrived` has not returned yet
        self._num_failures = 0  # that came, that were raised, and that were forgotten
        self.background: BackgroundCompiler[ProgramSpec, Executable] = BackgroundCompiler(compile_family, jobs)

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, spec: ProgramSpec) -> bool:
        return spec.key in self._store

    @property
    def num_made(self) -> int:
        """Programs that were compiled, or loaded from the compile cache, so far."""
        return self._store.num_added

    @property
    def complete(self) -> bool:
        """Everything that the engine should need is there: what is compiled from now on holds requests up."""
        return self._complete

    def set_complete(self) -> None:
        """See `complete`."""
        self._complete = True

    def get(self, spec: ProgramSpec) -> jax.stages.Compiled:
        """The program, compiled if it is not there.

        Raises `NotCompiledError` instead where this is `strict` and `complete`.
        """
        return self.executable(spec).compiled

    def executable(self, spec: ProgramSpec) -> Executable:
        """`get` with what is known of it."""
        return self._store.get(spec.key, lambda: self._make(spec))

    # In the background

    @property
    def version(self) -> int:
        """Changes whenever `available` may answer otherwise."""
        return self._store.num_added + self._num_failures

    def available(self, specs: Iterable[ProgramSpec]) -> bool:
        """Whether `get` gives all of these, or refuses them, and compiles none that could be compiled beside."""
        return not self._beside or not self._absent(specs)

    @property
    def has_failures(self) -> bool:
        """Whether there is any program that `has_failed`."""
        return bool(self._failed)

    def has_failed(self, specs: Iterable[ProgramSpec]) -> bool:
        """Whether one of these could not be compiled in the background, or used: `get` would raise why."""
        return any(spec.key in self._failed for spec in specs)

    def request(self, specs: Iterable[ProgramSpec]) -> bool:
        """`available`; what is not is compiled in the background, before what `compile_later` was given."""
        if not self._beside or not (absent := self._absent(specs)):
            return True
        for spec in self.background.want(self._with_originals(absent)):
            self._count_awaited(spec)
        return False

    def compile_later(self, specs: Iterable[ProgramSpec]) -> list[ProgramSpec]:
        """Have what is not there compiled in the background, in this order. Return what is not there."""
        absent = self._absent(specs)
        self.background.want(self._with_originals(absent), urgent=False)
        return absent

    def take_arrived(self, check: Callable[[Executable], None]) -> list[Hashable]:
        """Take in what was compiled in the background, and return its keys. `get` raises, once, what compiling a
        program has raised, or what `check` raises for it; after a while it is no longer known, so that the program is
        compiled again."""
        if time.monotonic() >= self._retry_at:
            self._forget_failures()
        taken = self._take_in(self.background.take(), check)
        keys, self._prepared = self._prepared + [spec.key for spec in taken], []
        return keys

    def _take_in(
        self, arrived: list[Arrival[ProgramSpec, Executable]], check: Callable[[Executable], None] = lambda _: None
    ) -> list[ProgramSpec]:
        """Keep programs, or why there are none. Return all specs."""
        for spec, executable, error in arrived:
            try:
                if executable is None:
                    raise error or AssertionError("it has one or the other")
                check(executable)
            except Exception as failure:
                logger.error("program %s cannot be used: %s", spec, failure)
                self._failed[spec.key] = failure
                self._num_failures += 1
                self._retry_at = min(self._retry_at, time.monotonic() + _RETRY_S)
            else:
                self._known.add(spec.key)
                self._store.add(spec.key, executable)
        return [arrival.spec for arrival in arrived]

    def _forget_failures(self) -> None:
        """Let programs that have failed be compiled again, beside the steps of others, where that is allowed."""
        self._retry_at = math.inf
        if not self._beside or (self.strict and self._complete):
            return
        for key in [key for key in self._failed if self._num_retries[key] < _MAX_RETRIES]:
            self._num_retries[key] += 1
            del self._failed[key]
            self._num_failures += 1

    def _absent(self, specs: Iterable[ProgramSpec]) -> list[ProgramSpec]:
        refuse = self.strict and self._complete
        return [
            spec
            for key, spec in {spec.key: spec for spec in specs}.items()
            if key not in self._store and key not in self._failed and not (refuse and key not in self._known)
        ]

    def check(self, specs: Iterable[ProgramSpec]) -> None:
        """Raise `NotCompiledError` for the first program, if any, that `get` would refuse."""
        if self.strict and self._complete:
            for spec in specs:
                if spec.key not in self._known:
                    raise _not_compiled(spec)

    def _make(self, spec: ProgramSpec) -> Executable:
        self._raise_failure(spec)
        if self._complete and self.strict and spec.key not in self._known:
            raise _not_compiled(spec)
        self._count_awaited(spec)
        found = None
        # In a thread of its own: this one's stack may be too small.
        for executable in compile_programs(self._with_originals([spec]), jobs=1):
            self._known.add(executable.spec.key)
            if executable.spec.key == spec.key:
                found = executable
            else:
                self._store.add(executable.spec.key, executable)
        assert found is not None, "it is one of them"
        return found

    def _with_originals(self, specs: Iterable[ProgramSpec]) -> list[ProgramSpec]:
        """Requests, and those for the first group of devices that are missing: what is compiled for it serves all, and
        the compile cache has each program once."""
        found: dict[Hashable, ProgramSpec] = {}
        for spec in specs:
            original = spec.original
            if original is not None and original.key not in self._store:
                found.setdefault(original.key, original)
            found.setdefault(spec.key, spec)
        return list(found.values())

    def _raise_failure(self, spec: ProgramSpec) -> None:
        """Raise, once, why a program could not be compiled in the background."""
        if (failure := self._failed.pop(spec.key, None)) is not None:
            self._num_failures += 1
            raise failure

    def _count_awaited(self, spec: ProgramSpec) -> None:
        self.num_awaited += 1
        if not self._complete:
            return
        self.num_late += 1
        dropped = spec.key in self._known
        why = "it was dropped for others" if dropped else "it was not before the engine was ready"
        logger.warning("program %s is compiled, or loaded, while requests wait: %s", spec, why)

    def prepare(self, specs: Iterable[ProgramSpec]) -> Iterator[Executable]:
        """Have what is missing compiled in the background, wait for it, and yield each program, those that were there
        first.

        Raises what compiling one raises, and `NotCompiledError` as `get` does.
        """
        missing = []
        for key, spec in {spec.key: spec for spec in specs}.items():
            if (executable := self._store.find(key)) is not None:
                yield executable
            else:
                missing.append(spec)
        for spec in missing:
            self._raise_failure(spec)
        if self._complete:
            yield from map(self.executable, missing)
            return
        wanted = self._with_originals(missing)
        left = {spec.key for spec in wanted}
        self.background.want(wanted)
        try:
            while left:
                self.background.wait(left)
                taken = self._take_in(self.background.take(left))
                self._prepared += [spec.key for spec in taken]
                left.difference_update(self._prepared)
                for spec in taken:
                    self._raise_failure(spec)
                    yield self._store.get(spec.key, lambda spec=spec: self._make(spec))
        finally:
            self.background.forget(left)


def _not_compiled(spec: ProgramSpec) -> NotCompiledError:
    return NotCompiledError(
        f"program {spec} was not compiled before the engine was ready, and with strict_compile none is compiled "
        "after that"
    )
