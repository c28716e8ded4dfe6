"""The registry of compiled programs."""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import jax
from jax import monitoring

from amoeba_jax.errors import NotCompiledError
from amoeba_jax.host_memory import trim_host_memory
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs import program_cache
from amoeba_jax.programs.background import Arrival, BackgroundCompiler, start_compile_threads
from amoeba_jax.programs.program_requests import ProgramRequest, ProgramRequests
from amoeba_jax.programs.program_store import ProgramStore
from amoeba_jax.programs.relocation import PortableProgram, give_up
from amoeba_jax.views import ExecutableInfo

logger = logging.getLogger(__name__)

# What compiling has freed stays with the process otherwise: 30 MiB a program, measured with SmolLM2 on CPU.
_TRIM_EVERY = 16
# One event for each program, whether XLA compiled it or the compile cache had it; none where JAX has it in memory.
_PROGRAM = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_background_count = itertools.count(1)


class _Compiled(threading.local):
    """Programs that XLA compiled in this thread: JAX calls listeners in the thread that compiles.

    Attributes:
        count: of them.
        latest_is_new: XLA compiled the latest program; else the compile cache had it, or JAX in its memory.
    """

    count = 0
    latest_is_new = False
    hit = False


_compiled = _Compiled()


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    if event == _PROGRAM:
        _compiled.count += 1
        _compiled.latest_is_new, _compiled.hit = not _compiled.hit, False


def _on_event(event: str, **_: object) -> None:
    if event == _CACHE_HIT:  # before the event of its program
        _compiled.count -= 1
        _compiled.hit = True


monitoring.register_event_duration_secs_listener(_on_duration)
monitoring.register_event_listener(_on_event)


@dataclass(frozen=True)
class Executable:
    """A compiled program, and what is known of it."""

    request: ProgramRequest
    compiled: jax.stages.Compiled
    info: ExecutableInfo


def compile_program(
    request: ProgramRequest, source: PortableProgram | None = None
) -> tuple[Executable, PortableProgram | None]:
    """Compile a program, or load it: from `source`, the same program of other devices, or from the compile cache.

    Also returns what it can be loaded from for others. Raises `RuntimeError` where XLA would copy what the program is
    to update in place.
    """
    before, start = _compiled.count, time.perf_counter()
    compiled, relocated = None, source is not None
    entry = program_cache.Entry.of(request)
    if source is None and entry is not None:
        source = entry.find()
    if source is not None:
        try:
            compiled = source.load(request.on)
        except Exception as error:
            if relocated:
                give_up(error)
            elif entry is not None:
                logger.warning("program %s cannot be loaded, and is compiled again: %s", request, error)
                entry.remove()
            source, relocated = None, False
    if compiled is None:
        with contextlib.nullcontext() if entry is None else program_cache.unwritten_by_jax():
            _compiled.latest_is_new = False
            compiled = request.compile()
        # What XLA has not just compiled it may give no bytes of, or bytes that do not work.
        if entry is not None and _compiled.latest_is_new:
            source = PortableProgram.of(compiled, request.on)
            if source is not None:
                entry.keep(source)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    aliased = request.donated_bytes if memory is None else memory.alias_size_in_bytes
    if aliased < request.donated_bytes:
        raise RuntimeError(
            f"program {request} would copy what it is to update in place: {aliased} of {request.donated_bytes} bytes "
            "are aliased"
        )
    info = ExecutableInfo(
        kind=request.kind,
        name=str(request),
        devices=request.devices,
        compile_s=seconds,
        cached=_compiled.count == before,
        relocated=relocated,
        code_bytes=0 if memory is None else memory.generated_code_size_in_bytes,
        temp_bytes=0 if memory is None else memory.temp_size_in_bytes,
        argument_bytes=0 if memory is None else memory.argument_size_in_bytes,
        output_bytes=0 if memory is None else memory.output_size_in_bytes,
        aliased_bytes=aliased,
    )
    return Executable(request, compiled, info), source


