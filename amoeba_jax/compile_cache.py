"""The directory in which compiled programs are kept for other processes, through JAX's compilation cache.

JAX locks the directory while it reads or writes, and removes what was not used for longest where it grows too large.
What it does not do happens here, when the cache is opened: a file that was cut short (a full disk, a crash) is removed,
since JAX would neither use nor replace it; a file without a time of use gets one, since JAX would write nothing more.
"""

import contextlib
import functools
import json
import logging
import os
import stat
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

# JAX's own names.
_ENTRY, _USED, _LOCK = "-cache", "-atime", ".lockfile"
_CHECKED = ".amoeba-checked.json"
_LOCK_TIMEOUT_S = 10
_NEVER_S = 1e9
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def enable_compile_cache(directory: str | None, max_size: str | int) -> Path | None:
    """Point JAX's persistent compilation cache at a private directory, unless the user has set one: that is JAX's, and
    this project has programs there only if it `may_hold_programs`.

    A directory that cannot be written is read alone, with a warning. The whole process uses the last one that was
    asked for. Returns the directory, or None where there is none.

    Raises `ConfigError` for a directory that others can write to: loading a program runs its code.
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
        tidy(path)
    else:
        logger.warning("the compile cache %s cannot be written: programs that it lacks are compiled every time", path)
    # With a size JAX takes a lock to read too, for which it must be able to write.
    place = {"jax_compilation_cache_dir": str(path), "jax_compilation_cache_max_size": size if writable else -1}
    if any(jax.config.values[name] != value for name, value in place.items()):
        for name, value in place.items():
            jax.config.update(name, value)
        reset_cache()  # JAX would keep to the first directory that it used
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if writable else _NEVER_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own caches lie in the directory, whose path would then be part of every key: none could be moved elsewhere.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return path


@contextlib.contextmanager
def reading_only() -> Iterator[None]:
    """Keep nothing that is compiled in here."""
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
    """Who else could have written to a directory, and what to do about it."""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is writable by other users: chmod 700 it or choose another"
    if status.st_uid not in (os.getuid(), 0):
        return "belongs to another user: choose a directory of your own"
    return None


def may_hold_programs(directory: str) -> bool:
    """Whether programs may be loaded from a directory, which runs their code: not where others can write to it, which
    is logged."""
    if "://" in directory:
        return True  # JAX takes buckets too: who may write there is for their owner to say
    try:
        status = os.stat(directory)
    except OSError:
        return False  # there is none yet
    if (problem := _problem(status)) is None:
        return True
    _say_once(directory, stat.S_IMODE(status.st_mode), problem)
    return False


@functools.cache
def _say_once(directory: str, mode: int, problem: str) -> None:
    logger.warning(
        "JAX's compile cache %s (mode %o) %s. Loading a program runs its code: until then programs of this project are "
        "neither loaded from there nor kept there",
        directory,
        mode,
        problem,
    )


def tidy(path: Path) -> list[str]:
    """Remove files that JAX could not read and mend what would keep it from writing. Returns what was removed.

    Each file is read once; then it is known by its size and time. Skipped while another process is at it.
    """
    try:
        with FileLock(path / _LOCK, timeout=_LOCK_TIMEOUT_S):
            return _tidy(path)
    except Timeout:
        logger.warning("the compile cache %s is in use by another process, and was not looked through", path)
    except OSError as error:
        logger.warning("the compile cache %s could not be looked through: %s", path, error)
    return []


def _tidy(path: Path) -> list[str]:
    checked = _read_checked(path)
    found: dict[str, list[int]] = {}
    removed = []
    for entry in path.glob(f"*{_ENTRY}"):
        status = entry.stat()
        state = [status.st_size, status.st_mtime_ns]
        used = entry.with_name(entry.name.removesuffix(_ENTRY) + _USED)
        if checked.get(entry.name) == state or _is_whole(entry):
            found[entry.name] = state
            if not used.exists() or used.stat().st_size != 8:
                used.write_bytes(status.st_mtime_ns.to_bytes(8, "little"))
            continue
        logger.warning("%s in the compile cache is damaged: it is removed, and its program compiled again", entry.name)
        removed.append(entry.name)
        entry.unlink()
        used.unlink(missing_ok=True)
    for used in path.glob(f"*{_USED}"):
        if used.name.removesuffix(_USED) + _ENTRY not in found:
            used.unlink()
    if found != checked:
        with contextlib.suppress(OSError):  # a full disk: the files are read again next time
            (path / _CHECKED).write_text(json.dumps(found))
    return removed


def _read_checked(path: Path) -> dict[str, list[int]]:
    """Size and time of the files that were found whole."""
    try:
        checked = json.loads((path / _CHECKED).read_text())
    except (OSError, ValueError):
        return {}
    return checked if isinstance(checked, dict) else {}


def _is_whole(entry: Path) -> bool:
    """Whether a file can be decompressed: JAX uses zlib, or Zstandard where there is a module for it."""
    data = entry.read_bytes()
    if data.startswith(_ZSTD_MAGIC):
        try:
            import zstandard  # pyright: ignore[reportMissingImports]
        except ImportError:
            return True  # written by a process that has it; to this one it is no entry of its own
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
    """Bytes of all programs that are kept."""
    return sum(entry.stat().st_size for entry in path.glob(f"*{_ENTRY}"))
