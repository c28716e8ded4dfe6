"""Background compilation: number of threads, order of programs, and their collection."""

import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from amoeba_jax.programs.background import BackgroundCompiler
from amoeba_jax.programs.program_specs import ProgramKey, ProgramSpec

TIMEOUT_S = 60.0


class Work:
    """A compiler whose programs are ready when the test releases them.

    Programs have numbers, and each is a family of its own. Programs with negative numbers fail.
    """

    def __init__(self, jobs: int):
        self.begun: list[int] = []
        self.compiler = BackgroundCompiler(jobs)
        self._changed = threading.Condition()
        self._released: set[int] = set()
        self._compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()

    def want(self, *numbers: int) -> None:
        self.compiler.want([self.spec(number) for number in numbers])

    def spec(self, number: int) -> ProgramSpec:
        return ProgramSpec(key(number), lambda: self._compile(number), on=tuple(jax.devices()[:1]))

    def _compile(self, number: int) -> jax.stages.Compiled:
        with self._changed:
            self.begun.append(number)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number in self._released, TIMEOUT_S)
        if number < 0:
            raise ValueError("no such program")
        return self._compiled

    def release(self, *numbers: int) -> None:
        with self._changed:
            self._released.update(numbers)
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        self.compiler.wait({key(number)})

    def wait_until_begun(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, TIMEOUT_S)
            return sorted(self.begun)


def key(number: int) -> ProgramKey:
    return ProgramKey("test", (0,), (number,))


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work(jobs=4)
    yield work
    work.release(*range(-10, 10))
    work.compiler.close()


def test_all_threads_compile_while_nothing_is_served(work: Work):
    work.want(*range(6))
    assert work.wait_until_begun(4) == [0, 1, 2, 3]


def test_half_of_the_threads_compile_beside_serving(work: Work):
    work.compiler.serving = True
    work.want(*range(6))
    assert work.wait_until_begun(2) == [0, 1]
    work.release(0)
    work.wait(0)
    assert work.wait_until_begun(3) == [0, 1, 2], "one that ends makes room for one"
    work.compiler.serving = False
    assert work.wait_until_begun(5) == [0, 1, 2, 3, 4]


def test_who_waits_for_some_programs_takes_those_alone(work: Work):
    work.want(*range(3))
    work.wait_until_begun(3)
    work.release(2)
    work.compiler.wait()
    work.release(1)
    work.wait(1)
    assert [arrival.spec.key for arrival in work.compiler.take({key(1)})] == [key(1)]
    (arrival,) = work.compiler.take()
    assert arrival.spec.key == key(2)
    assert arrival.program is not None
    assert arrival.program.compiled(1.0) == 2
    work.wait(1)  # taken: there is nothing to wait for


def test_what_is_forgotten_is_not_compiled(work: Work):
    work.want(*range(6))
    work.wait_until_begun(4)
    work.compiler.forget({key(4)})
    work.release(0, 1, 2, 3, 5)
    work.wait(5)
    assert 4 not in work.begun
    assert work.compiler.num_left == 5, "those that were compiled, and not taken yet"


def test_an_error_arrives_like_a_program(work: Work):
    work.want(-1)
    work.release(-1)
    work.wait(-1)
    (arrival,) = work.compiler.take()
    assert arrival.program is None
    assert str(arrival.error) == "no such program"


def test_closing_waits_for_one_program_of_a_family():
    work = Work(jobs=1)
    family = [ProgramKey("test", (device,), ()) for device in range(3)]
    made = []

    def compile(number: int) -> jax.stages.Compiled:
        made.append(number)
        return work.spec(number).compile()

    on = tuple(jax.devices()[:1])
    work.compiler.want(ProgramSpec(key, lambda i=i: compile(i), on=on) for i, key in enumerate(family))
    work.wait_until_begun(1)
    closing = threading.Thread(target=work.compiler.close)
    closing.start()
    while not work.compiler._closed:
        time.sleep(0.001)
    work.release(*range(3))
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert made == [0]