def compile_programs(requests: Iterable[ProgramRequest], jobs: int) -> Iterator[Executable]:
    """Compile programs in `jobs` threads at a time (XLA releases the GIL), yielding each when it is done.

    Those that differ in their devices alone are one thread's, after each other: the first is compiled, and loaded for
    the devices of the others (see `relocation`). Raises the first error, when the programs that other threads were
    compiling are done.
    """
    families: dict[object, list[ProgramRequest]] = {}
    for request in requests:
        families.setdefault(request.family, []).append(request)
    if not families:
        return
    waiting: queue.SimpleQueue[list[ProgramRequest]] = queue.SimpleQueue()
    done: queue.SimpleQueue[Executable | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for family in families.values():
        waiting.put(family)

    def work() -> None:
        try:
            while not stop.is_set():
                source = None
                for request in sorted(waiting.get(block=False), key=lambda request: request.devices):
                    if stop.is_set():
                        break
                    executable, source = compile_program(request, source)
                    done.put(executable)
        except queue.Empty:
            pass
        except BaseException as error:
            stop.set()
            done.put(error)
        finally:
            done.put(None)

    threads = [threading.Thread(target=work, name=f"amoeba-compile-{index}", daemon=True) for index in range(jobs)]
    start_compile_threads(threads)
    running, count, error = len(threads), 0, None
    try:
        while running:
            item = done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                error = error or item
            elif error is None:
                count += 1
                if count % _TRIM_EVERY == 0:
                    trim_host_memory()
                yield item
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        trim_host_memory()
    if error is not None:
        raise error


class Executables:
    """Holds one program for each key, compiled on first use or ahead of time by `prepare`. Used by one thread.

    Segments of equal shape share a program, whatever layers they are.

    Attributes:
        requests: makes the requests that this takes.
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
        self.requests = ProgramRequests(dims)
        self.strict, self._beside = strict, beside
        self.num_late = self.num_awaited = 0
        self._complete = False
        self._known: set[Hashable] = set()
        self._store: ProgramStore[Executable] = ProgramStore()
        self._failed: dict[Hashable, Exception] = {}
        self._prepared: list[Hashable] = []  # keys that `take_arrived` has not returned yet
        self._num_failures = 0  # that came, and that were raised
        self.background: BackgroundCompiler[ProgramRequest, Executable] = BackgroundCompiler(_compile_family, jobs)

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, request: ProgramRequest) -> bool:
        return request.key in self._store

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

    def get(self, request: ProgramRequest) -> jax.stages.Compiled:
        """The program, compiled if it is not there.

        Raises `NotCompiledError` instead where this is `strict` and `complete`.
        """
        return self.executable(request).compiled

    def executable(self, request: ProgramRequest) -> Executable:
        """`get` with what is known of it."""
        return self._store.get(request.key, lambda: self._make(request))

    # In the background

    @property
    def version(self) -> int:
        """Changes whenever `available` may answer otherwise."""
        return self._store.num_added + self._num_failures

    def available(self, requests: Iterable[ProgramRequest]) -> bool:
        """Whether `get` gives all of these, or refuses them, and compiles none that could be compiled beside."""
        return not self._beside or not self._absent(requests)

    def request(self, requests: Iterable[ProgramRequest]) -> bool:
        """`available`; what is not is compiled in the background, before what `compile_later` was given."""
        if not self._beside or not (absent := self._absent(requests)):
            return True
        for request in self.background.want(self._with_originals(absent)):
            self._count_awaited(request)
        return False

    def compile_later(self, requests: Iterable[ProgramRequest]) -> list[ProgramRequest]:
        """Have what is not there compiled in the background, in this order. Return what is not there."""
        absent = self._absent(requests)
        self.background.want(self._with_originals(absent), urgent=False)
        return absent

    def take_arrived(self, check: Callable[[Executable], None]) -> list[Hashable]:
        """Take in what was compiled in the background, and return its keys. `get` raises, once, what compiling a
        program has raised, or what `check` raises for it."""
        taken = self._take_in(self.background.take(), check)
        keys, self._prepared = self._prepared + [request.key for request in taken], []
        return keys

    def _take_in(
        self, arrived: list[Arrival[ProgramRequest, Executable]], check: Callable[[Executable], None] = lambda _: None
    ) -> list[ProgramRequest]:
        """Keep programs, or why there are none. Return all requests."""
        for request, executable, error in arrived:
            try:
                if executable is None:
                    raise error or AssertionError("it has one or the other")
                check(executable)
            except Exception as failure:
                logger.error("program %s cannot be used: %s", request, failure)
                self._failed[request.key] = failure
                self._num_failures += 1
            else:
                self._known.add(request.key)
                self._store.add(request.key, executable)
        return [arrival.request for arrival in arrived]

    def _absent(self, requests: Iterable[ProgramRequest]) -> list[ProgramRequest]:
        refuse = self.strict and self._complete
        return [
            request
            for key, request in {request.key: request for request in requests}.items()
            if key not in self._store and key not in self._failed and not (refuse and key not in self._known)
        ]

    def check(self, requests: Iterable[ProgramRequest]) -> None:
        """Raise `NotCompiledError` for the first program, if any, that `get` would refuse."""
        if self.strict and self._complete:
            for request in requests:
                if request.key not in self._known:
                    raise _not_compiled(request)

    def _make(self, request: ProgramRequest) -> Executable:
        self._raise_failure(request)
        if self._complete and self.strict and request.key not in self._known:
            raise _not_compiled(request)
        self._count_awaited(request)
        found = None
        # In a thread of its own: this one's stack may be too small.
        for executable in compile_programs(self._with_originals([request]), jobs=1):
            self._known.add(executable.request.key)
            if executable.request.key == request.key:
                found = executable
            else:
                self._store.add(executable.request.key, executable)
        assert found is not None, "it is one of them"
        return found

    def _with_originals(self, requests: Iterable[ProgramRequest]) -> list[ProgramRequest]:
        """Requests, and those for the first group of devices that are missing: what is compiled for it serves all, and
        the compile cache has each program once."""
        found: dict[Hashable, ProgramRequest] = {}
        for request in requests:
            original = request.original
            if original is not None and original.key not in self._store:
                found.setdefault(original.key, original)
            found.setdefault(request.key, request)
        return list(found.values())

    def _raise_failure(self, request: ProgramRequest) -> None:
        """Raise, once, why a program could not be compiled in the background."""
        if (failure := self._failed.pop(request.key, None)) is not None:
            self._num_failures += 1
            raise failure

    def _count_awaited(self, request: ProgramRequest) -> None:
        self.num_awaited += 1
        if not self._complete:
            return
        self.num_late += 1
        dropped = request.key in self._known
        why = "it was dropped for others" if dropped else "it was not before the engine was ready"
        logger.warning("program %s is compiled, or loaded, while requests wait: %s", request, why)

    def prepare(self, requests: Iterable[ProgramRequest]) -> Iterator[Executable]:
        """Have what is missing compiled in the background, wait for it, and yield each program, those that were there
        first.

        Raises what compiling one raises, and `NotCompiledError` as `get` does.
        """
        missing = []
        for key, request in {request.key: request for request in requests}.items():
            if (executable := self._store.find(key)) is not None:
                yield executable
            else:
                missing.append(request)
        for request in missing:
            self._raise_failure(request)
        if self._complete:
            yield from map(self.executable, missing)
            return
        wanted = self._with_originals(missing)
        left = {request.key for request in wanted}
        self.background.want(wanted)
        try:
            while left:
                self.background.wait(left)
                taken = self._take_in(self.background.take(left))
                self._prepared += [request.key for request in taken]
                left.difference_update(self._prepared)
                for request in taken:
                    self._raise_failure(request)
                    yield self._store.get(request.key, lambda request=request: self._make(request))
        finally:
            self.background.forget(left)


def _compile_family(requests: list[ProgramRequest]) -> Iterator[tuple[ProgramRequest, Executable]]:
    """For a `BackgroundCompiler`."""
    source = None
    for request in sorted(requests, key=lambda request: request.devices):
        executable, source = compile_program(request, source)
        if next(_background_count) % _TRIM_EVERY == 0:
            trim_host_memory()
        yield request, executable


def _not_compiled(request: ProgramRequest) -> NotCompiledError:
    return NotCompiledError(
        f"program {request} was not compiled before the engine was ready, and with strict_compile none is compiled "
        "after that"
    )
