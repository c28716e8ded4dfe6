"""Set up JAX for serving: devices and the compilation cache."""

import contextlib
import os
import stat
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
    """What `dtype="auto"` means: XLA's CPU matrix products are several times slower in bf16 than in f32."""
    if dtype != "auto":
        return dtype
    return "float32" if platform == "cpu" else model_dtype


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
