"""Threads that compile in the background: how many, in what order, and who takes what they bring."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from amoeba_jax.programs.background import BackgroundCompiler

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Wanted:
    """Each program is a family of its own."""

    key: int

    @property
    def family(self) -> int:
        return self.key


class OfOneFamily(Wanted):
    """All programs are of one family."""

    @property
    def family(self) -> int:
        return 0


class Work:
    """A compiler whose programs are ready when they are released."""

    def __init__(self, jobs: int):
        self.begun: list[int] = []
        self.compiler: BackgroundCompiler[Wanted, str] = BackgroundCompiler(self._compile, jobs)
        self._changed = threading.Condition()
        self._released: set[int] = set()

    def _compile(self, requests: list[Wanted]) -> Iterator[tuple[Wanted, str]]:
        (request,) = requests
        with self._changed:
            self.begun.append(request.key)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: request.key in self._released, TIMEOUT_S)
        if request.key < 0:
            raise ValueError("no such program")
        yield request, f"program {request.key}"

    def release(self, *keys: int) -> None:
        with self._changed:
            self._released.update(keys)
            self._changed.notify_all()

    def wait_until_begun(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, TIMEOUT_S)
            return sorted(self.begun)


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work(jobs=4)
    yield work
    work.release(*range(-10, 10))
    work.compiler.close()


def test_all_threads_compile_while_nothing_is_served(work: Work):
    work.compiler.want([Wanted(key) for key in range(6)])
    assert work.wait_until_begun(4) == [0, 1, 2, 3]


def test_half_of_the_threads_compile_beside_serving(work: Work):
    work.compiler.serving = True
    work.compiler.want([Wanted(key) for key in range(6)])
    assert work.wait_until_begun(2) == [0, 1]
    work.release(0)
    work.compiler.wait({0})
    assert work.wait_until_begun(3) == [0, 1, 2], "one that ends makes room for one"
    work.compiler.serving = False
    assert work.wait_until_begun(5) == [0, 1, 2, 3, 4]


def test_who_waits_for_some_programs_takes_those_alone(work: Work):
    work.compiler.want([Wanted(key) for key in range(3)])
    work.wait_until_begun(3)
    work.release(2)
    work.compiler.wait()
    work.release(1)
    work.compiler.wait({1})
    assert [arrival.program for arrival in work.compiler.take({1})] == ["program 1"]
    assert [arrival.program for arrival in work.compiler.take()] == ["program 2"]
    work.compiler.wait({1})  # taken: there is nothing to wait for


def test_what_is_forgotten_is_not_compiled(work: Work):
    work.compiler.want([Wanted(key) for key in range(6)])
    work.wait_until_begun(4)
    work.compiler.forget({4})
    work.release(0, 1, 2, 3, 5)
    work.compiler.wait({5})
    assert 4 not in work.begun
    assert work.compiler.num_left == 5, "those that were compiled, and not taken yet"


def test_an_error_arrives_like_a_program(work: Work):
    work.compiler.want([Wanted(-1)])
    work.release(-1)
    work.compiler.wait({-1})
    (arrival,) = work.compiler.take()
    assert arrival.program is None
    assert str(arrival.error) == "no such program"


def test_closing_waits_for_one_program_of_a_family():
    begun, go_on, made = threading.Event(), threading.Event(), []

    def compile(family: list[Wanted]) -> Iterator[tuple[Wanted, str]]:
        for spec in family:
            begun.set()
            assert go_on.wait(TIMEOUT_S)
            made.append(spec.key)
            yield spec, "program"

    compiler: BackgroundCompiler[Wanted, str] = BackgroundCompiler(compile, 1)
    compiler.want([OfOneFamily(key) for key in range(3)])
    assert begun.wait(TIMEOUT_S)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    while not compiler._closed:
        time.sleep(0.001)
    go_on.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert made == [0]
