"""Directory of compiled programs, shared by processes through JAX's persistent compilation cache.

`enable_compile_cache` repairs the directory, and limits its size. It removes truncated files (after a crash or on a
full disk), because JAX would neither use nor replace them. If the directory exceeds its limit, it removes the files
that were not used for longest.

JAX's own limit is off. With that limit, every write reads the time stamp of every file in the directory under a lock.
This takes 80 ms with 2,000 files.
"""

import contextlib
import functools
import json
import logging
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
from filelock import FileLock, Timeout
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from amoeba_jax.checkpoint.cache import cache_root
from amoeba_jax.errors import ConfigError, MemoryBudgetError
from sharding.ledger import parse_bytes

logger = logging.getLogger(__name__)

# Ending of the names of JAX's program files.
_ENTRY = "-cache"
_CHECKED, _LOCK = ".amoeba-checked.json", ".amoeba-lock"
_LOCK_TIMEOUT_S = 10
# Age in seconds from which on a file is checked. Another process may still be writing a younger file.
_WRITTEN_S = 10
_NEVER_S = 1e9
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def enable_compile_cache(directory: str | None, max_size: str | int) -> Path | None:
    """Set the directory of JAX's persistent compilation cache for the whole process, and return it.

    If this process cannot write to the directory, log a warning. Programs are then read from the directory, but not
    stored there.

    Args:
        directory: directory to use. "": change nothing and return None. None: keep the directory that the user has set
            in JAX. If the user has set no directory, use `executables` in the project's cache directory.
        max_size: size limit in bytes, or as text such as "8GiB". Programs that this process compiles may exceed the
            limit until the next process calls this function.

    Raises:
        ConfigError: `max_size` is invalid, or the directory cannot be created or is unsafe (`may_hold_programs`). An
            unsafe directory that the user has set in JAX causes a warning instead.
    """
    try:
        size = parse_bytes(max_size)
    except MemoryBudgetError as error:
        raise ConfigError(f"compile_cache_size={max_size!r}: {error}") from error
    if directory == "":
        return None
    users_own = jax.config.values["jax_compilation_cache_dir"]
    if directory is None and users_own:
        may_hold_programs(users_own)
        return Path(users_own)
    path = Path(directory).expanduser() if directory else cache_root() / "executables"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compile_cache={str(path)!r} cannot be created: {error.strerror}") from error
    _check_owner(path)
    writable = os.access(path, os.W_OK)
    if writable:
        tidy(path, size)
    else:
        logger.warning("the compile cache %s cannot be written. Missing programs are compiled in every process", path)
    place = {"jax_compilation_cache_dir": str(path), "jax_compilation_cache_max_size": -1}
    if any(jax.config.values[name] != value for name, value in place.items()):
        for name, value in place.items():
            jax.config.update(name, value)
        reset_cache()  # otherwise JAX keeps its first directory
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if writable else _NEVER_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own caches would put the path into every key, so that the directory could not be moved.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return path


