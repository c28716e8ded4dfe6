"""Directories that are built once on a machine and shared by all processes."""

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
    """Return the cache directory: `AMOEBA_CACHE_DIR`, or the user's cache directory if the variable is not set."""
    return Path(os.environ.get("AMOEBA_CACHE_DIR") or user_cache_dir("amoeba-jax")).expanduser()


def cached_directory(target: Path, version: str, fill: Callable[[Path], None], num_bytes: int) -> Path:
    """Return the directory `target`. If it is missing, incomplete or of another version, build it first.

    Files are written into a temporary directory, which is renamed to `target` when all files are complete. The sizes of
    all files are recorded, so that truncated files are noticed. If several processes call this function at once, one
    process builds the directory, and the others wait.

    Args:
        target: cached directory.
        version: version of the content.
        fill: function that writes the files into a given empty directory.
        num_bytes: approximate size of the files. The disk must have this many free bytes.

    Raises `CheckpointError` if the cache cannot be written.
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
            f"Free some space, or set AMOEBA_CACHE_DIR to a writable directory"
        ) from error
    return target


def _build(target: Path, version: str, fill: Callable[[Path], None], num_bytes: int) -> None:
    # In the same file system as the target, so that the rename is atomic. A killed process may have left it behind.
    scratch = target.parent / f".{target.name}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    if target.exists():  # damaged or of another version; processes keep the files that they have open
        shutil.rmtree(target)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise OSError(f"only {free / 1e6:.0f} MB are free")
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
    try:
        marker = json.loads((target / MARKER).read_text())
        return marker["version"] == version and all(
            (target / name).stat().st_size == size for name, size in marker["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
