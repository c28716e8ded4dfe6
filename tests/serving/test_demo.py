"""`amoeba demo`: its report says what was computed."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from amoeba_jax import CompletionOutput, RequestMetrics, RequestOutput
from serving.cli import app
from serving.demo import LayoutRun, agreement

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def num_devices(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def report(num_devices: int, chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one run."""
    arguments = ["demo", "-m", str(chat_model), "--device-memory", "64MiB", "--max-tokens", "6"]
    arguments += ["--num-devices", str(num_devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMOEBA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "120")
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_layout_is_measured_after_its_programs_ran(num_devices: int, report: str):
    layouts = {2: ["2 x TP1", "1 x TP2"], 4: ["4 x TP1", "2 x TP2", "1 x TP4"]}
    assert re.findall(r"^  (\d x TP\d): ready in", report, re.MULTILINE) == layouts[num_devices]
    assert "(compiled)" not in report


def test_layouts_agree_on_every_token(num_devices: int, report: str):
    for tp in (2, 4)[: num_devices // 2]:
        assert f"The answers of TP{tp} are equal to TP1's, token for token (48 of 48 tokens)." in report


def test_answers_are_printed_once(report: str):
    assert report.count("> Describe how bread is made.") == 1


def test_memory_and_padding_are_shown(report: str):
    assert "device memory" in report
    assert "kv cache" in report
    # 3 KV heads are stored as 4 to divide by 2 and by 4.
    assert re.search(r"padding: .*kv cache 1\.33x", " ".join(report.split()))


def test_model_without_chat_template_goes_on_with_stories(text_model: Path):
    flags = ["--num-devices", "1", "--device-memory", "64MiB", "--max-tokens", "3"]
    result = CliRunner().invoke(app, ["demo", "-m", str(text_model), *flags])
    assert result.exit_code == 0, result.output
    assert "> Once upon a time" in result.stdout
    assert "TP2" not in result.stdout


def test_unknown_model_is_said():
    result = CliRunner().invoke(app, ["demo", "-m", "no-such-model"])
    assert result.exit_code == 2
    assert "there is no model" in result.stderr


def layout_run(*answers: tuple[int, ...]) -> LayoutRun:
    outputs = tuple(
        RequestOutput(i, None, (1,), (CompletionOutput("", tokens, "length"),), RequestMetrics(0.0))
        for i, tokens in enumerate(answers)
    )
    return LayoutRun(1, 4, 0.0, 0.0, 0, 0, 0, 1.0, outputs)


def test_agreement_counts_tokens_up_to_the_first_difference():
    reference = layout_run((1, 2, 3), (4, 5, 6))
    assert agreement(reference, layout_run((1, 2, 3), (4, 5, 6))) == (2, 6)
    assert agreement(reference, layout_run((1, 2, 3), (4, 9, 6))) == (1, 4)
    assert agreement(reference, layout_run((9, 2, 3), (9, 5, 6))) == (0, 0)