@contextlib.contextmanager
def reading_only() -> Iterator[None]:
    """Stop this process from writing to the compilation cache, inside this context."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, _NEVER_S)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _check_owner(path: Path) -> None:
    if (problem := _problem(path.stat())) is not None:
        raise ConfigError(f"compile_cache={str(path)!r} {problem}")


def _problem(status: os.stat_result) -> str | None:
    """Return why a directory is unsafe and what to do about it. Return None if the directory is safe."""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is writable by other users: chmod 700 it or choose another directory"
    if status.st_uid not in (os.getuid(), 0):
        return "belongs to another user: choose a directory of your own"
    return None


def may_hold_programs(directory: str) -> bool:
    """Return whether it is safe to load programs from a directory. Loading a program runs its code.

    A directory is unsafe if another user owns it or can write to it. For an unsafe directory, log a warning and return
    False. If the directory does not exist, return False. For the URL of a storage bucket, return True.
    """
    if "://" in directory:
        return True  # a storage bucket, whose owner controls access
    try:
        status = os.stat(directory)
    except OSError:
        return False  # the directory does not exist yet
    if (problem := _problem(status)) is None:
        return True
    _say_once(directory, stat.S_IMODE(status.st_mode), problem)
    return False


@functools.cache
def _say_once(directory: str, mode: int, problem: str) -> None:
    logger.warning(
        "JAX's compile cache %s (mode %o) %s. Loading a program runs its code, so until then this project neither "
        "loads programs from it nor writes programs to it",
        directory,
        mode,
        problem,
    )


def tidy(path: Path, max_bytes: int) -> list[str]:
    """Remove truncated files from a cache directory, and limit the size of the directory.

    If the programs take more than `max_bytes` bytes, remove the programs that were not used for longest. Return the
    names of the truncated files.

    Files that were written in the last 10 seconds are not checked, because another process may still be writing them. A
    file is not read again if its size and modification time are the same as at the last check. If another process locks
    the directory for 10 seconds, or if the directory cannot be changed, log a warning and return an empty list.
    """
    try:
        with FileLock(path / _LOCK, timeout=_LOCK_TIMEOUT_S):
            return _tidy(path, max_bytes)
    except Timeout:
        logger.warning("the compile cache %s is in use by another process and was not checked", path)
    except OSError as error:
        logger.warning("the compile cache %s could not be checked: %s", path, error)
    return []


def _tidy(path: Path, max_bytes: int) -> list[str]:
    checked, now = _read_checked(path), time.time()
    found: dict[str, list[int]] = {}
    by_use: list[tuple[float, int, Path]] = []
    removed = []
    for entry in path.glob(f"*{_ENTRY}"):
        status = entry.stat()
        state = [status.st_size, status.st_mtime_ns]
        if now - status.st_mtime >= _WRITTEN_S:
            if checked.get(entry.name) != state and not _is_whole(entry):
                logger.warning(
                    "%s in the compile cache is damaged. It is removed, and its program is compiled again", entry.name
                )
                removed.append(entry.name)
                entry.unlink()
                continue
            found[entry.name] = state
        by_use.append((max(status.st_atime, status.st_mtime), status.st_size, entry))
    surplus = sum(size for _, size, _ in by_use) - max_bytes
    for _, size, entry in sorted(by_use):
        if surplus <= 0:
            break
        surplus -= size
        found.pop(entry.name, None)
        entry.unlink()
    if found != checked:
        with contextlib.suppress(OSError):  # if the disk is full, the next process reads the files again
            (path / _CHECKED).write_text(json.dumps(found))
    return removed


def _read_checked(path: Path) -> dict[str, list[int]]:
    """Return the size and modification time of each file that was complete at the last check.

    The result maps file names to `[bytes, mtime_ns]`. The result is empty if there was no check yet.
    """
    try:
        checked = json.loads((path / _CHECKED).read_text())
    except (OSError, ValueError):
        return {}
    return checked if isinstance(checked, dict) else {}


def _is_whole(entry: Path) -> bool:
    """Return whether a file of the cache is complete, that is, whether it can be decompressed.

    JAX compresses files with zlib or Zstandard. If Python's module for Zstandard is not installed, a Zstandard file
    counts as complete.
    """
    data = entry.read_bytes()
    if data.startswith(_ZSTD_MAGIC):
        try:
            import zstandard  # pyright: ignore[reportMissingImports]
        except ImportError:
            return True  # this process cannot read it, and JAX ignores it here
        try:
            zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError:
            return False
        return True
    decompressor = zlib.decompressobj()
    try:
        decompressor.decompress(data)
    except zlib.error:
        return False
    return decompressor.eof


def cache_bytes(path: Path) -> int:
    """Return the size of all programs in a cache directory, in bytes."""
    return sum(entry.stat().st_size for entry in path.glob(f"*{_ENTRY}"))
