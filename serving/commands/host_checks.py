"""Checks of this machine for `amoeba doctor`: devices, memory, caches and the default model."""

import os
import socket
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

import jax

from amoeba_jax.checkpoint import default_model
from amoeba_jax.checkpoint.cache import cache_root
from amoeba_jax.platform import (
    CPU_DEVICES,
    CPU_THREADS_PER_DEVICE,
    NCCL_SPLITTING,
    cuda_may_start,
    is_inline,
    jax_has_started,
    nccl_splitting,
    serving_devices,
)
from amoeba_jax.programs.memory import DEFAULT_CPU_MEMORY
from serving.commands.finding import Finding
from sharding.ledger import format_bytes, parse_bytes

GRPC_PORT = 50051
# Memory of `amoeba demo` (5.3 GiB measured): 4 virtual devices of 1 GiB, Python, XLA and the programs.
DEMO_BYTES = 11 * 2**29


def _cpu_threads() -> Finding:
    value, threads = os.environ.get("NPROC"), CPU_THREADS_PER_DEVICE * CPU_DEVICES
    if value is None:
        return Finding("CPU threads", "ok", f"NPROC is not set: amoeba sets {threads}, or more for more devices")
    if value.isdigit() and int(value) > CPU_DEVICES:
        return Finding("CPU threads", "ok", f"NPROC={value}")
    advice = f"unset NPROC, or set it to {threads}"
    detail = f"NPROC={value}: programs on several virtual CPU devices may deadlock"
    return Finding("CPU threads", "warn", detail, advice)


def _nccl_splitting() -> Finding:
    name, hang = "NCCL splitting", "a process with programs on 2 and on 4 GPUs may hang"
    if not cuda_may_start(jax.config.values["jax_platforms"] or ""):
        return Finding(name, "ok", "JAX uses no NVIDIA GPUs here")
    try:
        setting = nccl_splitting(os.environ)
    except (OSError, ValueError) as error:
        return Finding(name, "fail", f"XLA cannot read XLA_FLAGS: {error}", "unset XLA_FLAGS, or correct it")
    flags, advice = os.environ.get("XLA_FLAGS", ""), f"set {NCCL_SPLITTING}=false in XLA_FLAGS"
    if setting is not None:
        if setting in ("false", "False", "0"):
            return Finding(name, "ok", f"XLA_FLAGS has {NCCL_SPLITTING}={setting}")
        return Finding(name, "warn", f"XLA_FLAGS has {NCCL_SPLITTING}={setting}: {hang}", advice)
    if not is_inline(flags):
        return Finding(name, "warn", f"{flags} has no {NCCL_SPLITTING}: {hang}", f"add {NCCL_SPLITTING}=false to it")
    if jax_has_started():
        detail = f"JAX has started without {NCCL_SPLITTING}=false: {hang}"
        return Finding(name, "warn", detail, f"{advice} before JAX starts")
    return Finding(name, "ok", f"XLA_FLAGS has no {NCCL_SPLITTING}: amoeba sets it to false")


def _devices() -> Finding:
    try:
        serving_devices(1)  # starts JAX as an engine would
    except Exception as error:  # Drivers and plug-ins raise many types of errors.
        advice = "set JAX_PLATFORMS=cpu to run without the accelerator"
        return Finding("devices", "fail", f"JAX does not start: {error}", advice)
    devices = jax.local_devices()
    first = devices[0]
    if first.platform == "cpu":
        detail = f"{len(devices)} virtual CPU devices, {DEFAULT_CPU_MEMORY} each by default"
        return Finding("devices", "ok", detail)
    stats = first.memory_stats() or {}
    size = format_bytes(stats["bytes_limit"]) if "bytes_limit" in stats else "unknown"
    return Finding("devices", "ok", f"{len(devices)} x {first.device_kind}, memory {size} each")


def _default_model() -> Finding:
    name = f"model {default_model.DEFAULT_MODEL}"
    converted = cache_root() / "models" / default_model.DEFAULT_MODEL
    if (converted / default_model.WEIGHTS).is_file():
        return Finding(name, "ok", f"converted ({format_bytes(_size(converted)[0])}) in {converted}")
    spec = find_spec(default_model.PACKAGE)
    source = Path(spec.origin).parent / default_model.SOURCE if spec and spec.origin else None
    if source is None or not source.is_file():
        return Finding(name, "fail", "its package is not installed", default_model.INSTALL)
    if (size := source.stat().st_size) != default_model.SOURCE_BYTES:
        advice = default_model.INSTALL.replace("--no-deps", "--no-deps --force-reinstall")
        return Finding(name, "fail", f"{source} is damaged: {size} bytes", advice)
    return Finding(name, "ok", "installed, will be converted on first use (seconds)")


def _cache() -> Finding:
    directory = cache_root()
    existing = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    advice = "set AMOEBA_CACHE_DIR to a writable directory"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache", "fail", f"{directory} cannot be written", advice)
    usage = os.statvfs(existing)
    free = usage.f_bavail * usage.f_frsize
    # The default model takes 0.3 GB, its programs some tens of MB.
    if free < 2 * default_model.CONVERTED_BYTES:
        detail = f"{directory}: only {format_bytes(free)} free"
        return Finding("cache", "warn", detail, f"free some space, or {advice}")
    return Finding("cache", "ok", f"{directory}, {format_bytes(free)} free")


def _compile_cache() -> Finding:
    directory = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_root() / "executables")
    if not directory.is_dir():
        return Finding("compile cache", "ok", f"{directory} will be created")
    if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # Whoever can write an executable can run code in this process.
        detail = f"{directory} is writable by other users"
        return Finding("compile cache", "fail", detail, f"chmod 700 {directory}")
    size, files = _size(directory)
    return Finding("compile cache", "ok", f"{directory}: {format_bytes(size)} in {files} files")


def _size(directory: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


def _host_memory() -> Finding:
    free = _free_memory()
    if free is None:
        return Finding("host memory", "warn", f"free memory is unknown on {sys.platform}", "")
    need = parse_bytes(DEFAULT_CPU_MEMORY)
    detail = f"{format_bytes(free)} free; an engine on one CPU device needs {DEFAULT_CPU_MEMORY}"
    if free < need:
        return Finding("host memory", "fail", detail, "close programs, or pass a smaller --device-memory")
    if free < DEMO_BYTES:
        advice = "pass a smaller --num-devices or --device-memory"
        return Finding("host memory", "warn", f"{detail}, the demo {format_bytes(DEMO_BYTES)}", advice)
    return Finding("host memory", "ok", detail)


def _free_memory() -> int | None:
    """Return the free memory of this machine in bytes. None: unknown.

    If the container has less free memory, return the free memory of the container.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def _grpc_port() -> Finding:
    with socket.socket() as probe:
        # Servers set this option too: a port is free as soon as its last connection is closed.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", GRPC_PORT))
        except OSError as error:
            detail = f"port {GRPC_PORT} is not free: {error.strerror}"
            return Finding("gRPC port", "warn", detail, "start a server with another --port")
    return Finding("gRPC port", "ok", f"port {GRPC_PORT} is free")


# Environment variables come first, because the start of JAX sets them.
HOST_CHECKS = (
    _cpu_threads,
    _nccl_splitting,
    _devices,
    _default_model,
    _cache,
    _compile_cache,
    _host_memory,
    _grpc_port,
)
