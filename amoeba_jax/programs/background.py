"""Threads that compile programs while requests run."""

import contextlib
import itertools
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import NamedTuple

from amoeba_jax.host_memory import trim_host_memory
from amoeba_jax.programs import compiling
from amoeba_jax.programs.compiling import Executable
from amoeba_jax.programs.program_specs import ProgramSpec

# While requests run, a compile thread gets a third of the processor time of a serving thread that competes with it.
_NICENESS = 5
_MAX_JOBS = 8
# The passes of XLA recurse deeper than the default stack of a thread allows.
STACK_BYTES = 64 << 20
# Otherwise the process keeps the memory that compiling frees: 30 MiB a program, measured with SmolLM2 on CPU.
_TRIM_EVERY = 16
_num_compiled = itertools.count(1)
_starting_threads = threading.Lock()


def compile_jobs(jobs: int | None) -> int:
    """Return the number of programs to compile at once.

    This is `jobs` if it is set. Otherwise, it is the number of processors, but at most 8.
    """
    return jobs or max(1, min(os.cpu_count() or 1, _MAX_JOBS))


def _start_threads(threads: Iterable[threading.Thread]) -> None:
    with _starting_threads:
        previous = threading.stack_size(STACK_BYTES)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(previous)


class Arrival(NamedTuple):
    """Result of one requested compilation. If it succeeded, `error` is None. If it failed, `program` is None."""

    spec: ProgramSpec
    program: Executable | None
    error: Exception | None


