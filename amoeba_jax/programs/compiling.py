"""Compilation of one program in this thread, or of many programs in several threads."""

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax

from amoeba_jax.cpu_cache import PortableProgram, compile_or_load
from amoeba_jax.host_memory import trim_host_memory
from amoeba_jax.programs.background import start_compile_threads
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.views import ExecutableInfo

# Otherwise the process keeps the memory that compiling frees: 30 MiB a program, measured with SmolLM2 on CPU.
_TRIM_EVERY = 16
_background_count = itertools.count(1)


@dataclass(frozen=True)
class Executable:
    """A compiled program with its properties."""

    spec: ProgramSpec
    compiled: jax.stages.Compiled
    info: ExecutableInfo


def compile_program(
    spec: ProgramSpec, portable: PortableProgram | None = None
) -> tuple[Executable, PortableProgram | None]:
    """Compile a program, or load it from `portable` or from the compile cache. Return it with its bytes, if any.

    Raises `RuntimeError` if XLA would copy a buffer that the program must update in place.

    Args:
        spec: program to compile.
        portable: bytes of the same program for another group of devices.
    """
    start = time.perf_counter()
    obtained = compile_or_load(spec.compile, spec.on, model=spec.model, program=repr(spec.family), portable=portable)
    seconds, compiled = time.perf_counter() - start, obtained.compiled
    memory = compiled.memory_analysis()
    aliased = spec.donated_bytes if memory is None else memory.alias_size_in_bytes
    if aliased < spec.donated_bytes:
        raise RuntimeError(
            f"program {spec} would copy buffers that it must update in place: only {aliased} of {spec.donated_bytes} "
            "bytes are aliased"
        )
    info = ExecutableInfo(
        kind=spec.kind,
        name=str(spec),
        devices=spec.devices,
        compile_s=seconds,
        cached=obtained.cached,
        relocated=obtained.relocated,
        code_bytes=0 if memory is None else memory.generated_code_size_in_bytes,
        temp_bytes=0 if memory is None else memory.temp_size_in_bytes,
        argument_bytes=0 if memory is None else memory.argument_size_in_bytes,
        output_bytes=0 if memory is None else memory.output_size_in_bytes,
        aliased_bytes=aliased,
    )
    return Executable(spec, compiled, info), obtained.portable


def compile_programs(specs: Iterable[ProgramSpec], jobs: int) -> Iterator[Executable]:
    """Compile programs in `jobs` threads and yield each when it is ready. XLA releases the GIL.

    Programs that differ only in their devices form a family. One thread handles a family: it compiles the first program
    and loads the others from its bytes. After an error, waits for the programs that other threads are compiling, then
    raises the error.
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
                portable = None
                for spec in sorted(waiting.get(block=False), key=lambda spec: spec.devices):
                    if stop.is_set():
                        break
                    executable, portable = compile_program(spec, portable)
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
    """Compile the programs of one family in this thread and yield each when it is ready."""
    portable = None
    for spec in sorted(specs, key=lambda spec: spec.devices):
        executable, portable = compile_program(spec, portable)
        if next(_background_count) % _TRIM_EVERY == 0:
            trim_host_memory()
        yield spec, executable
