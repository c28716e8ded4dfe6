"""`amoeba demo` and its report."""

import re
import urllib.request
import webbrowser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from amoeba_jax import LLM
from serving.cli import app
from serving.commands import demo_run
from serving.commands.demo_report import Check
from serving.commands.demo_view import draw

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def num_devices(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """Return the pages that demos have opened in a browser."""
    return []


@pytest.fixture(scope="module")
def report(num_devices: int, chat_model: Path, compile_cache: str, pages: list[str]) -> str:
    """Return the output of one run."""

    def open_page(url: str) -> None:
        with urllib.request.urlopen(url, timeout=60) as response:
            pages.append(response.read().decode())

    arguments = ["demo", "--open", "-m", str(chat_model), "--device-memory", "64MiB", "--num-devices", str(num_devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMOEBA_CACHE_DIR", str(Path(compile_cache).parent))
        patch.setenv("COLUMNS", "120")
        patch.setattr(webbrowser, "open", open_page)
        # A step of this small model is shorter than the wake-up of a thread.
        patch.setattr(demo_run, "MARGIN", 64)
        patch.setattr(demo_run, "AFTER", 64)
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_phase_is_reported(num_devices: int, report: str):
    """The number of running requests after a phase depends on the machine: steps are faster than threads."""
    rows = {
        cells[0]: cells[1:]
        for line in report.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│ ").split("│")]) == 6
    }
    phases = [f"{num_devices} x TP1", "merge", f"TP{num_devices}", "split", f"{num_devices} x TP1 again"]
    assert list(rows) == phases
    assert int(rows[phases[0]][1]) > 0
    assert sum(int(rows[phase][1]) for phase in phases) > 0
    running = [int(rows[phase][-1]) for phase in phases]
    assert running == sorted(running, reverse=True)
    assert running[-1] == 0


def test_answers_are_those_of_an_undisturbed_run(num_devices: int, report: str):
    text = " ".join(report.split())
    assert f"all {num_devices + 1} answers equal the answers of runs without a merge, token for token." in text


def test_changes_are_told_as_they_happen(num_devices: int, report: str):
    """Stdout is not a terminal, so the demo prints lines instead of a picture."""
    events = re.findall(r"^ *\d+\.\d s  (.*)$", report, re.MULTILINE)
    expected = (
        "live page: http://127.0.0.1:",
        "short requests start",
        "arrives",
        "merged in",
        "first token",
        "split",
        "split in",
        "complete",
    )
    assert len(events) == len(expected)
    assert all(part in event for part, event in zip(expected, events, strict=True)), events


def test_live_page_is_open_while_the_demo_runs(report: str, pages: list[str]):
    assert any("<title>amoeba</title>" in page for page in pages)


def test_long_prompt_is_longer_than_a_device(report: str):
    found = re.search(r"a prompt of (\d+) tokens arrives; one device has room for (\d+)", report)
    assert found is not None
    tokens, capacity = map(int, found.groups())
    assert tokens > 1.4 * capacity


def test_memory_is_shown_as_it_changes(num_devices: int, report: str):
    """At the higher degree, weights become KV cache. After the split, they are weights again."""
    maps = {}
    name = ""
    for line in report.splitlines():
        if found := re.match(r"(.{9})device (\d) (▓*)(█*)(·*) ", line):
            name = found[1].strip() or name
            maps[name, int(found[2])] = [len(part) for part in found.groups()[2:]]
    for device in range(num_devices):
        assert maps[f"TP{num_devices}", device][0] < maps["before", device][0]
        assert maps["after", device][0] == maps["before", device][0]
        if ("half way", device) in maps:  # a merge of few layers may end before the display updates
            assert maps["half way", device][0] <= maps["before", device][0]


def test_changes_are_counted(report: str):
    rows = dict(re.findall(r"│ (\w[^│]*?) *│ *(\S[^│]*?) *│", report))
    assert int(rows["steps of the model meanwhile"]) >= 1
    assert "KV cache moved between devices" in rows
    assert "weights copied back" in rows


def test_answers_are_printed_once(report: str):
    assert report.count("Write three sentences about the") == 1


@pytest.mark.slow
def test_model_without_chat_template_goes_on_with_stories(text_model: Path):
    flags = ["--num-devices", "1", "--device-memory", "64MiB"]
    result = CliRunner().invoke(app, ["demo", "-m", str(text_model), *flags])
    assert result.exit_code == 0, result.output
    assert "Once upon a time" in result.stdout
    assert "TP2" not in result.stdout


def test_unknown_model_is_said():
    result = CliRunner().invoke(app, ["demo", "-m", "no-such-model"])
    assert result.exit_code == 2
    assert "there is no model" in result.stderr


def test_check_counts_tokens_up_to_the_first_difference():
    reference = [(1, 2, 3), (4, 5, 6)]
    assert Check.compare(reference, [(1, 2, 3), (4, 5, 6)]) == Check(2, 2, 6, 6)
    assert Check.compare(reference, [(1, 2, 3), (4, 9, 6)]) == Check(2, 1, 6, 4)
    assert Check.compare(reference, [(9, 2, 3), (9, 5, 6)]) == Check(2, 0, 6, 0)
    assert "1 of 2 answers" in str(Check(2, 1, 6, 4))


@pytest.mark.parametrize("width", [80, 120])
def test_picture_shows_instances_devices_and_requests(width: int, chat_model: Path):
    """Each instance has a box, as wide as its devices."""
    with LLM(str(chat_model), num_devices=2, device_memory="64MiB", progress=False) as llm:
        pictures = []
        for degree in (1, 2):
            llm.set_layout(degree)
            console = Console(width=width, record=True, file=StringIO())
            console.print(draw(llm.instances, llm.memory(), [Request()], llm.config.page_size, width))
            pictures.append(console.export_text())
    single, merged = pictures
    assert single.count("instance TP1") == 2
    assert merged.count("instance TP2") == 1
    for picture in pictures:
        assert "device 0" in picture
        assert "device 1" in picture
        assert "3/12 tokens" in picture
        assert max(map(len, picture.splitlines())) <= width


class Request:
    label = "Why is the sky blue?"
    num_tokens, max_tokens = 3, 12
