"""`amoeba simulate` as a command."""

import json
from pathlib import Path

import pytest
from shapes import QWEN_32B
from typer.testing import CliRunner

from serving.cli import app
from serving.commands import simulate_run
from serving.simulator.settings import SimulationConfig

CONFIG = {
    "hidden_size": QWEN_32B.hidden_size,
    "intermediate_size": QWEN_32B.ffn_size,
    "num_attention_heads": QWEN_32B.num_heads,
    "num_key_value_heads": QWEN_32B.num_kv_heads,
    "num_hidden_layers": QWEN_32B.num_layers,
    "vocab_size": QWEN_32B.vocab_size,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen2.5-32B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    return result.exit_code, result.output


def test_own_trace_becomes_a_table_json_a_plot_and_reasons(model: Path, tmp_path: Path):
    trace = tmp_path / "mine.csv"
    rows = [f"{n * 0.5},{60_000 if n == 20 else 900},{40}" for n in range(60)]
    trace.write_text("arrival,prompt,output\n" + "\n".join(rows))
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = [
        "-m",
        model,
        "--device",
        "H20",
        "--activation-gb",
        14.3,
        "--trace",
        trace,
        "--policies",
        "amoeba,static-tp1",
    ]
    more = ["--json", out, "--plot", plot, "--explain", "--slo", "ttft:20", "tpot:0.5"]
    code, text = run(*arguments, *more)
    assert code == 0, text
    assert "1 requests fit none of its instances" in text
    found = json.loads(out.read_text())
    assert found["policies"]["amoeba"]["completed"] == 60
    assert found["policies"]["amoeba"]["merges"] == 1
    assert found["policies"]["static-tp1"]["rejected_never_fits"] == 1
    assert found["settings"]["slo"] == {"ttft_s": 20.0, "tpot_s": 0.5, "e2el_s": "inf", "share": 0.99, "classes": {}}
    assert "<svg" in plot.read_text()
    first = out.read_bytes()
    run(*arguments, *more)
    assert out.read_bytes() == first


def test_capacity_questions(model: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    load = ["-m", model, "--device", "H20", "--duration", 20, "--long-per-minute", 0, "--short-per-minute", 600]
    question = ["--policies", "static-tp1", "--slo", "ttft:3", "--json", out]
    code, text = run(*load, *question, "--num-devices", 16, "--find-min-devices")
    assert code == 0, text
    answer = json.loads(out.read_text())["answers"][0]
    assert 1 <= answer["value"] <= 16
    assert run(*load, *question, "--find-max-rate", "--find-min-devices")[0] != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "H900"], "'H900' is unknown"),
        (["--policies", "amoeba,magic"], "policy 'magic' is unknown"),
        (["--slo", "ttft:fast"], "'fast' must be a number of seconds"),
        (["--duration", "-3"], "duration_s=-3.0 must be above 0"),
        (["--num-devices", "4", "--device", "A100-40"], "fits at no degree: at TP4|fits"),
        (["--fail", "x"], "--fail 'x' is invalid"),
        (["--find-max-rate", "--duration", "5"], "needs an objective"),
        (["--json", "/nowhere/out.json"], "must be a file in an existing directory"),
        (["--trace", "none.csv"], "none.csv cannot be read"),
    ],
)
def test_bad_input_is_one_line_that_names_the_value(model: Path, arguments: list[str], message: str):
    if message.startswith("fits"):
        arguments = [*arguments, "--activation-gb", "30"]
    code, text = run("-m", model, "--duration", "5", *arguments)
    assert code != 0
    assert any(part in " ".join(text.split()) for part in message.split("|")), text
    assert "Traceback" not in text


def test_trace_without_a_column_names_it(model: Path, tmp_path: Path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival,prompt\n1,2\n")
    code, text = run("-m", model, "--trace", trace)
    assert code != 0
    assert "no column of output tokens" in " ".join(text.split())


def test_model_that_is_no_config(tmp_path: Path):
    assert "cannot be read" in run("-m", tmp_path / "nothing")[1]
    assert "--model is missing" in run("--duration", 5)[1]


def test_policies_decide_by_the_objectives(model: Path, monkeypatch: pytest.MonkeyPatch):
    configs: list[SimulationConfig] = []
    monkeypatch.setattr(simulate_run, "run_simulation", lambda config, output: configs.append(config))
    for more in ([], ["--slo", "ttft:3", "e2el:60"], ["--slo", "tpot:0.05"]):
        assert run("-m", model, *more)[0] == 0
    seen = [(it.policy_config.ttft_slo_s, it.policy_config.tpot_slo_s) for it in configs]
    assert seen == [(10, 0.1), (3, 0.1), (10, 0.05)]
    assert [(it.flying_config.ttft_slo_s, it.flying_config.tpot_slo_s) for it in configs] == seen


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--merge-to", 3, "merge_to=3 must be a degree, a power of two"),
        ("--linger-s", "nan", "linger_s=nan must be seconds, finite and at least 0"),
        ("--max-pause-s", -5, "max_pause_s=-5.0 must be seconds, finite and at least 0"),
        ("--reserved-growth", 5, "reserved_growth=5.0 must be from 0 to 1"),
        ("--reserved-growth", "nan", "reserved_growth=nan must be from 0 to 1"),
        ("--preemption", "rude", "preemption='rude' must be one of hard, soft, sequential"),
    ],
)
def test_settings_of_policies_are_those_of_a_server(model: Path, flag: str, value: object, message: str):
    code, text = run("-m", model, flag, value)
    assert code == 2
    assert message in " ".join(text.split())
