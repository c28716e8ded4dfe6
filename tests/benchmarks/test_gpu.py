"""`benchmarks/gpu.py`: a tiny run on CPU, its time limits, and its programs lowered for GPUs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import gpu_report
import jax
import jax.numpy as jnp
import pytest
from hopper import Hopper, is_kernel, use_device

from amoeba_jax import EngineConfig
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.experts import grouped_experts
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan, segment_layers
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadKey, StepKey, head_program, step_program
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.weights.layout import WeightLayout
from pallas_kernels.grouped_matmul import unsupported
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.measure import Workload

ROOT = Path(__file__).resolve().parents[2]

# --- a tiny run -----------------------------------------------------------------------------------------------


def run_tiny(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark in another process. Return its output and its JSON."""
    file = folder / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", f"--json={file}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AMOEBA_CACHE_DIR": str(folder)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, json.loads(file.read_text())


@pytest.mark.slow
def test_tiny_run_measures_steps_and_attention(tmp_path: Path):
    printed, report = run_tiny(tmp_path, "--parts=decode,kernels,experts")
    assert list(report["parts"]) == ["kernels", "experts", "decode"]
    assert {part["status"] for part in report["parts"].values()} == {"ok"}
    assert "kernels: ok" in printed
    kernels, experts, steps = (part["rows"] for part in report["parts"].values())
    assert len(kernels) == len(gpu.TINY.decodes) + len(gpu.TINY.chunks)
    assert [row["work"].split(":")[0] for row in experts] == ["loop over all experts", "blocks of used experts"]
    assert len(steps) == len(gpu.TINY.batches) + len(gpu.TINY.prompts)
    for row in kernels + experts:
        assert 0 < row["time_s"] < 1
        assert row["bandwidth_share"] > 0
        assert row["flops_share"] > 0
    for row in steps:
        assert 0 < row["bound_s"] < row["time_s"] < 1
        assert row["work"] in printed


@pytest.mark.slow
def test_tiny_run_measures_every_part(tmp_path: Path):
    printed, report = run_tiny(tmp_path)
    parts = report["parts"]
    assert list(parts) == ["kernels", "experts", "decode", "server", "changes"]
    assert {part["status"] for part in parts.values()} == {"ok"}
    assert all(f"{name}: ok" in printed for name in parts)
    for row in parts["server"]["rows"]:
        assert row["report"]["completed"] > 0
        assert row["report"]["failed"] == 0
        assert row["compiled"] == 0
    rows = parts["changes"]["rows"]
    steps, changes = ([r for r in rows if r["kind"] == kind] for kind in ("steps of the engine", "changes"))
    assert [row["work"].split(",")[1] for row in steps] == [" TP2"]
    merge, split, pause, resume = changes
    assert merge["kv_bytes"] > 0
    assert merge["weight_bytes"] == 0
    assert split["weight_bytes"] > 0
    requests = gpu.TINY.running[0] * 2
    assert (merge["requests"], pause["requests"], resume["requests"]) == (0, requests, requests)
    assert pause["kv_bytes"] == resume["kv_bytes"] == 0
    assert all(0 < row["time_s"] < 60 for row in changes)


