"""Compiles one program, or many in threads; or loads them from what was compiled before."""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
from jax import monitoring

from amoeba_jax.host_memory import trim_host_memory
from amoeba_jax.programs import program_cache
from amoeba_jax.programs.background import start_compile_threads
from amoeba_jax.programs.program_specs import ProgramSpec
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

    spec: ProgramSpec
    compiled: jax.stages.Compiled
    info: ExecutableInfo


def compile_program(
    spec: ProgramSpec, source: PortableProgram | None = None
) -> tuple[Executable, PortableProgram | None]:
    """Compile a program, or load it: from `source`, the same program of other devices, or from the compile cache.

    Also returns what it can be loaded from for others. Raises `RuntimeError` where XLA would copy what the program is
    to update in place.
    """
    before, start = _compiled.count, time.perf_counter()
    compiled, relocated = None, source is not None
    entry = program_cache.Entry.of(spec)
    if source is None and entry is not None:
        source = entry.find()
    if source is not None:
        try:
            compiled = source.load(spec.on)
        except Exception as error:
            if relocated:
                give_up(error)
            elif entry is not None:
                logger.warning("program %s cannot be loaded, and is compiled again: %s", spec, error)
                entry.remove()
            source, relocated = None, False
    if compiled is None:
        with contextlib.nullcontext() if entry is None else program_cache.unwritten_by_jax():
            _compiled.latest_is_new = False
            compiled = spec.compile()
        # What XLA has not just compiled it may give no bytes of, or bytes that do not work.
        if entry is not None and _compiled.latest_is_new:
            source = PortableProgram.of(compiled, spec.on)
            if source is not None:
                entry.keep(source)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    aliased = spec.donated_bytes if memory is None else memory.alias_size_in_bytes
    if aliased < spec.donated_bytes:
        raise RuntimeError(
            f"program {spec} would copy what it is to update in place: {aliased} of {spec.donated_bytes} bytes "
            "are aliased"
        )
    info = ExecutableInfo(
        kind=spec.kind,
        name=str(spec),
        devices=spec.devices,
        compile_s=seconds,
        cached=_compiled.count == before,
        relocated=relocated,
        code_bytes=0 if memory is None else memory.generated_code_size_in_bytes,
        temp_bytes=0 if memory is None else memory.temp_size_in_bytes,
        argument_bytes=0 if memory is None else memory.argument_size_in_bytes,
        output_bytes=0 if memory is None else memory.output_size_in_bytes,
        aliased_bytes=aliased,
    )
    return Executable(spec, compiled, info), source


def compile_programs(specs: Iterable[ProgramSpec], jobs: int) -> Iterator[Executable]:
    """Compile programs in `jobs` threads at a time (XLA releases the GIL), yielding each when it is done.

    Those that differ in their devices alone are one thread's, after each other: the first is compiled, and loaded for
    the devices of the others (see `relocation`). Raises the first error, when the programs that other threads were
    compiling are done.
    """
    families: dict[object, list[ProgramSpec]] = {}
    for spec in specs:
        families.setdefault(spec.family, []).append(spec)
    if not families:
        return
    waiting: queue.SimpleQueue[list[ProgramSpec]] = queue.SimpleQueue()
    done: queue.SimpleQueue[Executable | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for family in families.values():
        waiting.put(family)

    def work() -> None:
        try:
            while not stop.is_set():
                source = None
                for spec in sorted(waiting.get(block=False), key=lambda spec: spec.devices):
                    if stop.is_set():
                        break
                    executable, source = compile_program(spec, source)
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


def compile_family(specs: list[ProgramSpec]) -> Iterator[tuple[ProgramSpec, Executable]]:
    """Compile programs of one family in this thread, for a `BackgroundCompiler`."""
    source = None
    for spec in sorted(specs, key=lambda spec: spec.devices):
        executable, source = compile_program(spec, source)
        if next(_background_count) % _TRIM_EVERY == 0:
            trim_host_memory()
        yield spec, executable
