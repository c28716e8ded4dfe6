"""The compile cache survives what happens to directories: damage, full disks, other processes, other versions."""

import json
import logging
import os
import pickle
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from filelock import FileLock
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from amoeba_jax.compile_cache import cache_bytes, enable_compile_cache, tidy
from amoeba_jax.cpu_cache import PortableProgram
from amoeba_jax.cpu_cache.program_cache import CacheEntry, _min_compile_time, without_jax_cache_writes
from amoeba_jax.errors import ConfigError

# A process that compiles three small programs and prints the number of cached programs.
SCRIPT = """
import json, os, sys, warnings
{before}
import jax
import jax.numpy as jnp
from amoeba_jax.compile_cache import enable_compile_cache
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
enable_compile_cache(sys.argv[1], sys.argv[2])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for number in range(3):
        argument = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        program = jax.jit(lambda x: jnp.tanh(x @ x + number)).lower(argument).compile()
        program(jnp.full((16, 16), 0.5))
cached = len(hits)
print(json.dumps({{"hits": cached, "warnings": [str(w.message) for w in said]}}))
"""
TIMEOUT_S = 120
LIMIT = 1 << 30


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def start(directory: Path, *, size: str = "1GiB", before: str = "") -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", SCRIPT.format(before=before), str(directory), size]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the result of a process, and its log."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return json.loads(out) | {"log": err}


def age(directory: Path) -> None:
    """Make all files an hour older, because `tidy` does not check files of the last 10 seconds."""
    for path in directory.iterdir():
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*-cache"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache filled by one process."""
    path = tmp_path_factory.mktemp("filled") / "cache"
    assert result(start(path))["hits"] == 0
    assert path.stat().st_mode & 0o777 == 0o700
    return path


def copy_of(filled: Path, directory: Path) -> Path:
    for path in filled.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.mark.slow
def test_damaged_files_are_compiled_again(filled: Path, directory: Path):
    copy_of(filled, directory)
    count = len(entries(directory))
    first, second = entries(directory)[:2]
    first.write_bytes(first.read_bytes()[:-40])
    second.write_bytes(b"")
    assert tidy(directory, LIMIT) == []
    age(directory)
    found = result(start(directory))
    assert "is damaged. It is removed" in found["log"]
    assert found["warnings"] == []
    assert len(entries(directory)) == count
    assert result(start(directory))["hits"] >= 3
    assert tidy(directory, LIMIT) == []


@pytest.mark.slow
def test_two_processes_at_once_share_it(directory: Path):
    both = [result(process) for process in [start(directory), start(directory)]]
    assert [found["warnings"] for found in both] == [[], []]
    assert tidy(directory, LIMIT) == []
    assert result(start(directory))["hits"] >= 3


@pytest.mark.slow
def test_another_directory_takes_the_place_of_the_first(directory: Path, tmp_path: Path):
    first = tmp_path / "first"
    before = f"""
import jax
from amoeba_jax.compile_cache import enable_compile_cache
enable_compile_cache({str(first)!r}, "1GiB")
jax.jit(lambda x: x + 1)(1.0)
"""
    result(start(directory, before=before))
    assert entries(first)
    assert len(entries(directory)) >= 3
    assert result(start(directory))["hits"] >= 3


