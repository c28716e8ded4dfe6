"""Server under test: `amoeba serve` in another process, with a tiny model, after a warm-up."""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K"
# Longer than the model's training allows, so that answers can be long; their texts do not matter.
CONTEXT = 2048
# Refuses unknown roles with an error, like templates of instruction-tuned models.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unexpected role ' + m.role) }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
_READY_WITHIN_S = 1800.0


@dataclass(frozen=True)
class Running:
    """Server that is ready."""

    target: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def rss_mib(self) -> float:
        """Resident memory of the process in MiB; NaN after its end."""
        return rss_mib(self.process.pid)

    def last_words(self) -> str:
        """Return the exit code and the lines of the log about errors and the shutdown. Without such lines: the last
        three lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(("error:", "stopping", "stopped"))]
        return f"exit code {self.process.poll()}: {' '.join(said) or ' '.join(lines[-3:])}"


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB; NaN if the process does not exist."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return float("nan")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="directory or name of a model; default: stories260K if present, else a tiny random model"
    )
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--device-memory", default="256MiB")
    parser.add_argument("--kv-cache-tokens", type=int, default=16384, help="tokens of each device")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="requests of each device")
    parser.add_argument(
        "--max-refusals-per-second", type=int, help="limit of refused calls; default: the default of the server"
    )
    parser.add_argument("--compile-cache", help="directory of the compile cache; default: the user's")
    parser.add_argument("--server-log", type=Path, help="file for the output of the server")
    parser.add_argument(
        "--no-warmup", action="store_true", help="no warm-up; compiling while serving disturbs latencies"
    )


@contextmanager
def running_server(options: argparse.Namespace) -> Iterator[Running]:
    """Start a server, and yield it when it is ready.

    The server ends at the end of the `with` block, or if this process receives SIGTERM. Raises `SystemExit` if the
    server does not start.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or str(_default_model(Path(scratch) / "model"))
        settings = {
            "model": model,
            "num_devices": options.num_devices,
            "device_memory": options.device_memory,
            "kv_cache_tokens": options.kv_cache_tokens,
            "max_num_seqs": options.max_num_seqs,
            "linger_s": 2.0,
            "shutdown_timeout_s": 2.0,
            "port": 0,
            "metrics_port": None,
        }
        if options.max_refusals_per_second:
            settings["max_refusals_per_second"] = options.max_refusals_per_second
        if options.compile_cache:
            settings["compile_cache"] = options.compile_cache
        config, log = Path(scratch) / "server.yaml", options.server_log or Path(scratch) / "server.log"
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "serving.cli", "serve", f"--config={config}"]
        command.append("--no-warmup" if options.no_warmup else "--wait-for=all")
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stderr=sink, stdout=sink, cwd=ROOT)
        try:
            yield Running(_wait_until_ready(process, log), process, log)
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server prints its address, and return the address. Raises `SystemExit` if the server does not
    start."""
    give_up = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < give_up:
        if found := re.search(r"^ready: .* on ([\d.]+:\d+)", log.read_text(errors="replace"), re.MULTILINE):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit("the server did not start:\n" + log.read_text(errors="replace"))


def _default_model(directory: Path) -> Path:
    """Write a copy of stories260K with a chat template and a longer context. If stories260K is missing, write a random
    model."""
    if not STORIES.is_dir():
        sys.path.insert(0, str(ROOT / "tests"))
        from tiny_models import byte_model  # pyright: ignore[reportMissingImports]

        return byte_model(directory, CHAT_TEMPLATE, max_position_embeddings=CONTEXT)
    directory.mkdir()
    for path in STORIES.iterdir():
        shutil.copyfile(path, directory / path.name)
    changes = {
        "config.json": {"max_position_embeddings": CONTEXT},
        "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE, "model_max_length": CONTEXT},
    }
    for name, values in changes.items():
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory
