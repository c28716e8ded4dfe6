"""Set up JAX for serving: devices and numbers."""

import contextlib
import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import jax
from jax._src import xla_bridge

from amoeba_jax.errors import ConfigError

# Virtual CPU devices cost nothing until used, and their number is fixed when JAX starts: take what any engine may ask.
MAX_CPU_DEVICES = 8
# XLA's thread pool on CPU. A collective holds one thread per participant: with fewer threads than virtual devices
# a program that waits for a thread and one that waits for a peer dead-lock.
CPU_THREADS = 16
# XLA splits NCCL communicators off those that it has. A process with programs on 2 and on 4 GPUs can then hang: some
# devices of a group take part in a split, and others use a communicator that they have already (openxla/xla#37063).
NCCL_SPLITTING = "--xla_gpu_enable_nccl_comm_splitting"
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def serving_devices(num_devices: int) -> tuple[jax.Device, ...]:
    """The first `num_devices` devices, starting JAX if need be. Raises `ConfigError` if there are not enough.

    Where JAX may start GPUs, it starts with `NCCL_SPLITTING` off in XLA_FLAGS, unless the user has set that flag. Warns
    where there are several GPUs and JAX has started without it.
    """
    os.environ.setdefault("NPROC", str(CPU_THREADS))
    if not jax_has_started() and cuda_may_start(jax.config.values["jax_platforms"] or ""):
        with contextlib.suppress(OSError, ValueError):
            os.environ["XLA_FLAGS"] = without_nccl_splitting(os.environ)
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
    if devices[0].platform == "gpu" and len(devices) > 1 and nccl_splitting(os.environ) is None:
        warnings.warn(
            f"JAX has started {len(devices)} GPUs without {NCCL_SPLITTING}=false in XLA_FLAGS: a process with programs "
            "on 2 and on 4 of them may hang. Set it before anything else uses JAX",
            stacklevel=2,
        )
    return tuple(devices[:num_devices])


def jax_has_started() -> bool:
    """Whether JAX has its devices already, so that what XLA reads when it starts has no effect any more."""
    return xla_bridge.backends_are_initialized()


def cuda_may_start(platforms: str) -> bool:
    """Whether JAX would try to start NVIDIA GPUs: a plug-in is there, and `platforms` (JAX_PLATFORMS) allows it.

    XLA reads all of XLA_FLAGS on every platform, and ends the process for a flag that it does not know. So a flag for
    GPUs is set only where there may be some.
    """
    wanted = set(platforms.split(",")) - {""}
    return (not wanted or not wanted.isdisjoint({"cuda", "gpu"})) and any(map(find_spec, _CUDA_PLUGINS))


def nccl_splitting(environ: Mapping[str, str]) -> str | None:
    """What XLA_FLAGS sets `NCCL_SPLITTING` to ("true" for the flag alone), or None where it does not have it.

    XLA takes XLA_FLAGS for the name of a file with flags unless it begins with a dash. Raises `OSError` where that file
    cannot be read.
    """
    value = None
    for flag in _xla_flags(environ).split():
        name, _, setting = flag.partition("=")
        if name == NCCL_SPLITTING:
            value = setting or "true"
    return value


def without_nccl_splitting(environ: Mapping[str, str]) -> str:
    """XLA_FLAGS with `NCCL_SPLITTING` off, or as it is where it has that flag.

    Raises `ValueError` where XLA_FLAGS is the name of a file without it: nothing can be appended to a name.
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
    """Whether a value of XLA_FLAGS has the flags themselves, and is not the name of a file with them."""
    return not flags.strip() or flags.strip().startswith("-")


def resolve_dtype(dtype: str, model_dtype: str, platform: str) -> str:
    """Return the dtype of weights, cache and activations; "auto" is the model's own on an accelerator, f32 on CPU.

    Raises `ConfigError` for bfloat16 on CPU before JAX 0.12. There XLA widens whole KV extents to f32 in every step: a
    copy of the cache, twice as large as the cache, for which no budget has room, and 38 ms in place of 16 us to write a
    token into an extent of 32 MiB.
    """
    if dtype == "auto":
        return "float32" if platform == "cpu" else model_dtype
    if dtype == "bfloat16" and platform == "cpu" and jax.__version_info__ < (0, 12):
        raise ConfigError(
            f"dtype='bfloat16' does not work on CPU with JAX {jax.__version__}, which copies the whole KV cache in "
            "every step: use dtype='float32', or JAX 0.12"
        )
    return dtype
