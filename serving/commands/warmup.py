"""`amoeba warmup`: compile all programs of a server before it starts. Loads no weights."""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from amoeba_jax import EngineConfig
from amoeba_jax.checkpoint.resolve import resolve_model
from amoeba_jax.compile_cache import cache_bytes, enable_compile_cache, reading_only
from amoeba_jax.errors import ConfigError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.platform import resolve_dtype, serving_devices
from amoeba_jax.programs.background import compile_jobs, compile_programs
from amoeba_jax.programs.enumeration import enumerate_programs, kept_weights
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.memory import DeviceTooSmallError
from amoeba_jax.programs.plan import EnginePlan, segment_layers
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.views import ExecutableInfo
from amoeba_jax.weights.layout import WeightLayout
from serving.commands.warmup_report import layouts, print_layouts, print_plan, print_requests, weight_padding

EXIT_WOULD_COMPILE = 1
# Compiled programs are in reference cycles and occupy memory mappings until they are collected.
_COLLECT_EVERY = 32


def run_warmup(
    config: EngineConfig,
    degrees: list[int] | None,
    *,
    platform: str | None,
    dry_run: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Compile all programs of a server, or print them. Return the exit code.

    Raises `ConfigError` for invalid settings, and `MemoryBudgetError` if the model does not fit the devices. In a dry
    run, the model may be too large.

    Args:
        config: settings of the server.
        degrees: tensor-parallel degrees to compile for. None: all degrees.
        platform: platform of the server. None: the platform of this machine.
        dry_run: whether to compile nothing, and only print programs and memory.
        check: whether to compile nothing, and only look for missing programs. The exit code is 1 if a program is
            missing.
        as_json: whether to print JSON instead of tables.
    """
    devices = serving_devices(config.num_devices)
    here = devices[0].platform
    if platform is not None and platform != here and not dry_run:
        raise ConfigError(
            f"platform={platform!r}: a compile cache for it cannot be made on this machine, which has {here} devices. "
            "XLA compiles only for present devices. Run amoeba warmup on a machine like the server's, or use --dry-run"
        )
    plan, short_bytes = _plan(config, devices, platform or here, dry_run)
    wanted = degrees or list(plan.sub_meshes.degrees())
    for tp in wanted:
        plan.sub_meshes.check_degree(tp)
    executables, in_order = Executables(plan.dims), tuple(sorted(set(wanted)))
    requests = enumerate_programs(plan, executables, in_order) + kept_weights(plan, executables, in_order)
    if dry_run:
        _print_dry_run(config, plan, short_bytes, requests, as_json)
        return 0
    directory = enable_compile_cache(config.compile_cache, config.compile_cache_size)
    if directory is None:
        raise ConfigError("compile_cache='' keeps no programs. Set a directory")
    infos: list[ExecutableInfo] = []
    missing = None
    with reading_only() if check else nullcontext(), _bar(len(requests), check, not as_json) as advance:
        for executable in compile_programs(requests, compile_jobs(config.compile_jobs)):
            infos.append(executable.info)
            advance()
            if check and not executable.info.cached:
                missing = infos[-1].name
                break
            del executable
            if len(infos) % _COLLECT_EVERY == 0:
                gc.collect()
    _print_result(directory, infos, len(requests), missing, as_json)
    return EXIT_WOULD_COMPILE if missing else 0


def _plan(
    config: EngineConfig, devices: tuple[jax.Device, ...], platform: str, dry_run: bool
) -> tuple[EnginePlan, int]:
    """Return the engine's memory plan, and the bytes that each device lacks for the model (0 if the model fits).

    Raises `DeviceTooSmallError` if a device lacks memory, except in a dry run.
    """
    dims = _dims(config, platform)
    config = replace(config, segment_layers=config.segment_layers or segment_layers(platform, dims.config.num_layers))
    weights = WeightLayout(dims)
    if dry_run and platform != devices[0].platform and config.device_memory is None:
        raise ConfigError(f"device_memory must be given for {platform} devices: this machine has none")
    try:
        return EnginePlan(config, dims, devices, weights, platform=platform), 0
    except DeviceTooSmallError as error:
        if not dry_run:
            raise
        enough = replace(config, device_memory=error.needed_bytes, kv_cache_tokens=None)
        plan = EnginePlan(enough, dims, devices, weights, platform=platform)
        return plan, error.needed_bytes - error.budget_bytes


def _dims(config: EngineConfig, platform: str) -> ModelDims:
    """Return the sizes of the model. For a directory of safetensors, read only config.json."""
    kind = resolve_model(config.model, revision=config.revision).kind
    source = ModelSource(replace(config, load_format="random") if kind == "safetensors" else config)
    source.close()
    model = ModelConfig.from_hf(source.hf_config).for_context(config.max_model_len)
    dtype = resolve_dtype(config.dtype, model.dtype, platform)
    return ModelDims(model, config.max_tp, config.page_size, dtype, config.transform_attention)


@contextmanager
def _bar(total: int, check: bool, shown: bool) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not (shown and sys.stderr.isatty())) as bar:
        task = bar.add_task("checking programs" if check else "compiling programs", total=total)
        yield lambda: bar.advance(task)


def _print_result(directory: Path, infos: list[ExecutableInfo], total: int, missing: str | None, as_json: bool) -> None:
    if as_json:
        result = {
            "directory": str(directory),
            "cache_bytes": cache_bytes(directory),
            "total": total,
            "missing": missing,
            "layouts": layouts(infos),
            "programs": [asdict(info) for info in infos],
        }
        print(json.dumps(result, indent=2))
        return
    print_layouts(infos)
    console = Console(highlight=False, soft_wrap=True)
    if missing:
        console.print(f"Missing in the compile cache {directory}: {missing}. The check stopped here.")
    else:
        console.print(f"All {total} programs are in the compile cache {directory}.")


def _print_dry_run(
    config: EngineConfig, plan: EnginePlan, short_bytes: int, requests: list[ProgramSpec], as_json: bool
) -> None:
    if not as_json:
        print_plan(config, plan, short_bytes)
        print_requests(requests)
        return
    result = {
        "model": config.model,
        "num_devices": config.num_devices,
        "dtype": plan.dims.dtype,
        "fits": short_bytes == 0,
        "short_bytes": short_bytes,
        "memory": asdict(plan.memory),
        "weight_padding": weight_padding(plan),
        "capacity_tokens": {tp: plan.capacity_tokens(tp, tp) for tp in plan.sub_meshes.degrees()},
        "max_model_len": plan.max_model_len,
        "total": len(requests),
        "programs": [
            {"name": str(r), "kind": r.kind, "devices": list(r.devices), "in_place_bytes": r.donated_bytes}
            for r in requests
        ],
    }
    print(json.dumps(result, indent=2))