def test_without_a_gpu_only_the_tiny_run_starts():
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main([])


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpu.main(["--parts=decode,fast"])
    assert "fast: parts are kernels, experts, decode, server, changes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory_bytes", "layers"), [(105e9, 32), (60e9, 32), (18e9, 28)], ids=["H200", "80 GB", "24 GB"]
)
def test_model_fits_the_memory(memory_bytes: float, layers: int, tmp_path: Path):
    options = gpu.argparse.Namespace(model=None, tiny=False)
    config = json.loads((gpu.choose_model(options, memory_bytes, tmp_path) / "config.json").read_text())
    assert config["num_hidden_layers"] == layers
    settings = {"model": str(tmp_path), "device_memory": int(0.9 * memory_bytes)} | gpu.FULL.engine
    plan = plan_of(config, settings)
    largest = gpu.FULL.batches[-1] // (1 if memory_bytes > 20e9 else 2)
    assert plan.capacity_tokens(1, 1) > largest * (gpu.FULL.prompt + largest // 2 + gpu.FULL.steps)


def test_model_of_8b_has_8b_parameters():
    dims = ModelDims(ModelConfig.from_hf(gpu.LLAMA_8B), 1, 16, "bfloat16")
    # 8,030,261,248 parameters, without the embedding, whose rows are looked up.
    assert gpu.read_elements(dims) == 8_030_261_248 - 128256 * 4096
    work = gpu.decode_work(dims, batch=2, context=100)
    assert work.num_bytes == 2 * (gpu.read_elements(dims) + 200 * 65536)
    assert work.flops == pytest.approx(4 * gpu.read_elements(dims), rel=0.02)


# --- time limits ----------------------------------------------------------------------------------------------

ROW = gpu_report.KernelRow("work", 1e-3, 1e9, 0.5, 1e12, 0.5)


def ends_well() -> Iterator[gpu_report.Row]:
    yield ROW


def fails() -> Iterator[gpu_report.Row]:
    yield ROW
    raise ValueError("no such kernel")


def takes_too_long() -> Iterator[gpu_report.Row]:
    yield ROW
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # a handler of errors must not take the end of the time
            continue


def is_skipped() -> Iterator[gpu_report.Row]:
    raise gpu_report.PartSkipped("it needs two GPUs")
    yield ROW


def test_parts_that_fail_or_take_too_long_leave_the_others_alone(capsys: pytest.CaptureFixture[str]):
    results: dict[str, dict[str, Any]] = {}
    parts = {"slow": takes_too_long, "broken": fails, "absent": is_skipped, "good": ends_well}
    shares = {"slow": 1, "broken": 1, "absent": 1, "good": 97}
    gpu_report.run_parts({n: (parts[n], shares[n]) for n in parts}, 20.0, results.__setitem__)
    assert {name: result["status"] for name, result in results.items()} == {
        "slow": "out of time",
        "broken": "failed",
        "absent": "skipped",
        "good": "ok",
    }
    assert {name: len(result["rows"]) for name, result in results.items()} == {
        "slow": 1, "broken": 1, "absent": 0, "good": 1,
    }  # fmt: skip
    assert results["broken"]["error"] == "ValueError: no such kernel"
    console = gpu.Console(width=140)
    for name, result in results.items():
        gpu_report.show(name, result, console)
    printed = capsys.readouterr().out
    assert "slow: out of time: its 0 s are used" in printed
    assert "absent: skipped: it needs two GPUs" in printed
    assert printed.count("kernels") == 3


# --- programs for GPUs, lowered without a GPU -----------------------------------------------------------------


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, Hopper())


def plan_of(model: dict[str, Any], settings: dict[str, Any]) -> EnginePlan:
    """Return the plan of an engine on GPUs, with CPU devices in their place."""
    config = EngineConfig.from_fields(settings)
    dims = ModelDims(ModelConfig.from_hf(model), config.max_tp, config.page_size, "bfloat16")
    settings = {"segment_layers": segment_layers("gpu", dims.config.num_layers), "overlap_exchange": True} | settings
    devices = tuple(jax.devices()[: config.num_devices])
    return EnginePlan(EngineConfig.from_fields(settings), dims, devices, WeightLayout(dims), platform="gpu")


def lower(plan: EnginePlan, spec: ProgramSpec) -> str:
    """Lower the program of a step or of a head for CUDA, and return it as text."""
    assert spec.plan is not None
    key, group = spec.key, plan.sub_meshes.group(0, len(spec.devices))
    if isinstance(key, HeadKey):
        program = head_program(plan.dims, key)
    else:
        assert isinstance(key, StepKey)
        program = step_program(plan.dims, spec.plan, key)
    return program.lower(group, ("cuda",)).as_text()


