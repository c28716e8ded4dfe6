"""`amoeba bench` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import TIMEOUT_S, Live
from typer.testing import CliRunner

from serving.cli import app
from serving.grpc_server.callers import Caller
from serving.grpc_server.statuses import LimitError

pytestmark = pytest.mark.usefixtures("quick_compile")

# Fields that `vllm bench serve --save-result --save-detailed` writes for a generative model.
VLLM_FIELDS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{figure}_{metric}_ms" for figure in ("mean", "median", "std", "p50", "p99") for metric in ("ttft", "tpot")),
    *(f"{figure}_{metric}_ms" for figure in ("mean", "median", "std", "p50", "p99") for metric in ("itl", "e2el")),
}
VLLM_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors"}
SMALL = ["--random-input-len", "20", "--random-output-len", "6"]


def bench(*arguments: str | Path):
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)], env={"COLUMNS": "120"})


def refuse(live: Live, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Make the server refuse requests whose ids have this ending."""
    admission = live.server.request_handler.admission
    admit = admission.admit

    def refusing(caller: Caller, num_bytes: int, name: str, unique: bool, priority: int) -> Any:
        if name.endswith(ending):
            raise LimitError("no room for this one")
        return admit(caller, num_bytes, name, unique, priority)

    monkeypatch.setattr(admission, "admit", refusing)


@pytest.mark.slow
def test_burst_with_priorities(live: Live, tmp_path: Path):
    flags = ["--dataset-name", "burst", "--duration", "4", "--phase-s", "1", "--low-rate", "2:4", "--high-rate", "12"]
    flags += ["--priority-share", "0.3", "--random-input-len", "16", "--random-output-len", "4"]
    where = ["--target", live.target, "--result-dir", tmp_path, "--result-filename", "burst.json"]
    result = bench(*where, *flags, "--percentile-metrics", "ttft,server_queue_time")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "burst.json").read_text())
    assert report["failed"] == 0
    assert list(report["phases"]) == ["low", "high"]
    assert list(report["priorities"]) == ["0", "1"]
    for groups in (report["phases"], report["priorities"]):
        assert sum(figures["completed"] for figures in groups.values()) == report["completed"]
    assert report["mean_server_queue_time_ms"] > 0
    assert report["phases"]["high"]["request_throughput"] > report["phases"]["low"]["request_throughput"]
    assert "high phases" in result.output
    live.check_idle()


