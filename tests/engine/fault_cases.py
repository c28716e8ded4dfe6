"""One load that needs every kind of program, and faults that happen once in it.

The load runs in the dispatcher thread, step by step. Until a fault changes the work, each run makes the same calls in
the same order. So "the third `device_put`" is the same call in every run.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import engine_of, in_dispatcher, registry_of
from serving_checks import forget_prefixes

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.accumulate import wait_for
from amoeba_jax.cpu_cache import PortableProgram
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import ResultReader
from amoeba_jax.programs import compiling
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.request import Delivery, Request
from amoeba_jax.transform.options import TransformOptions

MAX_ROUNDS = 600
"""Rounds after which a load counts as endless."""
NO_MEMORY = "RESOURCE_EXHAUSTED: injected"
DONATED: dict[str, tuple[int, ...]] = {
    "step": (1, 2),
    "split": (0,),
    "join": (0,),
    "sample_full": (2,),
    "set_state": (0, 1),
    "page_copy": (0,),
    "exchange": (0,),
    "restore": (1,),
}
"""Indices of donated arguments, by kind of program. Other kinds donate none."""

_COMMON: dict[str, Any] = {"max_tokens": 18, "ignore_eos": True}
EARLY: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": ([*range(3, 24)], SamplingParams(temperature=0, **_COMMON)),
    "penalized": ([40, 41, 42, 43, 44], SamplingParams(temperature=1, seed=1, repetition_penalty=1.3, **_COMMON)),
    "drawn": ([50, 51, 52, 53, 54, 55, 56], SamplingParams(temperature=1, seed=2, logprobs=1, **_COMMON)),
    "two": ([60, 61, 62, 63, 64, 65], SamplingParams(temperature=0.8, seed=3, n=2, **_COMMON)),
    "prompt": ([70, 71, 72, 73, 74], SamplingParams(temperature=0, prompt_logprobs=1, **_COMMON)),
}
LATE: dict[str, tuple[list[int], SamplingParams]] = {
    "late": ([80, 81, 82], SamplingParams(temperature=0.8, seed=4, n=2, presence_penalty=0.5, **_COMMON)),
}


@dataclass
class Outcome:
    """Results of a load's requests, by name, and of its transformations."""

    requests: dict[str, tuple[tuple[int, ...], ...] | BaseException] = field(default_factory=dict)
    transformations: list[BaseException | None] = field(default_factory=list)

    @property
    def failures(self) -> list[BaseException]:
        """Errors of requests, then of transformations."""
        every = [*self.requests.values(), *self.transformations]
        return [result for result in every if isinstance(result, BaseException)]

    @property
    def tokens(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Tokens of each continuation of the requests that did not fail."""
        return {name: result for name, result in self.requests.items() if not isinstance(result, BaseException)}


class Load:
    """Requests of every kind on 2 x TP1, a merge while they decode, another request at TP2, and a split.

    Args:
        wrap_sink: hook that may replace the sink of a sequence.
    """

    def __init__(
        self,
        llm: LLM,
        wrap_sink: Callable[[str, Sequence], None] = lambda name, sequence: None,
    ):
        self._llm, self._wrap_sink = llm, wrap_sink
        self._asked: dict[str, tuple[Request, queue.SimpleQueue[Delivery]]] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run the load and return its outcome.

        Raises an `AssertionError` if the requests never end, and any error that ends the engine.
        """
        forget_prefixes(self._llm)
        in_dispatcher(self._llm, self._drive, engine_of(self._llm))
        for name, (request, deliveries) in self._asked.items():
            try:
                outputs = wait_for(request, deliveries).outputs
                self._outcome.requests[name] = tuple(output.token_ids for output in outputs)
            except Exception as error:
                self._outcome.requests[name] = error
        return self._outcome

    def _drive(self, engine: Engine) -> None:
        self._submit(engine, EARLY)
        self._until(engine, lambda: self._have(EARLY, 3))
        self._transform(engine, 2)
        self._submit(engine, LATE)
        self._until(engine, lambda: self._have(LATE, 2))
        self._transform(engine, 1)
        self._until(engine, lambda: not engine.has_requests)

    def _submit(self, engine: Engine, asked: dict[str, tuple[list[int], SamplingParams]]) -> None:
        for name, (prompt, params) in asked.items():
            deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
            request = registry_of(self._llm).make(prompt, params, deliveries.put, name, None, every_token=False)
            for sequence in request.sequences:
                self._wrap_sink(name, sequence)
            self._asked[name] = request, deliveries
            engine.submit([request.sequences[0]])

    def _have(self, asked: dict[str, Any], count: int) -> bool:
        sequences = [sequence for name in asked for sequence in self._asked[name][0].sequences]
        return all(sequence.finished or len(sequence.output) >= count for sequence in sequences)

    def _transform(self, engine: Engine, degree: int, **options: Any) -> None:
        error: BaseException | None = None
        try:
            report = engine.transform(TransformOptions(degree, (0, 1), layers_per_step=1, **options))
            self._until(engine, lambda: not engine.changes.busy)
            error = report.exception(timeout=0)
        except (RequestError, TransformError) as refused:
            error = refused
        self._outcome.transformations.append(error)

    def _until(self, engine: Engine, done: Callable[[], bool]) -> None:
        """Run the dispatcher's loop until `done`. Each round collects results only after all have arrived."""
        for _ in range(MAX_ROUNDS):
            if done():
                return
            while engine.advance():
                pass
            for instance in engine.cluster.all_instances:
                for step in instance.pending:
                    step.result.exception()
            for transition in engine.changes.transitions:
                if transition.last_result is not None:
                    transition.last_result.exception()
            engine.collect()
        raise AssertionError("the requests never end")


class LoadDuringMerge(Load):
    """A load whose late requests arrive while layers switch."""

    def _drive(self, engine: Engine) -> None:
        self._submit(engine, EARLY)
        self._until(engine, lambda: self._have(EARLY, 3))
        report = engine.transform(TransformOptions(2, (0, 1), layers_per_step=1))
        self._until(engine, lambda: any(i.transition is not None for i in engine.instances))
        self._submit(engine, LATE)
        self._until(engine, lambda: not engine.changes.busy)
        self._outcome.transformations.append(report.exception(timeout=0))
        self._until(engine, lambda: self._have(LATE, 18))
        self._transform(engine, 1)
        self._until(engine, lambda: not engine.has_requests)


class PausingLoad(Load):
    """A load whose early requests pause while the late requests run on both devices.

    Args:
        early: whether the early requests resume before the late requests end.
    """

    def __init__(self, llm: LLM, early: bool = False):
        super().__init__(llm)
        self._early = early

    def _drive(self, engine: Engine) -> None:
        self._submit(engine, EARLY)
        self._until(engine, lambda: self._have(EARLY, 3))
        engine.advance()  # steps are in flight
        self._transform(engine, 2, release_weights=False, running="pause")
        self._submit(engine, LATE)
        self._until(engine, lambda: self._have(LATE, 2 if self._early else 18))
        if len(engine.instances) == 1:
            self._transform(engine, 1)
        if len(engine.instances) == 1:  # the split failed
            self._until(engine, lambda: self._have(LATE, 18))
            self._transform(engine, 1)
        self._until(engine, lambda: not engine.has_requests)


class Faults:
    """Makes a program fail once, when it is compiled, loaded, called or read.

    Args:
        kind: kind of program.
        how: `compile` (compilation fails), `load` (loading from bytes fails), `before` (the call raises before it
            takes its donated arguments), `after` (the call raises after it took them), `poison` (the program fails
            while it runs: its results and all values computed from them are unreadable), `unread` (the results arrive,
            but the next copy to the host fails).
        number: failing call or compilation of the kind, counted from 1. 0 means none.

    Attributes:
        calls: number of calls, by kind of program.
        happened: whether the fault has happened.
    """

    def __init__(self, kind: str = "", how: str = "", number: int = 0):
        self.kind, self.how, self.number = kind, how, number
        self.calls: Counter[str] = Counter()
        self.happened = False
        self._compiled = 0
        self._fail_read = False

    @contextmanager
    def injected(self, llm: LLM) -> Iterator["Faults"]:
        """Inject the fault during the block. For `compile` and `load`, drop the programs of the kind first."""
        if self.how in ("compile", "load"):
            in_dispatcher(llm, drop_programs, engine_of(llm), self.kind)
        get, compile_program, read = Executables.get, compiling.compile_program, ResultReader.read
        load, when_ready = PortableProgram.load, ResultReader.when_ready

        def faulty_get(executables: Executables, request: ProgramSpec) -> Any:
            return _Program(get(executables, request), request, self)

        def faulty_compile(request: ProgramSpec, portable: PortableProgram | None = None) -> Any:
            if request.kind == self.kind and self.how in ("compile", "load"):
                self._compiled += 1
                if self.how == "compile" and self._compiled == self.number:
                    self.happened = True
                    raise jax.errors.JaxRuntimeError(NO_MEMORY)
                loading.kind = request.kind
            try:
                return compile_program(request, portable)
            finally:
                loading.kind = None

        def faulty_load(program: PortableProgram, devices: Any) -> Any:
            if self.how == "load" and getattr(loading, "kind", None) == self.kind and not self.happened:
                self.happened = True
                raise OSError("injected")
            return load(program, devices)

        def faulty_read(
            reader: ResultReader, array: jax.Array, result: "Future[np.ndarray] | None" = None
        ) -> "Future[np.ndarray]":
            return self._unread(result) or read(reader, array, result)

        def faulty_when_ready(reader: ResultReader, arrays: list[jax.Array]) -> "Future[Any]":
            return self._unread() or when_ready(reader, arrays)

        loading = threading.local()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Executables, "get", faulty_get)
            patch.setattr(compiling, "compile_program", faulty_compile)
            patch.setattr(PortableProgram, "load", faulty_load)
            patch.setattr(ResultReader, "read", faulty_read)
            patch.setattr(ResultReader, "when_ready", faulty_when_ready)
            yield self

    def _unread(self, failed: "Future[Any] | None" = None) -> "Future[Any] | None":
        if not self._fail_read:
            return None
        self._fail_read = False
        failed = failed or Future()
        failed.set_exception(jax.errors.JaxRuntimeError(NO_MEMORY))
        return failed

    def call(self, program: jax.stages.Compiled, request: ProgramSpec, arguments: tuple[Any, ...]) -> Any:
        """Call a program. The chosen call fails."""
        self.calls[request.kind] += 1
        if self.how in ("compile", "load") or request.kind != self.kind or self.calls[self.kind] != self.number:
            return program(*arguments)
        self.happened = True
        if self.how == "before":
            raise jax.errors.JaxRuntimeError(NO_MEMORY)
        results = program(*arguments)
        if self.how == "after":
            for index in DONATED.get(self.kind, ()):
                for array in jax.tree.leaves(arguments[index]):
                    assert array.is_deleted(), "donated"
            raise jax.errors.JaxRuntimeError(NO_MEMORY)
        if self.how == "unread":
            self._fail_read = True
            return results
        return jax.tree.map(poisoned, results)


