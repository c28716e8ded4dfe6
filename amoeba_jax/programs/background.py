"""Compiling beside serving: programs that are missing come from threads that launch nothing."""

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

# Of the threads that compile: their share of a processor that serving wants is a third of its.
_NICENESS = 5


def background_jobs(jobs: int | None) -> int:
    """Programs to compile at once beside serving; None: half as many as there are processors, at most 4."""
    return max(1, (jobs or min(os.cpu_count() or 1, 8)) // 2)


class Wanted(Protocol):
    """What is to be compiled: a `ProgramRequest`."""

    @property
    def key(self) -> Hashable: ...

    @property
    def family(self) -> Hashable: ...


R = TypeVar("R", bound=Wanted)
T = TypeVar("T")


class Arrival(NamedTuple, Generic[R, T]):
    """A program that was asked for, or why there is none."""

    request: R
    program: T | None
    error: Exception | None


class BackgroundCompiler(Generic[R, T]):
    """Compiles what it is asked for in `jobs` threads of lower priority, urgent programs first, then in order.

    Threads begin with the first program. Methods may be called from any thread, but `take` from one alone.

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
        self._closed = False

    @property
    def num_left(self) -> int:
        """Programs that were asked for and not taken yet."""
        with self._changed:
            return len(self._urgent) + len(self._later) + len(self._compiling) + len(self._arrived)

    def want(self, requests: Iterable[R], urgent: bool = True) -> list[R]:
        """Ask for programs, urgent ones before all that are not. Return those that are new, or urgent only now."""
        new = []
        with self._changed:
            here = self._compiling | {arrival.request.key for arrival in self._arrived}
            for request in requests:
                key = request.key
                if self._closed or key in here or key in self._urgent:
                    continue
                if urgent or key not in self._later:
                    new.append(request)
                if urgent:
                    self._later.pop(key, None)
                    self._urgent[key] = request
                else:
                    self._later.setdefault(key, request)
            if (self._urgent or self._later) and len(self._threads) < self._jobs:
                name = f"amoeba-compile-beside-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()
        return new

    def take(self) -> list[Arrival[R, T]]:
        """What has arrived since the last time."""
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
        return arrived

    def wait(self) -> None:
        """Wait until there is something to take, or nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or not (self._urgent or self._later or self._compiling))

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

    def _next(self) -> list[R]:
        """Programs of one family to compile; none when it is closed."""
        with self._changed:
            while not self._closed and not self._urgent and not self._later:
                self._changed.wait()
            if self._closed:
                return []
            # One that waits may need a single program of a family: the others of it come when it is their turn.
            queue = self._urgent or self._later
            family = next(iter(queue.values())).family
            found = [request for request in queue.values() if request.family == family]
            for request in found:
                del queue[request.key]
                self._compiling.add(request.key)
        return found

    def _work(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # where threads have priorities of their own: on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while requests := self._next():
            left = {request.key: request for request in requests}
            try:
                for request, program in self._compile(requests):
                    del left[request.key]
                    self._arrive([Arrival(request, program, None)])
            except Exception as error:
                self._arrive([Arrival(request, None, error) for request in left.values()])

    def _arrive(self, arrivals: list[Arrival[R, T]]) -> None:
        with self._changed:
            self._compiling.difference_update(arrival.request.key for arrival in arrivals)
            if self._closed:
                return
            self._arrived.extend(arrivals)
            self._changed.notify_all()
        self.on_arrival()