def test_mix_with_a_failure(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refuse(live, monkeypatch, "-3")
    short = ["--short-input-len", "20", "--short-output-len", "8", "--short-per-minute", "600"]
    long = ["--long-input-len", "40", "--long-output-len", "4", "--long-per-minute", "300"]
    most = ["--num-prompts", "16", "--max-concurrency", "2"]
    result = bench(
        *("--target", live.target, "--dataset-name", "mix", *short, *long, *most, "--metric-percentiles", "50,99"),
        *("--goodput", "ttft:60000", "tpot:60000", "--label", "mine", "--watch-interval", "0.1"),
        *("--save-detailed", "--result-dir", tmp_path, "--result-filename", "result.json"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "result.json").read_text())
    assert report.keys() >= VLLM_FIELDS | VLLM_DETAILS
    assert (report["completed"], report["failed"], report["num_prompts"]) == (15, 1, 16)
    assert report["failures"] == [{"status": "RESOURCE_EXHAUSTED", "count": 1, "text": "no room for this one"}]
    assert report["errors"][3] == "RESOURCE_EXHAUSTED: no room for this one"
    assert report["request_goodput"] == report["request_throughput"]
    assert (report["label"], report["model_id"]) == ("mine", "tiny-chat")
    assert report["request_rate"] == pytest.approx(900 / 60)

    kinds = [kind for index, kind in enumerate(report["kinds"]) if index != 3]
    short, long = report["classes"]["short"], report["classes"]["long"]
    assert (short["completed"], long["completed"]) == (kinds.count("short"), kinds.count("long"))
    assert short["total_input_tokens"] + long["total_input_tokens"] == report["total_input_tokens"]
    assert long["total_output_tokens"] == 4 * kinds.count("long")
    assert report["total_output_tokens"] == sum(report["output_lens"])
    assert report["instances"]["problem"] is None
    assert report["instances"]["degrees_over_time"][0]["degrees"] == [1, 1]
    assert (report["instances"]["merges"], report["instances"]["splits"]) == (0, 0)
    assert report["instances"]["device_seconds"] == {"1": pytest.approx(2 * report["duration"])}

    assert "Failed with RESOURCE_EXHAUSTED: 1 requests, the first with: no room for this one" in result.stdout
    assert "time of devices: TP1 100%" in result.stdout
    live.check_idle()


def test_result_without_details_has_no_lists(live: Live, tmp_path: Path):
    result = bench(
        "--target", live.target, *SMALL, "--num-prompts", "3", "--num-warmups", "2", "--result-dir", tmp_path
    )
    assert result.exit_code == 0, result.output
    [path] = tmp_path.iterdir()
    assert path.name.startswith("amoeba-random-infqps-tiny-chat-")
    report = json.loads(path.read_text())
    assert not report.keys() & VLLM_DETAILS
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (3, 60, 18)
    assert (report["request_rate"], report["workload"]["dataset_name"], report["classes"]) == ("inf", "random", {})


def test_a_run_finds_nothing_of_the_one_before_it_in_the_prefix_cache(live: Live):
    before = live.llm.stats
    for _ in range(2):
        assert bench("--target", live.target, "--random-input-len", "90", "--num-prompts", "2").exit_code == 0
    assert live.llm.stats.prompt_tokens - before.prompt_tokens >= 360
    assert live.llm.stats.cached_tokens == before.cached_tokens


def test_warmups_that_fail_are_told(live: Live, monkeypatch: pytest.MonkeyPatch):
    refuse(live, monkeypatch, "warmup-1")
    result = bench("--target", live.target, *SMALL, "--num-prompts", "1", "--num-warmups", "2")
    assert result.exit_code == 0, result.output
    assert "warning: 1 of 2 warm-up requests failed, the first with RESOURCE_EXHAUSTED: no room" in result.stderr
    assert "failed" not in bench("--target", live.target, *SMALL, "--num-prompts", "1", "--num-warmups", "1").stderr


def test_no_completed_request_exits_with_1(live: Live, monkeypatch: pytest.MonkeyPatch):
    refuse(live, monkeypatch, "")
    result = bench("--target", live.target, *SMALL, "--num-prompts", "2")
    assert result.exit_code == 1
    assert "Failed with RESOURCE_EXHAUSTED: 2 requests" in result.stdout


def test_server_that_cannot_be_asked_is_one_line(start: Callable[..., Live]):
    result = bench("--target", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    result = bench("--target", start(api_token="t0k3n").target)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: UNAUTHENTICATED: ")


def test_tokens_come_from_files_and_instances_need_the_admins(start: Callable[..., Live], tmp_path: Path):
    live = start(api_token="t0k3n", admin_token="adm1n")
    (tmp_path / "token").write_text("t0k3n\n")
    (tmp_path / "admin").write_text("adm1n\n")
    with_token = ["--target", live.target, *SMALL, "--num-prompts", "2", "--token-file", tmp_path / "token"]
    result = bench(*with_token)
    assert result.exit_code == 0, result.output
    assert "No samples of instances: PERMISSION_DENIED" in result.stdout
    result = bench(*with_token, "--admin-token-file", tmp_path / "admin")
    assert "time of devices: TP1 100%" in result.stdout


def test_waits_for_a_server_that_is_loading(start: Callable[..., Live]):
    live = start(attach=False)
    request_handler, asked = live.server.request_handler, threading.Event()
    attach = threading.Thread(
        target=lambda: asked.wait(TIMEOUT_S) and live.loop.run(live.server.attach(live.llm)), daemon=True
    )
    attach.start()
    get_backend = type(request_handler).backend

    class Watched(type(request_handler)):
        @property
        def backend(self):
            asked.set()
            return get_backend.fget(self)  # type: ignore[misc]

    request_handler.__class__ = Watched
    result = bench("--target", live.target, *SMALL, "--num-prompts", "2", "--ready-check-timeout-sec", TIMEOUT_S)
    assert result.exit_code == 0, result.output
    attach.join(TIMEOUT_S)


def test_ctrl_c_reports_what_was_done(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    running = threading.Event()
    astream = live.llm.astream_deltas

    async def watched(*arguments: Any, **more: Any) -> Any:
        async for output in astream(*arguments, **more):
            running.set()
            yield output

    monkeypatch.setattr(live.llm, "astream_deltas", watched)
    command = [sys.executable, "-m", "serving.cli", "bench", "--target", live.target, "--num-prompts", "2"]
    command += [*SMALL[:3], "3000", "--result-filename", str(tmp_path / "result.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert running.wait(TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "stopping" in err
    assert "Traceback" not in err
    assert "Interrupted: 2 of 2 planned requests were running." in out
    report = json.loads((tmp_path / "result.json").read_text())
    assert (report["interrupted"], report["interrupted_requests"], report["completed"]) == (True, 2, 0)
    live.check_idle()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset-name", "sharegpt"], "dataset_name='sharegpt' must be one of"),
        (["tpot:100"], "unexpected arguments tpot:100: only --goodput takes several"),
        (["--max-concurrency", "0"], "max_concurrency=0 must be at least 1"),
        (["--temperature", "-1"], "temperature"),
        (["--num-warmups", "-1"], "num_warmups=-1 must be at least 0"),
        (["--watch-interval", "0.01"], "watch_interval_s=0.01 must be 0, or from 0.1 to 3600"),
        (["--ready-check-timeout-sec", "-1"], "ready_timeout_s=-1 must be finite"),
        (["--token-file", "/nonexistent/token"], "the token file /nonexistent/token cannot be read"),
        (["--tls-ca", "/nonexistent/ca"], "the certificate file /nonexistent/ca cannot be read"),
        (["--tls-certificate", "/nonexistent/a", "--tls-key", "/nonexistent/b"], "a client certificate needs TLS"),
        (["--result-dir", "/nonexistent"], "result_dir=/nonexistent is no directory"),
        (["--result-filename", "/nonexistent/a.json"], "/nonexistent/a.json cannot be written"),
        (["--request-id-prefix", "x" * 81], "request_id_prefix has 81 characters: the maximum is 80"),
    ],
)
def test_bad_options_say_what_is_wrong(arguments: list[str], message: str):
    result = bench("--target", "127.0.0.1:1", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_lengths_are_checked_against_the_servers_context(live: Live):
    result = bench("--target", live.target, "--random-input-len", "4090")
    assert result.exit_code == 2
    assert "4090 + 128 = 4218 tokens, but the server's maximum context is 4096" in result.stderr


def test_load_generator_needs_no_jax():
    code = "import serving.bench.run, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
