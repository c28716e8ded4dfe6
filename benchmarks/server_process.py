"""`amoeba serve` in another process, for benchmarks."""

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
    """Start a server with settings of the configuration file, and yield its address when it is ready."""
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
