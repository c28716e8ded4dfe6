"""Registry of compiled programs."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from statistics import fmean

import jax

from amoeba_jax.cpu_cache import ProgramStore
from amoeba_jax.errors import NotCompiledError
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.background import Arrival, BackgroundCompiler, compile_programs
from amoeba_jax.programs.compiling import Executable
from amoeba_jax.programs.program_specs import ProgramSpec, ProgramSpecs

logger = logging.getLogger(__name__)

# A failed program is compiled again after this time, because memory may have been short only for a while.
_RETRY_S = 600.0
_MAX_RETRIES = 3


class Executables:
    """Compiled programs by key (`ProgramSpec.key`). A program is compiled on first use or ahead of time.

    Segments (runs of consecutive layers) of equal shape share a program, because the weights are inputs of the program.
    Not thread-safe.

    Args:
        dims: sizes of the model.
        strict: see the attribute `strict`.
        beside: whether missing programs of steps are compiled in the background while other steps run. If False,
            `request` starts nothing and returns True, and `get` compiles a missing program when a step needs it.
        jobs: number of background threads.

    Attributes:
        specs: factory of program descriptions (`ProgramSpec`), which the methods take.
        strict: whether the registry refuses new programs once it is `complete`. Evicted programs (`ProgramStore`) are
            not new: they are loaded again.
        complete: whether a warm-up has compiled all programs that serving can need. After that, any further compilation
            delays requests.
        num_late: number of programs that `get` or `request` found missing after the registry became `complete`.
        num_awaited: number of programs that `get` or `request` found missing at any time. A step or a sequence had to
            wait for each of them.
        background: threads that compile for `request`, `compile_later` and `prepare`.
    """

    def __init__(self, dims: ModelDims, *, strict: bool = False, beside: bool = False, jobs: int = 1):
        self.specs = ProgramSpecs(dims)
        self.strict, self._beside = strict, beside
        self.num_late = self.num_awaited = 0
        self.complete = False
        self._known: set[Hashable] = set()
        self._store: ProgramStore[Executable] = ProgramStore()
        self._failed: dict[Hashable, Exception] = {}
        self._num_retries: Counter[Hashable] = Counter()
        self._retry_at = math.inf  # by `time.monotonic()`
        self._prepared: list[Hashable] = []  # keys that `take_arrived` must still return
        self._num_failure_changes = 0
        self.background = BackgroundCompiler(jobs)

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, spec: ProgramSpec) -> bool:
        return spec.key in self._store

    @property
    def num_made(self) -> int:
        """Number of programs that were compiled, or loaded from the compile cache, since the start."""
        return self._store.num_added

    def get(self, spec: ProgramSpec) -> jax.stages.Compiled:
        """Return the compiled program of a spec. If it is missing, compile it first.

        If a compilation of this program in the background has failed, raise its error and forget the error. The next
        call then compiles the program. Errors of a compilation in this call are raised too.

        Raises `NotCompiledError` if the program was never compiled, and the registry is `strict` and `complete`.
        """
        return self.executable(spec).compiled

    def executable(self, spec: ProgramSpec) -> Executable:
        """Return the `Executable` of a spec: the compiled program with its properties. Compile a missing program first.

        Raises the same errors as `get`.
        """
        return self._store.get(spec.key, lambda: self._make(spec))

    # In the background

    @property
    def version(self) -> int:
        """Number that grows whenever the results of `available` and `has_failed` may change."""
        return self._store.num_added + self._num_failure_changes

    def available(self, specs: Iterable[ProgramSpec]) -> bool:
        """Return whether `get` needs no compilation for any of these programs.

        A program with a stored error needs no compilation, because `get` raises the error. If `beside` is False, always
        return True.
        """
        return not self._beside or not self._absent(specs)

    @property
    def has_failures(self) -> bool:
        """Whether errors of failed compilations are stored. `get` raises a stored error once."""
        return bool(self._failed)

    def has_failed(self, specs: Iterable[ProgramSpec]) -> bool:
        """Return whether a background compilation of one of these programs has failed. `get` raises its error."""
        return any(spec.key in self._failed for spec in specs)

    def request(self, specs: Iterable[ProgramSpec]) -> bool:
        """Start to compile missing programs in the background. Return True if no program was missing.

        These programs are compiled before the programs of `compile_later`. If `beside` is False, do nothing and return
        True.
        """
        if not self._beside or not (absent := self._absent(specs)):
            return True
        for spec in self.background.want(self._with_originals(absent)):
            self._count_awaited(spec)
        return False

    def num_missing(self, specs: Iterable[ProgramSpec]) -> int:
        """Return the number of programs that `request` would compile if `beside` were True."""
        return len(self._with_originals(self._absent(specs)))

    def estimate_compile_s(self, num_programs: int) -> float | None:
        """Return the expected seconds to compile `num_programs` programs, or None if the registry is empty."""
        seconds = [executable.info.compile_s for executable in self]
        return fmean(seconds) * num_programs / self.background.num_working if seconds else None

    def compile_later(self, specs: Iterable[ProgramSpec]) -> list[ProgramSpec]:
        """Start to compile missing programs in the background, in the given order, and return their specs at once.

        These programs are compiled after the programs of `request`.
        """
        absent = self._absent(specs)
        self.background.want(self._with_originals(absent), urgent=False)
        return absent

    def take_arrived(self, check: Callable[[Executable], None]) -> list[Hashable]:
        """Store the results of the background threads. Return the keys of the programs that have a new result.

        A result is a compiled program or an error. If `check` raises an error for a program, the error is stored in
        place of the program. `get` raises a stored error once. After `_RETRY_S` seconds, stored errors are forgotten,
        so that the programs can be compiled again. The keys of programs that `prepare` has stored since the last call
        are returned too.

        Args:
            check: function that is called with each compiled program, and may raise an error.
        """
        if time.monotonic() >= self._retry_at:
            self._forget_failures()
        taken = self._take_in(self.background.take(), check)
        keys, self._prepared = self._prepared + [spec.key for spec in taken], []
        return keys

    def _take_in(
        self, arrived: list[Arrival], check: Callable[[Executable], None] = lambda _: None
    ) -> list[ProgramSpec]:
        """Store results of the background threads: programs or errors. Return the specs of all results.

        If `check` raises an error for a program, the error is stored in place of the program.
        """
        for spec, executable, error in arrived:
            try:
                if executable is None:
                    raise error or AssertionError("an arrival has a program or an error")
                check(executable)
            except Exception as failure:
                logger.error("program %s cannot be used: %s", spec, failure)
                self._failed[spec.key] = failure
                self._num_failure_changes += 1
                self._retry_at = min(self._retry_at, time.monotonic() + _RETRY_S)
            else:
                self._known.add(spec.key)
                self._store.add(spec.key, executable)
        return [arrival.spec for arrival in arrived]

    def _forget_failures(self) -> None:
        """Forget stored errors, so that the background threads can compile these programs again.

        After `_MAX_RETRIES` retries of a program, its next error is not forgotten. If `beside` is False, or if the
        registry is `strict` and `complete`, no errors are forgotten.
        """
        self._retry_at = math.inf
        if not self._beside or (self.strict and self.complete):
            return
        for key in [key for key in self._failed if self._num_retries[key] < _MAX_RETRIES]:
            self._num_retries[key] += 1
            del self._failed[key]
            self._num_failure_changes += 1

    def _absent(self, specs: Iterable[ProgramSpec]) -> list[ProgramSpec]:
        refuse = self.strict and self.complete
        return [
            spec
            for key, spec in {spec.key: spec for spec in specs}.items()
            if key not in self._store and key not in self._failed and not (refuse and key not in self._known)
        ]

    def check(self, specs: Iterable[ProgramSpec]) -> None:
        """Raise `NotCompiledError` if one of these programs was never compiled.

        Only a registry that is both `strict` and `complete` checks this. Any other registry does nothing.
        """
        if not (self.strict and self.complete):
            return
        for spec in specs:
            if spec.key not in self._known:
                raise NotCompiledError(
                    f"program {spec} was not compiled before the engine was ready, and strict_compile allows no "
                    "compilation afterwards"
                )

    def _make(self, spec: ProgramSpec) -> Executable:
        self._raise_failure(spec)
        self.check([spec])
        self._count_awaited(spec)
        found = None
        # A compile thread has a stack of sufficient depth; this thread may not.
        for executable in compile_programs(self._with_originals([spec]), jobs=1):
            self._known.add(executable.spec.key)
            if executable.spec.key == spec.key:
                found = executable
            else:
                self._store.add(executable.spec.key, executable)
        assert found is not None, "the program is among the compiled ones"
        return found

    def _with_originals(self, specs: Iterable[ProgramSpec]) -> list[ProgramSpec]:
        """Return the specs. If the original of a spec is not compiled, insert the original before the spec.

        The original (`ProgramSpec.original`) is the same program for the first group of devices of this size. The
        programs of other groups are loaded from the bytes of the original.
        """
        found: dict[Hashable, ProgramSpec] = {}
        for spec in specs:
            original = spec.original
            if original is not None and original.key not in self._store:
                found.setdefault(original.key, original)
            found.setdefault(spec.key, spec)
        return list(found.values())

    def _raise_failure(self, spec: ProgramSpec) -> None:
        if (failure := self._failed.pop(spec.key, None)) is not None:
            self._num_failure_changes += 1
            raise failure

    def _count_awaited(self, spec: ProgramSpec) -> None:
        self.num_awaited += 1
        if not self.complete:
            return
        self.num_late += 1
        evicted = spec.key in self._known
        reason = "it was evicted" if evicted else "the warm-up did not compile it"
        logger.warning("program %s is compiled or loaded while requests wait: %s", spec, reason)

    def prepare(self, specs: Iterable[ProgramSpec]) -> Iterator[Executable]:
        """Yield the programs of all specs: first the compiled programs, then each missing program when it is ready.

        Missing programs are compiled in background threads. If the registry is `complete`, missing programs are
        compiled one by one instead. Raises the same errors as `get`.
        """
        missing = []
        for key, spec in {spec.key: spec for spec in specs}.items():
            if (executable := self._store.find(key)) is not None:
                yield executable
            else:
                missing.append(spec)
        for spec in missing:
            self._raise_failure(spec)
        if self.complete:
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
