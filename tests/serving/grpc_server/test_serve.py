"""`amoeba serve`, `chat` and `transform` in separate processes, as a user runs them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from deaf_peer import DeafPeer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_server import GREEDY, TIMEOUT_S, Live, code_and_text
from typer.testing import CliRunner

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import Client, Retries
from amoeba_jax.client._proto import inference_pb2 as pb
from serving.cli import app
from serving.commands.serve import _say_loaded

LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)


class Process:
    """Server in a separate process. `said` is its output on stderr."""

    def __init__(self, *arguments: str | Path, before: str = "", stderr: int | IO[str] = subprocess.PIPE):
        code = f"{before}\nfrom serving.cli import main\nmain()"
        command = [sys.executable, "-c", code, "serve", *(str(argument) for argument in arguments)]
        environment = os.environ | {"NPROC": "16", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        environment.pop("PYTHONUNBUFFERED", None)  # by default, output that cannot be written stays in the buffer
        self.process = subprocess.Popen(command, stderr=stderr, text=True, env=environment)
        self.said = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read stderr until it matches the pattern."""
        assert self.process.stderr is not None
        while (match := re.search(pattern, self.said)) is None:
            line = self.process.stderr.readline()
            assert line, f"the server ended: {self.said}"
            self.said += line
        return match

    @property
    def target(self) -> str:
        return self.wait_for(r"ready: \S+ on ([^\s,]+)")[1]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        if self.process.stderr is not None:
            self.said += self.process.stderr.read()
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def serve(served_model: Path, compile_cache: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model: {served_model}\ndevice_memory: 32MiB\nport: 1\nmetrics-port: 0\ncompile_cache: {compile_cache}\n"
        "max_num_seqs: 4\n"
    )
    processes: list[Process] = []

    def start(*arguments: str | Path, **options: Any) -> Process:
        processes.append(Process("--config", config, "--port", "0", "--no-warmup", *arguments, **options))
        return processes[-1]

    yield start
    for server in processes:
        server.process.kill()
        server.process.wait(TIMEOUT_S)
        if server.process.stderr is not None:
            server.process.stderr.close()


