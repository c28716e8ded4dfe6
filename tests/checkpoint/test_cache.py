import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from amoeba_jax.checkpoint.cache import cache_root, cached_directory
from amoeba_jax.errors import CheckpointError


class Fill:
    """Function that writes one file, and a line in a log for each run."""

    def __init__(self, log: Path, content: str = "content"):
        self.log = log
        self.content = content

    def __call__(self, directory: Path) -> None:
        with self.log.open("a") as file:
            file.write("ran\n")
        (directory / "a.txt").write_text(self.content)

    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def test_fills_once(tmp_path):
    fill = Fill(tmp_path / "log")
    target = tmp_path / "c" / "m"
    for _ in range(3):
        assert cached_directory(target, "1", fill, 100) == target
    assert (target / "a.txt").read_text() == "content"
    assert fill.runs() == 1


def cut(target: Path) -> None:
    (target / "a.txt").write_text("con")


def lose(target: Path) -> None:
    (target / "a.txt").unlink()


def lose_marker(target: Path) -> None:
    (target / "amoeba-cache.json").unlink()


def break_marker(target: Path) -> None:
    (target / "amoeba-cache.json").write_text("[")


def leave_partial(target: Path) -> None:
    """Leave the files of a killed process."""
    lose_marker(target)
    partial = target.parent / f".{target.name}.partial"
    partial.mkdir()
    (partial / "stray.txt").write_text("stray")


@pytest.mark.parametrize("damage", [cut, lose, lose_marker, break_marker, leave_partial])
def test_damage_is_repaired(damage, tmp_path):
    fill = Fill(tmp_path / "log")
    target = cached_directory(tmp_path / "c" / "m", "1", fill, 100)
    damage(target)
    cached_directory(target, "1", fill, 100)
    assert fill.runs() == 2
    assert (target / "a.txt").read_text() == "content"
    assert sorted(path.name for path in target.iterdir()) == ["a.txt", "amoeba-cache.json"]
    assert not list(target.parent.glob("*.partial"))


def test_another_version_is_made_again(tmp_path):
    cached_directory(tmp_path / "m", "1", Fill(tmp_path / "log"), 100)
    cached_directory(tmp_path / "m", "2", Fill(tmp_path / "log", "newer"), 100)
    assert (tmp_path / "m" / "a.txt").read_text() == "newer"


def test_failure_leaves_nothing(tmp_path):
    def fill(directory: Path) -> None:
        (directory / "half.txt").write_text("half")
        raise CheckpointError("bad source")

    with pytest.raises(CheckpointError, match="bad source"):
        cached_directory(tmp_path / "c" / "m", "1", fill, 100)
    assert [path.name for path in (tmp_path / "c").iterdir() if not path.name.endswith(".lock")] == []


def _cache_one(target: Path, log: Path) -> None:
    cached_directory(target, "1", Fill(log), 100)


def test_processes_that_start_together_fill_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "c" / "m", tmp_path / "log")
    processes = [context.Process(target=_cache_one, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert Fill(tmp_path / "log").runs() == 1


def test_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/m .*AMOEBA_CACHE_DIR"):
        cached_directory(tmp_path / "file" / "m", "1", Fill(tmp_path / "log"), 100)


def test_lack_of_space_is_told_before_the_work(tmp_path):
    fill = Fill(tmp_path / "log")
    with pytest.raises(CheckpointError, match=r"cannot write .*/m \(1000000000000 MB\): only \d+ MB are free"):
        cached_directory(tmp_path / "m", "1", fill, 10**18)
    assert fill.runs() == 0


WRITE_TOO_MUCH = """
import resource, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from amoeba_jax.checkpoint.cache import cached_directory
from amoeba_jax.errors import CheckpointError

def fill(directory):
    save_file({"x": np.zeros(1_000_000, np.float32)}, directory / "model.safetensors")

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    cached_directory(Path(sys.argv[1]), "1", fill, 100)
except CheckpointError as error:
    print(error)
"""


def test_failed_write_is_told_and_leaves_nothing(tmp_path):
    # In a separate process, because a process cannot raise its limit on file sizes again.
    target = tmp_path / "c" / "m"
    done = subprocess.run([sys.executable, "-c", WRITE_TOO_MUCH, target], capture_output=True, text=True, check=True)
    assert f"cannot write {target}" in done.stdout
    assert not target.exists()
    assert not list(target.parent.glob("*.partial"))


def test_environment_moves_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cache_root() == tmp_path / "elsewhere"
    monkeypatch.delenv("AMOEBA_CACHE_DIR")
    assert cache_root().name == "amoeba-jax"
