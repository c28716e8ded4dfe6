"""Directories that are made once on this computer and shared by every process that needs them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_dir
from safetensors import SafetensorError

from amoeba_jax.errors import CheckpointError

MARKER = "amoeba-cache.json"


def cache_root() -> Path:
    """The cache folder: `AMOEBA_CACHE_DIR`, or else the user's own cache folder."""
    return Path(os.environ.get("AMOEBA_CACHE_DIR") or user_cache_dir("amoeba-jax")).expanduser()


def cached_directory(target: Path, version: str, fill: Callable[[Path], None], num_bytes: int) -> Path:
    """Return `target`, first filling it with `fill(folder)` unless a whole copy of this `version` lies there.

    `num_bytes` is about what `fill` writes: that much must be free before the work starts. The folder appears
    in one rename, so a killed process leaves none or a whole one; a file cut afterwards shows in its size.
    Processes that start together take turns, and all but the first find the work done.
    Raises `CheckpointError`, naming the path, where the cache cannot be written.
    """
    if _is_whole(target, version):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            if not _is_whole(target, version):
                _build(target, version, fill, num_bytes)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {target} ({num_bytes / 1e6:.0f} MB): {error}. "
            f"Free some space, or set AMOEBA_CACHE_DIR to a folder that can be written"
        ) from error
    return target


def _build(target: Path, version: str, fill: Callable[[Path], None], num_bytes: int) -> None:
    # Beside the target, as a rename is atomic only within one file system. A killed process may have left it.
    scratch = target.parent / f".{target.name}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    if target.exists():  # damaged, or of another version; processes that have its files open keep them
        shutil.rmtree(target)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise OSError(f"only {free / 1e6:.0f} MB are free there")
    scratch.mkdir()
    try:
        fill(scratch)
        sizes = {path.name: path.stat().st_size for path in scratch.iterdir()}
        (scratch / MARKER).write_text(json.dumps({"version": version, "sizes": sizes}, indent=2))
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _is_whole(target: Path, version: str) -> bool:
    """Whether `target` was filled by this `version` and every file still has its size."""
    try:
        marker = json.loads((target / MARKER).read_text())
        return marker["version"] == version and all(
            (target / name).stat().st_size == size for name, size in marker["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