def test_sigterm_finishes_what_runs_and_exits_0(serve: Callable[..., Process]):
    server = serve("--num-devices", "2")
    with Client(server.target) as client:
        metrics = server.wait_for(r"metrics on (\S+)")[1]
        stream = client.stream("hello", SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        chunks = [next(stream)]
        assert b"amoeba:prompt_tokens_total" in urllib.request.urlopen(metrics, timeout=TIMEOUT_S).read()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping")
        chunks += list(stream)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 300
        assert server.wait() == 0
        assert "0 requests were aborted" in server.said
        assert re.search(r"^\d+-\d+-\d+ \d+:\d+:\d+,\d+ INFO amoeba.scheduler: action=dispatch", server.said, re.M)


@pytest.mark.slow
def test_a_watcher_that_takes_no_answer_stops_neither_readiness_nor_sigterm(serve: Callable[..., Process]):
    server = serve()
    peer = DeafPeer(int(server.wait_for(r"listening on 127.0.0.1:(\d+)")[1]))
    for service in ("", "amoeba.v1.InferenceService"):
        peer.call("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest(service=service).SerializeToString())
    with grpc.insecure_channel(server.target) as channel:
        request = health_pb2.HealthCheckRequest(service="amoeba.v1.InferenceService")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert server.end(signal.SIGTERM) == 0
    peer.close()


def test_questions_that_are_not_utf8_are_refused(live: Live):
    run = CliRunner().invoke
    said = run(app, ["chat", "--target", live.target], input=b"a\xff\n")
    assert said.exit_code == 2
    assert said.stderr == (
        "error: the question must be valid Unicode: character 1 is the unpaired surrogate U+DCFF (the byte 0xFF of a "
        "text that is not UTF-8)\n"
    )
    said = run(app, ["chat", "--target", live.target, "--system", "a\udcff"])
    assert said.exit_code == 2
    assert "--system must be valid Unicode" in said.stderr
    said = run(app, ["generate", "--prompt", "-"], input=b"\xff")
    assert said.exit_code == 2
    assert "the prompt must be valid Unicode" in said.stderr


def transform(target: str, degree: int) -> "subprocess.Popen[str]":
    """Start `amoeba transform` in a separate process."""
    command = [sys.executable, "-m", "serving.cli", "transform", str(degree), "--wait", "--target", target]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_eight_devices_merge_and_split_from_the_command_line(serve: Callable[..., Process]):
    """Requests run before, during and after each change."""
    server = serve("--num-devices", "8", "--max-tensor-parallel-size", "8", "--device-memory", "96MiB")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Client(server.target) as client, ThreadPoolExecutor(4) as pool:

        def answers() -> list[tuple[int, ...]]:
            results = pool.map(lambda prompt: client.generate(prompt, params), ["hello", "bye", "a", "hello again"])
            return [completion.token_ids for (completion,) in results]

        expected = answers()
        for degree, layout in ((8, "TP8"), (1, " + ".join(["TP1"] * 8))):
            changing, num_rounds = transform(server.target, degree), 0
            while changing.poll() is None:
                assert answers() == expected
                num_rounds += 1
            stdout, stderr = changing.communicate(timeout=TIMEOUT_S)
            assert changing.returncode == 0, stderr
            assert stdout.startswith(f"{layout} after ")
            assert num_rounds > 0
            assert answers() == expected


@pytest.mark.slow
@pytest.mark.parametrize("host", ["[::1]", "::1", "localhost"])
def test_every_kind_of_host_is_served(serve: Callable[..., Process], host: str):
    server = serve("--host", host)
    metrics = server.wait_for(r"metrics on (\S+)")[1]
    answer = CliRunner().invoke(app, ["chat", "--target", server.target, "--max-tokens", "2"], input="hello\n")
    assert answer.exit_code == 0, answer.stderr
    assert urllib.request.urlopen(metrics, timeout=TIMEOUT_S).status == 200
    assert server.end(signal.SIGTERM) == 0


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            ["--host", "::g"],
            "host='::g' must be a host name or an IP address: it is not an IPv6 address",
            marks=pytest.mark.slow,
        ),
        (["--host", "192.0.2.1"], "192.0.2.1:0 cannot be bound: this machine does not have this address"),
        (["--host", "no-such-host.invalid"], "the host name cannot be resolved"),
    ],
)
def test_hosts_that_cannot_be_served_are_refused_with_the_reason(
    serve: Callable[..., Process], arguments: list[str], reason: str
):
    server = serve(*arguments)
    assert server.wait() == 2
    assert reason in server.said
    assert "Traceback" not in server.said


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    "flag", ["--port", *(pytest.param(flag, marks=pytest.mark.slow) for flag in ("--admin-port", "--metrics-port"))]
)
def test_a_port_in_use_is_refused_by_the_name_of_its_option(serve: Callable[..., Process], flag: str):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        server = serve("--host", "::1", flag, str(other.getsockname()[1]))
        assert server.wait() == 2
        assert f"cannot be bound: another program uses this port. Choose another {flag}, or" in server.said


@pytest.mark.slow
def test_shutdown_timeout_ends_what_takes_longer(serve: Callable[..., Process]):
    server = serve("--shutdown-timeout", "0.2")
    with Client(server.target) as client:
        stream = client.stream("hello", LONG)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        *_, last = stream
        assert last.finish_reason == "abort"
        assert server.wait() == 0


def token_files(directory: Path) -> tuple[Path, Path]:
    """Write the clients' token and the administrators' token to files."""
    token, admin = directory / "token", directory / "admin"
    token.write_text("sesame\n")
    admin.write_text("root\n")
    return token, admin


@pytest.mark.slow
def test_commands_talk_with_a_server_in_another_process(serve: Callable[..., Process], tmp_path: Path):
    token, admin = token_files(tmp_path)
    server = serve("--num-devices", "2", "--api-token-file", token, "--admin-token-file", admin)
    check_commands(server.target, token, admin)


@pytest.mark.usefixtures("quick_compile")
def test_commands_talk_with_a_server(start: Callable[..., Live], tmp_path: Path):
    live = start(api_token="sesame", admin_token="root")
    try:
        check_commands(live.target, *token_files(tmp_path))
    finally:
        live.llm.transform(1)


