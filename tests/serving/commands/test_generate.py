"""`amoeba generate` as a user runs it. Tests of signals and pipes start a separate process."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from amoeba_jax import LLM, EngineConfig, RequestOutput, SamplingParams
from amoeba_jax.outputs import CompletionOutput, RequestMetrics
from serving.cli import app
from serving.commands.generate import stream_to_stdout

pytestmark = pytest.mark.usefixtures("quick_compile")

SMALL = ["--device-memory", "64MiB"]


def run(*arguments: str | Path, stdin: str | None = None):
    return CliRunner().invoke(app, ["generate", *(str(a) for a in arguments)], input=stdin)


def spawn(model: Path, *arguments: str, pipe_bytes: int = -1) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "serving.cli", "generate", "-m", str(model), *SMALL, *arguments]
    # Shells start background jobs with SIGINT ignored, and child processes inherit this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, pipesize=pipe_bytes)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def expected(chat_model: Path, compile_cache: str) -> dict[str, str]:
    """Return twelve greedy tokens after "hello" from the Python API, with and without the chat template."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(chat_model, device_memory="64MiB", progress=False, compile_cache=compile_cache) as llm:
        plain = llm.generate("hello", params)[0].outputs[0].text
        chat = llm.chat([{"role": "user", "content": "hello"}], params)[0].outputs[0].text
    assert plain != chat
    return {"plain": plain, "chat": chat}


def test_text_goes_to_stdout_and_figures_to_stderr(text_model: Path, expected: dict[str, str]):
    result = run("-m", text_model, "-p", "hello", "--max-tokens", "12", *SMALL)
    assert result.exit_code == 0
    assert result.stdout == expected["plain"] + "\n"
    assert "5 prompt tokens" in result.stderr
    assert "12 generated (length)" in result.stderr


def test_prompt_may_come_from_stdin(text_model: Path, expected: dict[str, str]):
    result = run("-m", text_model, "-p", "-", "--max-tokens", "12", *SMALL, stdin="hello")
    assert result.stdout == expected["plain"] + "\n"


@pytest.mark.parametrize(("flags", "kind"), [([], "chat"), (["--chat"], "chat"), (["--no-chat"], "plain")])
def test_chat_template_is_used_where_there_is_one(
    chat_model: Path, expected: dict[str, str], flags: list[str], kind: str
):
    result = run("-m", chat_model, "-p", "hello", "--max-tokens", "12", *SMALL, *flags)
    assert result.stdout == expected[kind] + "\n"


@pytest.mark.slow
def test_tensor_parallel_gives_the_same_text(text_model: Path, expected: dict[str, str]):
    devices = ["--num-devices", "4", "--tensor-parallel-size", "4"]
    result = run("-m", text_model, "-p", "hello", "--max-tokens", "12", *SMALL, *devices)
    assert result.stdout == expected["plain"] + "\n"


@pytest.mark.slow
def test_real_model_tells_the_recorded_story(shared_data: Path):
    model = shared_data / "models" / "stories260K"
    case = json.loads((model / "golden.json").read_text())["cases"][0]
    with LLM(model, device_memory="64MiB", progress=False) as llm:
        assert llm.tokenizer is not None
        story = llm.tokenizer.decode(case["greedy_ids"][:40])
    result = run("-m", model, "-p", case["prompt_text"], "--max-tokens", "40", *SMALL)
    assert result.exit_code == 0
    assert result.stdout.strip() == story.strip()


def test_outputs_that_grow_are_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Each output contains the whole answer so far, so keeping all outputs would take quadratic memory."""
    alive: list[int] = []

    class Model:
        tokenizer = None

        def __init__(self, **_: object):
            self.given: list[weakref.ref[RequestOutput]] = []

        def __enter__(self) -> "Model":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
            for count in range(1, 51):
                completion = CompletionOutput("x" * count, (7,) * count, "length")
                output = RequestOutput("r", prompt, (1, 2), (completion,), RequestMetrics(0.0), new_text="x")
                self.given.append(weakref.ref(output))
                yield output
                del output
                alive.append(sum(reference() is not None for reference in self.given))

    monkeypatch.setattr("serving.commands.generate.LLM", Model)
    stream_to_stdout(EngineConfig(), "hello", SamplingParams(), None)
    assert max(alive) <= 2
    out, err = capsys.readouterr()
    assert out == "x" * 50 + "\n"
    assert "50 generated (length)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "no-such-model", "-p", "x"], "there is no model 'no-such-model'"),
        (["-p", "x", "--temperature", "-1"], "temperature must be finite and at least 0"),
        (["-p", "x", "--num-devices", "3"], "num_devices=3"),
        (["-p", ""], "the prompt is empty"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat"], "no chat template"),
        (["--max-tokens", "5000"], "over the limit of 4096"),
        (["--device-memory", "1KiB"], "too small"),
    ],
)
def test_what_this_model_cannot_do_is_said(text_model: Path, flags: list[str], message: str):
    result = run("-m", text_model, "-p", "x", *SMALL, *flags)
    assert result.exit_code == 2
    assert message in result.stderr


def test_damaged_checkpoint_is_exit_code_1(text_model: Path, tmp_path: Path):
    for file in text_model.iterdir():
        content = file.read_bytes()
        cut = len(content) // 2 if file.suffix == ".safetensors" else len(content)
        (tmp_path / file.name).write_bytes(content[:cut])
    result = run("-m", tmp_path, "-p", "x", *SMALL)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.slow
def test_ctrl_c_ends_quietly(text_model: Path):
    # The pipe is smaller than the answer, so the command cannot end before the signal arrives.
    with spawn(text_model, "-p", "hello", "--max-tokens", "4000", pipe_bytes=4096) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said.decode().strip()) == (130, "interrupted")


@pytest.mark.slow
def test_reader_that_goes_away_ends_quietly(text_model: Path):
    with spawn(text_model, "-p", "hello", "--max-tokens", "4000") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == b""