WORKLOADS = gpu.workloads(gpu.FULL, ModelConfig.from_hf(gpu.LLAMA_8B))
FEW_WORKLOADS = WORKLOADS[3], WORKLOADS[-1]
"""Decode and prefill. The other workloads lower by the same code."""


@pytest.mark.parametrize(
    "workload", [pytest.param(w, id=w.name, marks=[pytest.mark.slow] * (w not in FEW_WORKLOADS)) for w in WORKLOADS]
)
def test_measured_attention_lowers_for_cuda_as_the_kernel(workload: Workload):
    arguments = jax.eval_shape(partial(workload.make, jnp.bfloat16))
    call = jax.jit(partial(paged_attention, scale=0.1, implementation="mosaic_gpu"))
    assert is_kernel(call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("work", [gpu.FULL.experts[0], gpu.FULL.experts[-1]], ids=lambda work: work.name)
def test_measured_experts_lower_for_cuda_as_grouped_products(work: gpu.ExpertWork):
    shapes = (work.experts, 2 * work.features, work.hidden), (work.experts, work.hidden, work.features)
    assert unsupported(jnp.bfloat16, (shapes[0][1:], shapes[1][1:])) is None
    parameters = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    x = jax.ShapeDtypeStruct((work.hidden, work.tokens), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((work.top_k, work.tokens), kind) for kind in (jnp.int32, jnp.float32))
    call = jax.jit(partial(grouped_experts, activation="silu"))
    text = call.trace(x, ids, weights, parameters).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in text


def check_steps(model: dict[str, Any], degree: int, shapes: slice) -> None:
    """Lower the steps of instances of a degree."""
    settings = gpu.FULL.engine if degree == 1 else gpu.FULL.changing
    devices = {"device_memory": "60GB", "num_devices": degree, "max_tensor_parallel_size": degree}
    plan = plan_of(model, devices | settings)
    executables, group = Executables(plan.dims), plan.sub_meshes.group(0, degree)
    kinds = set()
    for shape in plan.buckets(degree).all()[shapes]:
        for spec in plan.step_specs(executables.specs, group, shape, plan.extent_pages(degree)):
            assert is_kernel(lower(plan, spec)) == (spec.kind == "step"), spec
            kinds.add(spec.kind)
    assert kinds == {"step", "head"}


def test_largest_steps_of_the_model_of_8b_lower_for_cuda():
    """The largest step that only decodes, and the largest step with four prompts."""
    check_steps(gpu.LLAMA_8B, 1, slice(8, 9))
    check_steps(gpu.LLAMA_8B, 1, slice(-4, -3))


@pytest.mark.slow
@pytest.mark.parametrize("model", [gpu.LLAMA_8B, gpu.LLAMA_3B], ids=["8B", "3B"])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_all_steps_lower_for_cuda(model: dict[str, Any], degree: int):
    check_steps(model, degree, slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_steps_of_changes_lower_for_cuda(degree: int, up: bool):
    """Steps of both degrees, with and without an exchange of pages."""
    devices = {"device_memory": "60GB", "num_devices": degree, "max_tensor_parallel_size": degree}
    plan = plan_of(gpu.LLAMA_8B, devices | gpu.FULL.changing)
    executables, group = Executables(plan.dims), plan.sub_meshes.group(0, degree)
    released = (1, degree) if up else (degree, 1)
    programs = TransitionPrograms(plan, executables, group, 1, up=up, released=released, rows=gpu.FULL.running[0])
    specs = {spec.family: spec for spec in programs.step_specs() if isinstance(spec.key, StepKey | HeadKey)}
    exchanges = 0
    for spec in specs.values():
        text = lower(plan, spec)
        assert is_kernel(text) == (spec.kind == "step"), spec
        exchanges += isinstance(spec.key, StepKey) and spec.key.exchange is not None
    assert exchanges