def check_commands(target: str, token: Path, admin: Path) -> None:
    """Check `chat`, and merge the server's two TP1 instances with `transform`."""
    run = CliRunner().invoke
    flags = ["--target", target, "--token-file", str(token)]
    chat = run(app, ["chat", *flags, "--max-tokens", "8"], input="hello\n/new\nhello\n")
    with Client(target, token="sesame") as client:
        answer = client.generate([{"role": "user", "content": "hello"}], GREEDY)[0].text
    assert chat.exit_code == 0, chat.stderr
    assert chat.stdout == f"{answer}\n" * 2
    refused = run(app, ["transform", "2", *flags])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: PERMISSION_DENIED")
    done = run(app, ["transform", "2", "--target", target, "--token-file", str(admin)])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("TP2 after")
    impossible = run(app, ["transform", "4", "--target", target, "--token-file", str(admin)])
    assert impossible.exit_code == 1
    assert "FAILED_PRECONDITION" in impossible.stderr


@pytest.mark.slow
def test_killed_clients_leave_nothing(serve: Callable[..., Process]):
    server = serve()
    code = (
        "import sys; from amoeba_jax import SamplingParams; from amoeba_jax.client import Client\n"
        "params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)\n"
        "for chunk in Client(sys.argv[1]).stream('hello', params): print('going', flush=True)"
    )
    with Client(server.target) as client:
        clients = [
            subprocess.Popen([sys.executable, "-c", code, server.target], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for process in clients:
            with process:
                assert process.stdout is not None
                process.stdout.readline()
                process.kill()
        for cluster in client.watch_cluster(0.1, timeout_s=TIMEOUT_S):
            if cluster.accepted == 0:
                break
        assert [(i.running, i.kv_used_pages) for i in client.cluster().instances] == [(0, 0)]
        assert client.generate("hello", GREEDY)[0].finish_reason == "length"


@pytest.mark.slow
def test_server_killed_and_started_again_serves(serve: Callable[..., Process]):
    server = serve()
    with Client(server.target) as client:
        stream = client.stream("hello", LONG)
        next(stream)
        server.process.kill()
        code, _ = code_and_text(lambda: list(stream))
        assert code is grpc.StatusCode.UNAVAILABLE
    port = server.target.rpartition(":")[2]
    again = serve("--port", port)
    with Client(again.target, retries=Retries(attempts=20)) as client:
        assert client.generate("hello", GREEDY)[0].finish_reason == "length"


@pytest.mark.slow
def test_server_whose_log_is_on_a_full_disk_serves(serve: Callable[..., Process]):
    """No output or log line can be written, including the scheduler's decisions."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Path("/dev/full").open("w") as full:
        server = serve("--num-devices", "2", "--port", str(port), stderr=full)
    with Client(f"127.0.0.1:{port}", retries=Retries(attempts=100)) as client:
        assert client.generate("hello", GREEDY)[0].finish_reason == "length"
        client.transform(2)
        assert client.generate("hello", GREEDY)[0].finish_reason == "length"
    assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_engine_that_fails_ends_the_process(serve: Callable[..., Process], tmp_path: Path):
    """The steps of the process fail once the trigger file exists."""
    trigger = tmp_path / "fail"
    server = serve(
        before="import pathlib\n"
        "from amoeba_jax.engine.engine import Engine\n"
        "advance = Engine.advance\n"
        "def failing(self):\n"
        f"    if pathlib.Path({str(trigger)!r}).exists(): raise RuntimeError('the device is gone')\n"
        "    return advance(self)\n"
        "Engine.advance = failing\n"
    )
    with Client(server.target) as client:
        stream = client.stream("hello", LONG)
        next(stream)
        trigger.touch()
        code, text = code_and_text(lambda: list(stream))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "device" not in text
        assert server.wait() == 70
        assert "the engine has failed" in server.said


@pytest.mark.slow
def test_engine_that_is_stuck_ends_the_process(serve: Callable[..., Process], tmp_path: Path):
    """Steps never return once the trigger file exists. The process ends although a thread is blocked."""
    trigger, config = tmp_path / "block", tmp_path / "server.yaml"
    config.write_text(config.read_text() + "engine_timeout_s: 3\nmax_num_batched_tokens: 16\n")
    server = serve(
        "--warmup",
        "--max-num-seqs=1",  # fewer programs
        before="import pathlib, threading\n"
        "from amoeba_jax.engine.engine import Engine\n"
        "advance = Engine.advance\n"
        "def blocking(self):\n"
        f"    if pathlib.Path({str(trigger)!r}).exists(): threading.Event().wait()\n"
        "    return advance(self)\n"
        "Engine.advance = blocking\n",
    )
    with Client(server.target, retries=Retries(attempts=1)) as client:
        stream = client.stream("hello", LONG)
        next(stream)
        trigger.touch()
        code, _ = code_and_text(lambda: list(stream))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert server.wait() == 70
        assert "has not answered for 3 s (engine_timeout_s)" in server.said


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("drained", [False, True])
def test_a_server_that_was_drained_while_it_was_loading_is_not_said_to_be_ready(
    start: Callable[..., Live], served_llm: LLM, drained: bool, capsys: pytest.CaptureFixture[str]
):
    live = start(attach=False)
    if drained:
        assert live.admin.Drain(pb.DrainRequest(), timeout=TIMEOUT_S).aborted == 0
    live.loop.run(live.server.attach(served_llm))
    assert _say_loaded(live.server, "tiny", "amoeba") != drained
    said = capsys.readouterr().err
    assert said.startswith("not ready: tiny on" if drained else "ready: tiny on")
    assert ("drained while it was loading" in said) == drained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red\n", "unknown settings colour"),
        ("- 1\n", "names and values"),
        ("port: [", "cannot be read"),
        ("port: high\n", "wrong type"),
        ("max_queued_requests: 0\n", "max_queued_requests=0"),
        ("tls_certificate: x.pem\n", "tls_key"),
        ("tls_certificate: x.pem\ntls_key: x.key\n", "there is no file"),
        ("engine_timeout_s: 0\n", "engine_timeout_s=0"),
        ("otlp_traces_endpoint: collector:4317\n", "http://HOST:PORT"),
        ("otlp_traces_endpoint: 4317\n", "wrong type"),
        ("num_devices: 3\n", "num_devices=3"),
        ("model: no-such-model\nmetrics_port: 0\nport: 0\n", "there is no model"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(tmp_path: Path, text: str, message: str):
    config = tmp_path / "server.yaml"
    config.write_text(text)
    result = CliRunner().invoke(app, ["serve", "--config", str(config)])
    assert result.exit_code == 2, json.dumps(result.stderr)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


WHOLE = {"head": [0], "stages": [{"layers": [0, 1], "homes": [[1]]}]}


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"head": [4], "stages": WHOLE["stages"]}, "placement: head names devices [4]: there are devices 0 to 3"),
        (
            {"head": [0], "stages": [{"layers": [0, 1], "homes": [[7]]}]},
            "stage 0: home 0 names devices [7]: there are devices 0 to 3",
        ),
        ({"head": [0], "stages": [{"layers": [0, 2], "homes": [[1]]}]}, "from 0 to 1"),
        ({"head": [0], "stages": [{"layers": [0, 1], "module": "ffn", "homes": [[1]]}]}, "attention of layer 0"),
        ('{"head": [0', "not valid JSON"),
        ("", "not valid JSON"),
        (b"\xff\xfe", "the file cannot be read: 'utf-8' codec"),
        (None, "neither auto nor JSON"),
    ],
)
def test_bad_placement_files_are_one_line_and_exit_code_2(
    served_model: Path, tmp_path: Path, placement: Any, message: str
):
    file = tmp_path / "placement.json"
    if placement is not None:
        content = json.dumps(placement) if isinstance(placement, dict) else placement
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = ["--num-devices", "4", "--device-memory", "32MiB", "--port", "0", "--metrics-port", "0", "--no-warmup"]
    result = CliRunner().invoke(app, ["serve", "-m", str(served_model), *flags, "--placement", str(file)])
    assert result.exit_code == 2, result.stderr
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", "auto", "settings"])
def test_a_placement_is_served(serve: Callable[..., Process], served_llm: LLM, tmp_path: Path, form: str):
    file, config = tmp_path / "placement.json", tmp_path / "server.yaml"
    file.write_text(json.dumps(WHOLE))
    flags = [] if form == "settings" else ["--placement", str(file) if form == "file" else form]
    if form == "settings":
        config.write_text(config.read_text() + f"placement: {json.dumps(WHOLE)}\n")
    server = serve("--num-devices", "4", *flags)
    with Client(server.target) as client:
        answer = client.generate("hello", GREEDY)[0]
        assert answer.token_ids == served_llm.generate("hello", GREEDY)[0].outputs[0].token_ids
        code, text = code_and_text(lambda: client.transform(2))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "placement of its own" in text
    assert server.end(signal.SIGTERM) == 0
