"""Compiling beside serving: programs that are missing come from threads that launch nothing."""

import contextlib
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

# Of the threads that compile beside serving: their share of a processor that serving wants is a third of its.
_NICENESS = 5
_MAX_JOBS = 8
# XLA's passes recurse, more deeply than the stack that a thread gets by default.
STACK_BYTES = 64 << 20
_starting_threads = threading.Lock()


def compile_jobs(jobs: int | None) -> int:
    """Programs to compile at once while nothing is served; None: as many as there are processors, at most 8."""
    return jobs or max(1, min(os.cpu_count() or 1, _MAX_JOBS))


def start_compile_threads(threads: Iterable[threading.Thread]) -> None:
    """Start threads with a stack that is deep enough for XLA."""
    with _starting_threads:
        previous = threading.stack_size(STACK_BYTES)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(previous)


class Wanted(Protocol):
    """What is to be compiled: a `ProgramSpec`."""

    @property
    def key(self) -> Hashable: ...

    @property
    def family(self) -> Hashable: ...


R = TypeVar("R", bound=Wanted)
T = TypeVar("T")


class Arrival(NamedTuple, Generic[R, T]):
    """A program that was asked for, or why there is none."""

    spec: R
    program: T | None
    error: Exception | None


class BackgroundCompiler(Generic[R, T]):
    """Compiles what it is asked for in `jobs` threads, urgent programs first, then in order.

    Threads begin with the first program. Methods may be called from any thread, but `take` from one alone.

    Attributes:
        serving: requests run: half of the threads compile, at lower priority, and the others begin nothing new.

    Args:
        compile: compiles programs of one family, and yields each when it is there.
        on_arrival: called in other threads whenever `take` has something to give; must not block.
    """

    def __init__(
        self,
        compile: Callable[[list[R]], Iterable[tuple[R, T]]],
        jobs: int,
        on_arrival: Callable[[], None] = lambda: None,
    ):
        self.on_arrival = on_arrival
        self._compile, self._jobs = compile, jobs
        self._changed = threading.Condition()
        self._urgent: OrderedDict[Hashable, R] = OrderedDict()
        self._later: OrderedDict[Hashable, R] = OrderedDict()
        self._compiling: set[Hashable] = set()
        self._arrived: deque[Arrival[R, T]] = deque()
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
        """Programs that were asked for and not taken yet."""
        with self._changed:
            return len(self._urgent) + len(self._later) + len(self._compiling) + len(self._arrived)

    def want(self, specs: Iterable[R], urgent: bool = True) -> list[R]:
        """Ask for programs, urgent ones before all that are not. Return those that are new, or urgent only now."""
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
                    threading.Thread(target=self._work, args=(index,), name=f"amoeba-background-{index}", daemon=True)
                    for index in range(self._jobs)
                ]
                start_compile_threads(self._threads)
                self._set_priorities()
            self._changed.notify_all()
        return new

    def forget(self, keys: Collection[Hashable]) -> None:
        """Do not compile these programs, but for those that are being compiled."""
        with self._changed:
            for key in keys:
                self._urgent.pop(key, None)
                self._later.pop(key, None)
            self._changed.notify_all()

    def take(self, keys: Collection[Hashable] | None = None) -> list[Arrival[R, T]]:
        """What has arrived since the last time; of these programs alone if `keys` are given."""
        with self._changed:
            arrived = [arrival for arrival in self._arrived if keys is None or arrival.spec.key in keys]
            for arrival in arrived:
                self._arrived.remove(arrival)
        return arrived

    def wait(self, keys: Collection[Hashable] | None = None) -> None:
        """Wait until there is something to take, or nothing is left; of these programs alone if `keys` are given."""

        def over() -> bool:
            if any(keys is None or arrival.spec.key in keys for arrival in self._arrived):
                return True
            queues = self._urgent, self._later, self._compiling
            return not any(key in queue for queue in queues for key in (queue if keys is None else keys))

        with self._changed:
            self._changed.wait_for(over)

    def close(self) -> None:
        """Forget what was asked for, and wait for programs that are being compiled: the interpreter must not end under
        threads that are in XLA."""
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._later.clear()
            self._arrived.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self, index: int) -> list[R]:
        """Programs of one family for a thread to compile; none when it is closed."""
        with self._changed:
            while not self._closed and (not (self._urgent or self._later) or index >= self._num_working):
                self._changed.wait()
            if self._closed:
                return []
            # One that waits may need a single program of a family: the others of it come when it is their turn.
            queue = self._urgent or self._later
            family = next(iter(queue.values())).family
            found = [spec for spec in queue.values() if spec.family == family]
            for spec in found:
                del queue[spec.key]
                self._compiling.add(spec.key)
        return found

    @property
    def _num_working(self) -> int:
        return max(1, self._jobs // 2) if self._serving else self._jobs

    def _set_priorities(self) -> None:
        """Threads have priorities of their own on Linux. Without leave to raise them, they stay low once requests have
        run."""
        if self._niceness is None:
            return
        for thread in self._threads:
            assert thread.native_id is not None, "it has been started"
            with contextlib.suppress(OSError):
                niceness = self._niceness + (_NICENESS if self._serving else 0)
                os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)

    def _work(self, index: int) -> None:
        while specs := self._next(index):
            left = {spec.key: spec for spec in specs}
            try:
                for spec, program in self._compile(specs):
                    del left[spec.key]
                    self._arrive([Arrival(spec, program, None)])
                    if self._closed:
                        return  # the rest of the family is not wanted either
            except Exception as error:
                self._arrive([Arrival(spec, None, error) for spec in left.values()])

    def _arrive(self, arrivals: list[Arrival[R, T]]) -> None:
        with self._changed:
            self._compiling.difference_update(arrival.spec.key for arrival in arrivals)
            if self._closed:
                return
            self._arrived.extend(arrivals)
            self._changed.notify_all()
        self.on_arrival()