class BackgroundCompiler:
    """Threads that compile requested programs. Programs requested as urgent come first.

    Programs of the same urgency are compiled in the order in which they were requested. Programs that differ only in
    their devices (`ProgramSpec.family`) are compiled together.

    The threads start when a program is requested for the first time. All methods are thread-safe, but only one thread
    may call `take`.

    Args:
        jobs: number of threads.

    Attributes:
        serving: whether steps of the engine are in flight. If True, only half of the threads start new compilations,
            and all threads run at a lower priority.
        on_arrival: function that the compile threads call after each program. It must not block.
    """

    def __init__(self, jobs: int):
        self.on_arrival: Callable[[], None] = lambda: None
        self._jobs = jobs
        self._changed = threading.Condition()
        self._urgent: OrderedDict[Hashable, ProgramSpec] = OrderedDict()
        self._later: OrderedDict[Hashable, ProgramSpec] = OrderedDict()
        self._compiling: set[Hashable] = set()
        self._arrived: deque[Arrival] = deque()
        self._threads: list[threading.Thread] = []
        self._serving = self._closed = False
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else None

    @property
    def serving(self) -> bool:
        return self._serving

    @serving.setter
    def serving(self, serving: bool) -> None:
        if serving != self._serving:
            with self._changed:
                self._serving = serving
                self._set_priorities()
                self._changed.notify_all()

    @property
    def num_left(self) -> int:
        """Number of requested programs whose results have not been taken with `take` yet."""
        with self._changed:
            return len(self._urgent) + len(self._later) + len(self._compiling) + len(self._arrived)

    def want(self, specs: Iterable[ProgramSpec], urgent: bool = True) -> list[ProgramSpec]:
        """Request the compilation of programs. Return the specs that this call has queued or moved.

        If a program waits in the queue for later and `urgent` is True, the program moves to the urgent queue. Any other
        program that was already requested is skipped. After `close`, all programs are skipped.
        """
        new = []
        with self._changed:
            here = self._compiling | {arrival.spec.key for arrival in self._arrived}
            for spec in specs:
                key = spec.key
                if self._closed or key in here or key in self._urgent:
                    continue
                if urgent or key not in self._later:
                    new.append(spec)
                if urgent:
                    self._later.pop(key, None)
                    self._urgent[key] = spec
                else:
                    self._later.setdefault(key, spec)
            if (self._urgent or self._later) and not self._threads:
                self._threads = [
                    threading.Thread(target=self._work, args=(index,), name=f"amoeba-compile-{index}", daemon=True)
                    for index in range(self._jobs)
                ]
                _start_threads(self._threads)
                self._set_priorities()
            self._changed.notify_all()
        return new

    def forget(self, keys: Collection[Hashable]) -> None:
        """Withdraw the requests for programs with these keys.

        If a thread is already compiling a program, the result of this program still arrives.
        """
        with self._changed:
            for key in keys:
                self._urgent.pop(key, None)
                self._later.pop(key, None)
            self._changed.notify_all()

    def take(self, keys: Collection[Hashable] | None = None) -> list[Arrival]:
        """Return all results that have arrived, and remove them. A result is a compiled program or an error.

        If `keys` is given, only results of programs with these keys are taken.
        """
        with self._changed:
            arrived = [arrival for arrival in self._arrived if keys is None or arrival.spec.key in keys]
            for arrival in arrived:
                self._arrived.remove(arrival)
        return arrived

    def wait(self, keys: Collection[Hashable] | None = None) -> None:
        """Wait until a result can be taken, or until no requested program is left.

        If `keys` is given, only programs with these keys count.
        """

        def over() -> bool:
            if any(keys is None or arrival.spec.key in keys for arrival in self._arrived):
                return True
            queues = self._urgent, self._later, self._compiling
            return not any(key in queue for queue in queues for key in (queue if keys is None else keys))

        with self._changed:
            self._changed.wait_for(over)

    def close(self) -> None:
        """Withdraw all requested programs and wait until the threads have ended.

        The wait is necessary, because Python must not exit while a thread is inside XLA.
        """
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._later.clear()
            self._arrived.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self, index: int) -> list[ProgramSpec]:
        """Wait until thread `index` may compile. Return the programs that the thread compiles next.

        All returned programs are from one queue, and they differ only in their devices (`ProgramSpec.family`). If
        `close` was called, return an empty list.
        """
        with self._changed:
            while not self._closed and (not (self._urgent or self._later) or index >= self.num_working):
                self._changed.wait()
            if self._closed:
                return []
            # A waiting request may need one program of a family. The others stay in their queue until their turn.
            queue = self._urgent or self._later
            family = next(iter(queue.values())).family
            found = [spec for spec in queue.values() if spec.family == family]
            for spec in found:
                del queue[spec.key]
                self._compiling.add(spec.key)
        return found

    @property
    def num_working(self) -> int:
        """Number of threads that may start compilations: half of all threads if `serving` is True, else all threads."""
        return max(1, self._jobs // 2) if self._serving else self._jobs

    def _set_priorities(self) -> None:
        """Set the priority of the compile threads: low if `serving` is True, else the priority of the process.

        If the system does not allow the higher priority, the priority stays low. On systems other than Linux, do
        nothing.
        """
        if self._niceness is None:  # only Linux has priorities for threads
            return
        for thread in self._threads:
            assert thread.native_id is not None, "the thread was started"
            with contextlib.suppress(OSError):
                niceness = self._niceness + (_NICENESS if self._serving else 0)
                os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)

    def _work(self, index: int) -> None:
        while specs := self._next(index):
            left = {spec.key: spec for spec in specs}
            try:
                for spec, executable in self._compile(specs):
                    del left[spec.key]
                    self._arrive([Arrival(spec, executable, None)])
                    del executable
                    if self._closed:
                        return
            except Exception as error:
                self._arrive([Arrival(spec, None, error) for spec in left.values()])

    def _compile(self, family: list[ProgramSpec]) -> Iterator[tuple[ProgramSpec, Executable]]:
        """Compile programs that differ only in their devices (`ProgramSpec.family`). Yield each program with its spec.

        The program with the lowest device indices comes first. The other programs are loaded from the bytes of the
        first program (`PortableProgram`). If the first program has no bytes, the other programs are compiled too.
        """
        portable = None
        for spec in sorted(family, key=lambda spec: spec.devices):
            executable, portable = compiling.compile_program(spec, portable)
            if next(_num_compiled) % _TRIM_EVERY == 0:
                trim_host_memory()
            yield spec, executable

    def _arrive(self, arrivals: list[Arrival]) -> None:
        with self._changed:
            self._compiling.difference_update(arrival.spec.key for arrival in arrivals)
            if self._closed:
                return
            self._arrived.extend(arrivals)
            self._changed.notify_all()
        self.on_arrival()


def compile_programs(specs: Iterable[ProgramSpec], jobs: int) -> Iterator[Executable]:
    """Compile programs in `jobs` threads. Yield each program as soon as it is compiled, in any order.

    If a compilation fails, wait until each thread has finished its current program, and raise the error.
    """
    compiler = BackgroundCompiler(jobs)
    compiler.want(specs)
    try:
        while compiler.num_left:
            compiler.wait()
            for arrival in compiler.take():
                if arrival.error is not None:
                    raise arrival.error
                assert arrival.program is not None, "it has a program or an error"
                yield arrival.program
    finally:
        compiler.close()
        trim_host_memory()
