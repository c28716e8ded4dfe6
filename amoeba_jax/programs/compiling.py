"""Compilation of one program."""

import time
from dataclasses import dataclass

import jax

from amoeba_jax.cpu_cache import PortableProgram, compile_or_load
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.views import ExecutableInfo


@dataclass(frozen=True)
class Executable:
    """Compiled program, with its spec and a description for users."""

    spec: ProgramSpec
    compiled: jax.stages.Compiled
    info: ExecutableInfo


def compile_program(
    spec: ProgramSpec, portable: PortableProgram | None = None
) -> tuple[Executable, PortableProgram | None]:
    """Compile a program, or load it from bytes or from the compile cache. Return `(program, bytes)`.

    The bytes serve to load the program on other groups of devices. They are None if the program cannot be stored.

    Args:
        spec: program to compile.
        portable: bytes of the same program for another group of devices, or None.

    Raises `RuntimeError` if XLA would copy a buffer that the program must update in place.
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
