"""`amoeba warmup`: it compiles the programs that a server needs, and a dry run lists them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config, write_model
from typer.testing import CliRunner

from amoeba_jax import LLM
from serving.cli import app

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZES = ["--device-memory", "8MiB", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def run(*arguments: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command."""
    result = CliRunner().invoke(app, ["warmup", *arguments])
    return result.exit_code, result.stdout, result.stderr


def config_only(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_server_finds_all_that_the_command_compiled(tmp_path: Path, compile_cache: str, num_devices: int):
    """The command has only the config. The engine also has the weights."""
    # No other model has these vocabulary sizes, so the cache has none of the programs.
    config = tiny_config("qwen3") | {"num_hidden_layers": 1, "vocab_size": {1: 171, 2: 173}[num_devices]}
    where = ["--compile-cache", compile_cache, "--num-devices", str(num_devices), *SIZES]
    bare = config_only(tmp_path / "bare", config)
    code, out, _ = run("-m", bare, *where, "--check", "--json")
    assert code == 1
    assert "TP1[0]" in json.loads(out)["missing"]
    code, out, _ = run("-m", bare, *where, "--json", "--jobs", "2")
    assert code == 0
    found = json.loads(out)
    assert found["missing"] is None
    assert sum(row["programs"] for row in found["layouts"]) == found["total"] == len(found["programs"])
    assert sum(row["misses"] for row in found["layouts"]) > found["total"] // 2
    assert found["cache_bytes"] > 0
    code, out, _ = run("-m", bare, *where, "--check")
    assert (code, f"All {found['total']} programs are in the compile cache" in out) == (0, True)
    model = write_model(config, tmp_path / "whole")
    settings: dict[str, Any] = {"num_devices": num_devices, "device_memory": "8MiB", "max_num_seqs": 1}
    with LLM(model, **settings, max_num_batched_tokens=16, compile_cache=compile_cache, progress=False) as llm:
        assert llm.warmup([1, 2][:num_devices]) == found["total"]
        assert all(info.cached for info in llm.executables())
        assert {info.name for info in llm.executables()} == {program["name"] for program in found["programs"]}


@pytest.mark.slow
def test_dry_run_of_a_large_model_takes_little_memory(tmp_path: Path):
    """The command computes only the sizes of an 80-layer model."""
    model = config_only(tmp_path / "large", LLAMA_70B)
    script = (
        "import re, sys; from serving.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    flags = ["warmup", "-m", model, "--num-devices", "4", "--device-memory", "160GB", "--platform", "cuda"]
    command = [sys.executable, "-c", script, *flags, "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"]
    assert found["dtype"] == "bfloat16"
    memory = found["memory"]
    assert memory["weight_bytes"] > 141e9
    total = sum(memory[name] for name in ("weight_bytes", "activation_bytes", "sampling_bytes", "staging_bytes"))
    total += memory["num_pages"] * memory["page_bytes"] * 80
    assert 0.99 * 160e9 < total <= 160e9
    assert found["capacity_tokens"]["4"] > found["capacity_tokens"]["1"] * 4
    assert 200 < len(found["programs"]) == found["total"] <= 300
    assert int(done.stderr.split()[-1]) < 1 << 20  # KiB


@pytest.mark.slow
def test_dry_run_of_qwen3_30b_has_the_weights_of_the_paper(shared_data: Path):
    """AMOEBA's Table 3 has 56.87 "GB" (GiB) of weights on an H20 with 96 GB.

    The KV cache of a token has 4 heads x 2 x 128 x 2 bytes x 48 layers.
    """
    model = str(shared_data / "configs" / "Qwen3-30B-A3B")
    flags = ["--num-devices", "4", "--device-memory", "96GB", "--platform", "cuda", "--dry-run", "--json"]
    code, out, _ = run("-m", model, *flags)
    found = json.loads(out)
    assert code == 0
    assert round(found["memory"]["weight_bytes"] / 2**30, 2) == 56.87
    assert abs(found["weight_padding"]) < 0.005
    token, released = 4 * 2 * 128 * 2 * 48, 3 * 48 * 3 * 2048 * 768 * 128 * 2
    tokens = {int(tp): count for tp, count in found["capacity_tokens"].items()}
    kv_bytes = found["memory"]["num_pages"] * found["memory"]["page_bytes"] * 48
    assert tokens[1] * token == kv_bytes
    assert tokens[4] * token == 4 * kv_bytes + released  # each device releases three quarters of the experts
    assert 3.1e6 < tokens[4] < 3.2e6


def test_dry_run_names_degrees_of_experts(tmp_path: Path):
    model = config_only(tmp_path / "experts", tiny_config("qwen3-moe"))
    flags = ["--num-devices", "2", "--device-memory", "8MiB", "--dry-run"]
    code, out, _ = run("-m", model, *flags, "--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    assert code == 0
    assert "1 x TP2EP2: " in out
    assert "padding of weights: " in out


def test_dry_run_says_what_is_missing(tmp_path: Path):
    model = config_only(tmp_path / "large", LLAMA_70B)
    flags = ["--num-devices", "4", "--device-memory", "96GB", "--platform", "cuda", "--dry-run"]
    code, out, _ = run("-m", model, *flags)
    assert code == 0
    assert "It does not fit: 43" in out
    assert "programs in all" in out
    code, out, _ = run("-m", model, *flags, "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (0, False)
    assert found["short_bytes"] > 43e9


def test_model_that_does_not_fit_is_not_warmed_up(tmp_path: Path, compile_cache: str):
    model = config_only(tmp_path / "tiny", tiny_config("llama2"))
    code, _, error = run("-m", model, "--device-memory", "1MiB", "--compile-cache", compile_cache)
    assert code == 2
    assert "is too small" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--platform", "cuda"], "a compile cache for it cannot be made on this machine"),
        (["--platform", "cuda", "--dry-run"], "device_memory must be given for cuda devices"),
        (["--degree", "4"], "tensor_parallel_size=4 is not supported here"),
        (["--jobs", "0"], "compile_jobs=0 must be a positive integer"),
        (["--compile-cache", ""], "keeps no programs"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, flags: list[str], message: str):
    model = config_only(tmp_path / "tiny", tiny_config("llama2"))
    code, _, error = run("-m", model, "--num-devices", "2", *flags)
    assert code == 2
    assert message in error
