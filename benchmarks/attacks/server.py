"""The server under test: `amoeba serve` over a tiny model, warmed up, in a process of its own."""

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
# Longer than the model was trained for: what it says there is of no interest, and answers can be long.
CONTEXT = 2048
# Refuses roles as templates of instruction-tuned models do, and its errors have the role.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unexpected role ' + m.role) }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
_READY_WITHIN_S = 1800.0


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    target: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def rss_mib(self) -> float:
        """Resident memory of the process; NaN once it has ended."""
        return rss_mib(self.process.pid)

    def last_words(self) -> str:
        """What it wrote about its end, without the traces of requests that ended with it."""
        lines = self.log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(("error:", "stopping", "stopped"))]
        return f"exit code {self.process.poll()}: {' '.join(said) or ' '.join(lines[-3:])}"


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB; NaN where there is none."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return float("nan")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `running_server`."""
    parser.add_argument("--model", help="directory or name; default: stories260K, or a tiny random model without it")
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--device-memory", default="256MiB")
    parser.add_argument("--kv-cache-tokens", type=int, default=16384, help="of each device")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="of each device")
    parser.add_argument("--max-refusals-per-second", type=int, help="default: the server's")
    parser.add_argument("--compile-cache", help="directory; default: the user's")
    parser.add_argument("--server-log", type=Path, help="file to keep what the server writes")
    parser.add_argument("--no-warmup", action="store_true", help="compile while serving, which disturbs latencies")


@contextmanager
def running_server(options: argparse.Namespace) -> Iterator[Running]:
    """Start a server and wait until it is ready; it ends with the block, and with SIGTERM for this process.

    Raises `SystemExit` if it does not start.
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
    """The server's address, from the line that it writes."""
    give_up = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < give_up:
        if found := re.search(r"^ready: .* on ([\d.]+:\d+)", log.read_text(errors="replace"), re.MULTILINE):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit("the server did not start:\n" + log.read_text(errors="replace"))


def _default_model(directory: Path) -> Path:
    """A copy of stories260K with a chat template and a longer context, or a random model of the same kind."""
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
