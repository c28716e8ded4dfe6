"""`amoeba demo`: its report says what was computed."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving.cli import app
from serving.commands import demo_run
from serving.commands.demo_report import agreement

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def num_devices(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def report(num_devices: int, chat_model: Path, compile_cache: str) -> str:
    """The report of one run."""
    arguments = ["demo", "-m", str(chat_model), "--device-memory", "64MiB", "--num-devices", str(num_devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMOEBA_CACHE_DIR", str(Path(compile_cache).parent))
        patch.setenv("COLUMNS", "120")
        # Steps of so small a model take less time than threads need to wake up.
        patch.setattr(demo_run, "MARGIN", 64)
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_phase_is_reported(num_devices: int, report: str):
    """How many short requests still run at its end depends on the machine: so small a model is quicker than threads."""
    rows = {
        cells[0]: cells[1:]
        for line in report.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│ ").split("│")]) == 6
    }
    phases = [f"{num_devices} x TP1", "merge", f"TP{num_devices}, long request", "split", f"{num_devices} x TP1 again"]
    assert list(rows) == ["", *phases] or list(rows) == phases
    assert int(rows[phases[0]][1]) > 0
    assert sum(int(rows[phase][1]) for phase in phases) > 0
    running = [int(rows[phase][-1]) for phase in phases]
    assert running == sorted(running, reverse=True)
    assert running[-1] == 0


def test_answers_are_those_of_an_undisturbed_run(num_devices: int, report: str):
    assert f"The short answers: equal to an undisturbed run at {num_devices} x TP1, " in report
    assert f"The long answer: equal to an undisturbed run at TP{num_devices}, 24 of 24 tokens." in report


def test_long_prompt_is_longer_than_a_device(report: str):
    found = re.search(r"The long prompt: (\d+) tokens, and one device holds (\d+)", report)
    assert found is not None
    tokens, capacity = map(int, found.groups())
    assert tokens > 1.4 * capacity


def test_memory_is_shown_as_it_changes(num_devices: int, report: str):
    """At the higher degree weights have become cache, and afterwards they are weights again."""
    maps = {}
    name = ""
    for line in report.splitlines():
        if found := re.match(r"(.{10})device (\d) \[(#*)(k*)(\.*)\]", line):
            name = found[1].strip() or name
            maps[name, int(found[2])] = [len(part) for part in found.groups()[2:]]
    for device in range(num_devices):
        assert maps[f"TP{num_devices}", device][0] < maps["before", device][0]
        assert maps["after", device][0] == maps["before", device][0]
        if ("half way", device) in maps:  # a merge of so few layers may be over before anybody looks
            assert maps["half way", device][0] <= maps["before", device][0]
    for what in ("merge", "split"):
        assert re.search(what + r": 1 layers in \d+ steps, which generated \d+ tokens", report)


def test_answers_are_printed_once(report: str):
    assert report.count("> Describe how bread is made.") == 1


def test_model_without_chat_template_goes_on_with_stories(text_model: Path):
    flags = ["--num-devices", "1", "--device-memory", "64MiB"]
    result = CliRunner().invoke(app, ["demo", "-m", str(text_model), *flags])
    assert result.exit_code == 0, result.output
    assert "> Once upon a time" in result.stdout
    assert "TP2" not in result.stdout


def test_unknown_model_is_said():
    result = CliRunner().invoke(app, ["demo", "-m", "no-such-model"])
    assert result.exit_code == 2
    assert "there is no model" in result.stderr


def test_agreement_counts_tokens_up_to_the_first_difference():
    reference = [(1, 2, 3), (4, 5, 6)]
    assert agreement(reference, [(1, 2, 3), (4, 5, 6)]) == (2, 6)
    assert agreement(reference, [(1, 2, 3), (4, 9, 6)]) == (1, 4)
    assert agreement(reference, [(9, 2, 3), (9, 5, 6)]) == (0, 0)
