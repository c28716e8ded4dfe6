"""Set up JAX for serving: devices and numbers."""

import contextlib
import os
import warnings

import jax

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
