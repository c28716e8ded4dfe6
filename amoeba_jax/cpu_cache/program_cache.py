"""Disk cache of compiled programs, for CPU.

One entry serves all groups with the same number of devices. A program is found without tracing.

Entries are files in JAX's format, in the directory of JAX's persistent compilation cache. `enable_compile_cache` limits
their size, and removes damaged entries.

The key covers all inputs of a compilation: the shapes of the program, the sizes of the model, the source of this
project, versions, settings, and the kind of processor. The key does not cover functions that are patched at run time.
Turn the cache off (`compile_cache=""`) before you patch a function.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from amoeba_jax.compile_cache import may_hold_programs
from amoeba_jax.cpu_cache.relocation import PortableProgram, can_relocate

logger = logging.getLogger(__name__)

_FORMAT = 1
_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("amoeba_jax", "kvcache", "pallas_kernels", "sharding")
# Parts of the names of JAX settings that programs do not depend on.
_IGNORED_SETTINGS = (
    "cache",
    "num_cpu_devices",
    "log",
    "profiler",
    "traceback",
    "distributed",
    "platforms",
    "explain",
    "check_",
)
_NEVER_S = 1e9


def _hash_source() -> str:
    digest = hashlib.sha256()
    for package in _SOURCES:
        for file in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(_ROOT)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


# Computed at import, because the files may be edited while the process runs.
_SOURCE_HASH = _hash_source()


@dataclass(frozen=True)
class CacheEntry:
    """Entry of one program in the disk cache. The entry may not exist on disk yet.

    Attributes:
        model: sizes of the model.
        program: all other properties of the program that are part of its key.
        device: any device that runs the program.
    """

    model: str
    program: str
    device: jax.Device

    @classmethod
    def of(cls, model: str, program: str, devices: Sequence[jax.Device]) -> "CacheEntry | None":
        """Return the entry of a program, or None if the program cannot be cached.

        A program cannot be cached if `model` is empty, if the devices are not CPUs, or if programs cannot be written as
        bytes (`can_relocate` returns False).
        """
        if not model or devices[0].platform != "cpu" or not can_relocate():
            return None
        return cls(model, program, devices[0])

    @functools.cached_property
    def key(self) -> str:
        """Key in the cache: a hash of the model, the program, JAX's settings and the environment."""
        settings = [
            f"{name}={value}"
            for name, value in sorted(jax.config.values.items())
            if not any(part in name for part in _IGNORED_SETTINGS)
        ]
        parts = (_environment(), self.device.device_kind, *settings, self.model, self.program)
        return f"amoeba_program-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"

    def find(self) -> PortableProgram | None:
        """Return the program, or None if the cache does not have it. A damaged entry is removed with a warning."""
        if (cache := _cache(self.device)) is None:
            return None
        try:
            data = cache.get(self.key)
            if data is None:
                return None
            program = pickle.loads(_jax_cache().decompress_executable(data))
            if isinstance(program, PortableProgram):
                return program
            raise ValueError("not a program")
        except Exception as error:
            logger.warning("%s in the compile cache cannot be read (%s). It is compiled again", self.key, error)
            self.remove()
            return None

    def write(self, program: PortableProgram) -> None:
        """Write the program to the cache, if there is a cache. If writing fails, log a warning."""
        cache = _cache(self.device)
        if cache is None or jax.config.values["jax_persistent_cache_min_compile_time_secs"] >= _NEVER_S:
            return
        try:
            cache.put(self.key, _jax_cache().compress_executable(pickle.dumps(program)))
        except Exception as error:
            logger.warning("the compile cache cannot be written (%s). The next process compiles again", error)

    def remove(self) -> None:
        """Remove the entry from the cache directory, if it exists."""
        directory = jax.config.values["jax_compilation_cache_dir"]
        if directory:
            with contextlib.suppress(OSError):
                (Path(directory) / f"{self.key}-cache").unlink(missing_ok=True)


@contextlib.contextmanager
def without_jax_cache_writes() -> Iterator[None]:
    """Stop this thread from writing to JAX's persistent cache, inside this context.

    `CacheEntry.write` stores programs in the same directory. Without this context, JAX would store a second copy.
    """
    setting, directory = _min_compile_time(), jax.config.values["jax_compilation_cache_dir"]
    if setting is None or not directory or not may_hold_programs(directory):
        yield
        return
    with setting(_NEVER_S):
        yield


@functools.cache
def _min_compile_time() -> Any:
    """Return JAX's setting for the minimum compile time of cached programs, or None if JAX lacks the setting.

    `with setting(seconds):` changes the setting in this thread.
    """
    try:
        from jax._src.config import persistent_cache_min_compile_time_secs
    except ImportError:
        return None
    return persistent_cache_min_compile_time_secs


@functools.cache
def _jax_cache() -> Any:
    from jax._src import compilation_cache

    return compilation_cache


def _cache(device: jax.Device) -> Any:
    """Return the object of JAX that reads and writes the cache directory.

    Return None if there is no cache, if other users can write to the directory, or if the device is not a CPU.
    """
    directory = jax.config.values["jax_compilation_cache_dir"]
    if device.platform != "cpu" or not directory or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    try:
        cache = _jax_cache()._get_cache(device.client)  # creates the directory
    except (ImportError, AttributeError):
        return None
    return cache if may_hold_programs(directory) else None


@functools.cache
def _environment() -> str:
    """Return the parts of a key that are the same for all programs of this process."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax")]
    flags = [f"{name}={os.environ.get(name)}" for name in ("XLA_FLAGS", "JAX_PALLAS_INTERPRET")]
    return "\n".join([f"format {_FORMAT}", *versions, *flags, platform.python_version(), _processor(), _SOURCE_HASH])


def _processor() -> str:
    """Return the model and the instruction sets of the CPU."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"
