"""Compiled programs on disk: one entry for all groups of devices of a degree, found without tracing anything.

Entries lie beside JAX's own in the directory of its persistent compilation cache, in JAX's format, so that the same
limit of size, the same lock and the same search for damage hold (see `compile_cache`). A key has all that a program
depends on: what is asked for, the model's sizes, this project's source, versions, settings, and the kind of processor.
Functions that are replaced in a running process are not noticed: to do that, turn the cache off
(`compile_cache=""`).
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from amoeba_jax.compile_cache import may_hold_programs
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.relocation import PortableProgram, is_possible

logger = logging.getLogger(__name__)

_FORMAT = 1
_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("amoeba_jax", "kvcache", "pallas_kernels", "sharding")
# Settings of JAX that programs do not depend on, by a part of their names.
_NO_PART = ("cache", "num_cpu_devices", "log", "profiler", "traceback", "distributed", "platforms", "explain", "check_")
_NEVER_S = 1e9
_lock = threading.Lock()


def _source() -> str:
    """A hash of this project's Python files."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        for file in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(_ROOT)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


# Of the files that this process has just imported: they may be edited while it runs.
_SOURCE = _source()


@dataclass(frozen=True)
class Entry:
    """The place of one program in the cache, on one device's behalf."""

    model: str
    program: str
    device: jax.Device

    @classmethod
    def of(cls, spec: ProgramSpec) -> "Entry | None":
        """The place of what is asked for; None for what belongs to no model, and where JAX keeps programs."""
        if not spec.model or spec.on[0].platform != "cpu" or not is_possible():
            return None
        return cls(spec.model, repr(spec.family), spec.on[0])

    @functools.cached_property
    def key(self) -> str:
        """Return the name in the directory: a hash of all that the entry depends on."""
        settings = [
            f"{name}={value}"
            for name, value in sorted(jax.config.values.items())
            if not any(part in name for part in _NO_PART)
        ]
        parts = (_environment(), self.device.device_kind, *settings, self.model, self.program)
        return f"amoeba_program-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"

    def find(self) -> PortableProgram | None:
        """The program, if there is a cache and it has it. A damaged one is none, with a warning."""
        if (cache := _cache(self.device)) is None:
            return None
        try:
            with _lock:  # JAX's lock of the directory is one of the process
                data = cache.get(self.key)
            if data is None:
                return None
            program = pickle.loads(_formats().decompress_executable(data))
            if isinstance(program, PortableProgram):
                return program
            raise ValueError("it is no program")
        except Exception as error:
            logger.warning("%s in the compile cache cannot be read (%s): it is compiled again", self.key, error)
            self.remove()
            return None

    def keep(self, program: PortableProgram) -> None:
        """Write a program, if there is a cache that is written to. A full disk keeps nothing, with a warning."""
        cache = _cache(self.device)
        if cache is None or jax.config.values["jax_persistent_cache_min_compile_time_secs"] >= _NEVER_S:
            return
        try:
            data = _formats().compress_executable(pickle.dumps(program))
            with _lock:
                cache.put(self.key, data)
        except Exception as error:
            logger.warning("the compile cache cannot be written (%s): programs are compiled again next time", error)

    def remove(self) -> None:
        """Take a damaged program out."""
        directory = jax.config.values["jax_compilation_cache_dir"]
        if directory:
            with contextlib.suppress(OSError):
                (Path(directory) / f"{self.key}-cache").unlink(missing_ok=True)


@contextlib.contextmanager
def unwritten_by_jax() -> Iterator[None]:
    """Where this cache keeps programs, JAX does not keep them besides: for the thread that compiles in here."""
    setting, directory = _min_compile_time(), jax.config.values["jax_compilation_cache_dir"]
    if setting is None or not directory or not may_hold_programs(directory):
        yield
        return
    with setting(_NEVER_S):
        yield


@functools.cache
def _min_compile_time() -> Any:
    """The setting as one that can be another for a thread; None where JAX has none such."""
    try:
        from jax._src.config import persistent_cache_min_compile_time_secs
    except ImportError:
        return None
    return persistent_cache_min_compile_time_secs


@functools.cache
def _formats() -> Any:
    from jax._src import compilation_cache

    return compilation_cache


def _cache(device: jax.Device) -> Any:
    """JAX's cache of files, None where there is none, or not on CPU, or where others can write to it."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    if device.platform != "cpu" or not directory or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    try:
        cache = _formats()._get_cache(device.client)  # makes the directory
    except (ImportError, AttributeError):
        return None
    return cache if may_hold_programs(directory) else None


@functools.cache
def _environment() -> str:
    """What stays the same in a process."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax")]
    flags = [f"{name}={os.environ.get(name)}" for name in ("XLA_FLAGS", "JAX_PALLAS_INTERPRET")]
    return "\n".join([f"format {_FORMAT}", *versions, *flags, platform.python_version(), _processor(), _SOURCE])


def _processor() -> str:
    """Return a CPU's kind and instructions, which machine code depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"
