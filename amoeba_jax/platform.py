"""Set up JAX for serving: devices and the compilation cache."""

import contextlib
import os
import stat
import warnings
from pathlib import Path

import jax

from amoeba_jax.checkpoint.cache import cache_root
from amoeba_jax.errors import ConfigError

# Virtual CPU devices cost nothing until used, and their number is fixed when JAX starts: take what any engine may ask.
MAX_CPU_DEVICES = 8
# XLA's thread pool on CPU. A collective holds one thread per participant: with fewer threads than virtual devices
# a program that waits for a thread and one that waits for a peer dead-lock.
CPU_THREADS = 16


def serving_devices(num_devices: int) -> tuple[jax.Device, ...]:
    """The first `num_devices` devices, starting JAX if need be. Raises `ConfigError` if there are not enough."""
    os.environ.setdefault("NPROC", str(CPU_THREADS))
    if jax.config.values["jax_num_cpu_devices"] < 0:
        # Refused if JAX has started already, with the devices that it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", MAX_CPU_DEVICES)
    devices = jax.local_devices()
    if len(devices) < num_devices:
        raise ConfigError(
            f"num_devices={num_devices} but JAX has {len(devices)} {devices[0].platform} devices: set "
            f'jax.config.update("jax_num_cpu_devices", {num_devices}) before anything else uses JAX, '
            "or ask for fewer"
        )
    return tuple(devices[:num_devices])


def resolve_dtype(dtype: str, model_dtype: str, platform: str) -> str:
    """What `dtype="auto"` means: the model's own on an accelerator, f32 on CPU.

    Warns about bf16 on CPU before JAX 0.12, where XLA widens whole KV extents to f32 in every step: measured
    38 ms instead of 16 us to write a token into a 32 MiB extent.
    """
    if dtype == "auto":
        return "float32" if platform == "cpu" else model_dtype
    if dtype == "bfloat16" and platform == "cpu" and jax.__version_info__ < (0, 12):
        warnings.warn(
            f"dtype='bfloat16' on CPU copies the KV cache in every step with JAX {jax.__version__}: "
            "use float32, or JAX 0.12",
            stacklevel=3,
        )
    return dtype


def enable_compile_cache(directory: str | None) -> Path | None:
    """Point JAX's persistent compilation cache at a private directory, unless the user has set one.

    Raises `ConfigError` for a directory that others can write to: loading an executable runs its code.
    """
    if directory == "":
        return None
    users_own = jax.config.values["jax_compilation_cache_dir"]
    if directory is None and users_own:
        return Path(users_own)
    path = Path(directory).expanduser() if directory else cache_root() / "executables"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compile_cache={str(path)!r} cannot be created: {error.strerror}") from error
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"compile_cache={str(path)!r} is writable by other users: chmod 700 it or choose another")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
