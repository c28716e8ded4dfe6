"""`amoeba serve` and `amoeba bench` in other processes, for benchmarks."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


@contextmanager
def server(settings: Mapping[str, Any], **more: Any) -> Iterator[str]:
    """Start a server, and yield its address when it is ready.

    `settings` and `more`: settings of the server's configuration file.
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "server.yaml"
        config.write_text(yaml.safe_dump({**settings, **more, "port": 0, "metrics_port": None}))
        command = [sys.executable, "-m", "serving.cli", "serve", f"--config={config}", "--no-warmup"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            log = []
            for line in process.stderr:
                log.append(line)
                if found := re.match(r"ready: .* on ([\d.]+:\d+)", line):
                    break
            else:
                raise SystemExit("the server did not start:\n" + "".join(log))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            try:
                yield found[1]
            finally:
                process.terminate()


def bench(target: str, flags: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Send load to a server with `amoeba bench`, and return its JSON report.

    Args:
        flags: options by name, without the leading dashes.
        more: further arguments, after the options.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        named = {"target": target, **flags, "result-filename": report}
        options = [f"--{name}={value}" for name, value in named.items()]
        command = [sys.executable, "-m", "serving.cli", "bench", *options, *more]
        # The client must not take memory of a GPU.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        folder = Path(__file__).parents[1]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text())