@pytest.mark.slow
def test_full_disk_stops_nothing_and_leaves_nothing_damaged(filled: Path, directory: Path):
    """Files cannot grow beyond 64 bytes, so every program is truncated, as on a full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)); sys.dont_write_bytecode = True"
    found = result(start(directory, before=limit))
    assert found["hits"] == 0
    assert any("Error writing persistent compilation cache" in message for message in found["warnings"])
    assert entries(directory), "the test wants files that were cut short"
    age(directory)
    found = result(start(directory))
    assert found["hits"] == 0
    assert found["warnings"] == []
    assert len(entries(directory)) == len(entries(filled))


def test_directory_that_cannot_be_written_is_read(filled: Path, directory: Path):
    copy_of(filled, directory)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    entries(directory)[0].unlink()
    del before[min(name for name in before if name.endswith("-cache"))]
    # For root no directory is read-only.
    found = result(start(directory, before="os.access = lambda path, mode, **_: mode != os.W_OK"))
    assert "cannot be written" in found["log"]
    assert found["warnings"] == []
    assert found["hits"] >= 2
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


@pytest.mark.slow
def test_programs_of_another_jax_version_are_not_used(filled: Path, directory: Path):
    copy_of(filled, directory)
    other = "import jax._src.cache_key as key; key.jaxlib_version_str = '0.0.1'"
    found = result(start(directory, before=other))
    assert found["hits"] == 0
    assert found["warnings"] == []
    assert len(entries(directory)) == 2 * len(entries(filled))
    assert result(start(directory))["hits"] >= 3


def test_programs_that_were_not_used_for_longest_go_first(directory: Path):
    whole = zlib.compress(b"a program")
    for number in range(5):
        path = directory / f"{number}-cache"
        path.write_bytes(whole)
        os.utime(path, (time.time() - 100 * number,) * 2)
    os.utime(directory / "4-cache", (time.time() + 1, 1))  # written first, and read last
    assert tidy(directory, 2 * len(whole)) == []
    assert [path.name for path in entries(directory)] == ["0-cache", "4-cache"]
    assert tidy(directory, 0) == []
    assert entries(directory) == []


@pytest.mark.slow
def test_the_limit_holds_when_a_process_starts(filled: Path, directory: Path):
    copy_of(filled, directory)
    limit = cache_bytes(directory)
    (directory / "old-cache").write_bytes(zlib.compress(os.urandom(limit // 4)))
    os.utime(directory / "old-cache", (1, 1))
    found = result(start(directory, size=str(limit)))
    assert found["warnings"] == []
    assert found["hits"] >= 3
    assert cache_bytes(directory) <= limit
    assert not (directory / "old-cache").exists()


def test_files_are_read_once(directory: Path, monkeypatch: pytest.MonkeyPatch):
    whole = zlib.compress(b"a program" * 100)
    for name in ("a", "b"):
        (directory / f"{name}-cache").write_bytes(whole)
    age(directory)
    assert tidy(directory, LIMIT) == []
    (directory / "b-cache").write_bytes(whole[:-3])
    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), read_bytes(path))[1])
    assert tidy(directory, LIMIT) == []
    assert read == []
    os.utime(directory / "b-cache", (1, 1))
    assert tidy(directory, LIMIT) == ["b-cache"]
    assert read == ["b-cache"]
    assert [path.name for path in entries(directory)] == ["a-cache"]


def test_cache_in_use_is_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("amoeba_jax.compile_cache._LOCK_TIMEOUT_S", 0.05)
    (directory / "a-cache").write_bytes(b"damaged")
    age(directory)
    with FileLock(directory / ".amoeba-lock"), caplog.at_level(logging.WARNING):
        assert tidy(directory, LIMIT) == []
    assert "in use by another process" in caplog.text
    assert tidy(directory, LIMIT) == ["a-cache"]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_directory_that_others_can_write_is_refused(directory: Path, mode: int):
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="writable by other users: chmod 700"):
        enable_compile_cache(str(directory), "1GiB")


def test_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if directory.stat().st_uid == 0:
        os.chown(directory, 4321, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        enable_compile_cache(str(directory), "1GiB")


@pytest.fixture
def of_jax(directory: Path) -> Iterator[Path]:
    """Make the directory JAX's own cache directory, as set by the user."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(directory))
    reset_cache()
    yield directory
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def open_to_all(directory: Path, _: pytest.MonkeyPatch) -> None:
    directory.chmod(0o777)


def of_another_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if directory.stat().st_uid == 0:
        os.chown(directory, 4321, -1)


@pytest.mark.parametrize(("changed", "mode"), [(open_to_all, "777"), (of_another_user, "700")])
def test_no_program_is_loaded_from_a_directory_of_jax_that_others_can_write(
    of_jax: Path,
    changed: Callable[[Path, pytest.MonkeyPatch], None],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """No program is stored there either, but JAX still uses the directory."""
    entry, program = CacheEntry("model", "program", jax.devices()[0]), PortableProgram(b"code", ((), ()))
    monkeypatch.setattr(pickle, "loads", unpickle := Mock(wraps=pickle.loads))
    entry.write(program)
    assert entry.find() == program
    assert unpickle.called
    unpickle.reset_mock()
    with without_jax_cache_writes():
        assert _min_compile_time().value > 1e6
    changed(of_jax, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache(None, "1GiB") == of_jax
        assert entry.find() is None
        (path,) = entries(of_jax)
        path.unlink()
        entry.write(program)
    assert not unpickle.called
    assert not entries(of_jax)
    assert caplog.text.count(f"{of_jax} (mode {mode})") == 1
    with without_jax_cache_writes():
        assert _min_compile_time().value < 1e6


def test_size_that_is_none_is_refused(directory: Path):
    with pytest.raises(ConfigError, match="compile_cache_size='large'"):
        enable_compile_cache(str(directory), "large")