@dataclass(frozen=True)
class _Program:
    program: jax.stages.Compiled
    request: ProgramSpec
    faults: Faults

    def __call__(self, *arguments: Any) -> Any:
        return self.faults.call(self.program, self.request, arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)


def drop_programs(engine: Engine, kind: str) -> None:
    """Drop the programs of a kind. Their next use loads them again."""
    programs = engine.cluster.executables._store._programs
    for key in [key for key, executable in programs.items() if executable.spec.kind == kind]:
        del programs[key]


def poisoned(array: jax.Array) -> jax.Array:
    """Return a copy of an array. Reading the copy, or values computed from it, raises as after a failed program."""
    shards = [shard.data + _failing(shard.device).astype(array.dtype) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _failing(device: jax.Device) -> jax.Array:
    """Return the result of a program that fails while it runs.

    On CPU, the call itself raises if its argument is ready. So the argument takes a while to compute.
    """
    for _ in range(20):
        try:
            return _fail(_take_long(jax.device_put(np.ones((768, 768), np.float32), device)))
        except jax.errors.JaxRuntimeError:
            pass
    raise AssertionError("the argument was always there at once")


@jax.jit
def _take_long(matrix: jax.Array) -> jax.Array:
    return (matrix @ matrix)[0, 0]


@jax.jit
def _fail(number: jax.Array) -> jax.Array:
    def fail(_: Any) -> Any:
        raise RuntimeError(NO_MEMORY)

    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), number)


def only_fault(call: Callable[..., Any], number: int, error: Exception) -> tuple[Callable[..., Any], list[int]]:
    """Return `call`, wrapped to fail at call `number` (from 1, never if 0), and the number of calls so far."""
    count = [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            raise error
        return call(*arguments, **options)

    return wrapped, count
