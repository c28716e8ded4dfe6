"""Devices and data types: set-up of JAX for serving."""

import contextlib
import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import jax
from jax._src import xla_bridge

from amoeba_jax.errors import ConfigError

# Virtual CPU devices, unless the first engine has more. JAX fixes their number when it starts, and unused devices cost
# nothing.
CPU_DEVICES = 8
# Threads of XLA for each virtual CPU device. A collective blocks one thread for each participant, so fewer threads than
# devices can deadlock.
CPU_THREADS_PER_DEVICE = 2
# Flag of XLA that creates NCCL communicators by splitting existing ones. A process with programs on 2 and on 4 GPUs can
# then hang: some devices of a group wait for a split, and others use an existing communicator (openxla/xla#37063).
NCCL_SPLITTING = "--xla_gpu_enable_nccl_comm_splitting"
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def serving_devices(num_devices: int) -> tuple[jax.Device, ...]:
    """Start JAX and return its first `num_devices` devices. Raises `ConfigError` if JAX has fewer devices.

    With the XLA flag `NCCL_SPLITTING`, programs on several GPUs can hang. If the user has not set the flag, turn it off
    before JAX starts the GPUs. If JAX has already started several GPUs without the user's flag, warn instead.
    """
    num_cpu_devices = max(CPU_DEVICES, num_devices)
    os.environ.setdefault("NPROC", str(CPU_THREADS_PER_DEVICE * num_cpu_devices))
    if not jax_has_started() and cuda_may_start(jax.config.values["jax_platforms"] or ""):
        with contextlib.suppress(OSError, ValueError):
            os.environ["XLA_FLAGS"] = without_nccl_splitting(os.environ)
    if jax.config.values["jax_num_cpu_devices"] < 0:
        # JAX refuses the change if it has started already.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    devices = jax.local_devices()
    if len(devices) < num_devices:
        advice = "ask for fewer"
        if devices[0].platform == "cpu":
            advice = f"set JAX_NUM_CPU_DEVICES={num_devices} in the environment before JAX starts, or {advice}"
        raise ConfigError(
            f"num_devices={num_devices} but JAX has {len(devices)} {devices[0].platform} devices: {advice}"
        )
    if devices[0].platform == "gpu" and len(devices) > 1 and nccl_splitting(os.environ) is None:
        warnings.warn(
            f"JAX has started {len(devices)} GPUs without {NCCL_SPLITTING}=false in XLA_FLAGS: a process with programs "
            "on 2 and on 4 of them may hang. Set it before anything else uses JAX",
            stacklevel=2,
        )
    return tuple(devices[:num_devices])


def jax_has_started() -> bool:
    """Return whether JAX has started its devices. After that, changes of XLA_FLAGS have no effect."""
    return xla_bridge.backends_are_initialized()


def cuda_may_start(platforms: str) -> bool:
    """Return whether a JAX plug-in for NVIDIA GPUs is installed and `platforms` (JAX_PLATFORMS) allows these GPUs.

    If the result is False, do not put GPU flags into XLA_FLAGS: XLA exits if it finds a flag that it does not know.
    """
    wanted = set(platforms.split(",")) - {""}
    return (not wanted or not wanted.isdisjoint({"cuda", "gpu"})) and any(map(find_spec, _CUDA_PLUGINS))


def nccl_splitting(environ: Mapping[str, str]) -> str | None:
    """Return the value of the flag `NCCL_SPLITTING` in XLA_FLAGS, or None if the flag is not set.

    If the flag is set without a value, return "true". If XLA_FLAGS is the name of a file (`is_inline`), read the flags
    from this file. Raises `OSError` if the file cannot be read.
    """
    value = None
    for flag in _xla_flags(environ).split():
        name, _, setting = flag.partition("=")
        if name == NCCL_SPLITTING:
            value = setting or "true"
    return value


def without_nccl_splitting(environ: Mapping[str, str]) -> str:
    """Return XLA_FLAGS. If the flag `NCCL_SPLITTING` is not set, the result also has this flag with the value false.

    If XLA_FLAGS is the name of a file, the flag cannot be added. Raises `ValueError` if the file does not set the flag,
    and `OSError` if the file cannot be read.
    """
    flags = environ.get("XLA_FLAGS", "")
    if nccl_splitting(environ) is not None:
        return flags
    if not is_inline(flags):
        raise ValueError(f"XLA_FLAGS={flags} is a file without {NCCL_SPLITTING}")
    return f"{flags} {NCCL_SPLITTING}=false".strip()


def _xla_flags(environ: Mapping[str, str]) -> str:
    flags = environ.get("XLA_FLAGS", "")
    return flags if is_inline(flags) else Path(flags).read_text()


def is_inline(flags: str) -> bool:
    """Return True if `flags` (XLA_FLAGS) has flags or is empty. Return False if `flags` is the name of a file."""
    return not flags.strip() or flags.strip().startswith("-")


def resolve_dtype(dtype: str, model_dtype: str, platform: str) -> str:
    """Return the data type for an engine. `dtype="auto"` gives float32 on CPU, and `model_dtype` on accelerators.

    Raises `ConfigError` for bfloat16 on CPU if JAX is older than 0.12. XLA would then convert whole buffers of the KV
    cache to float32 in every step.
    """
    if dtype == "auto":
        return "float32" if platform == "cpu" else model_dtype
    if dtype == "bfloat16" and platform == "cpu" and jax.__version_info__ < (0, 12):
        raise ConfigError(
            f"dtype='bfloat16' does not work on CPU with JAX {jax.__version__}, which copies the whole KV cache in "
            "every step: use dtype='float32', or JAX 0.12"
        )
    return dtype
