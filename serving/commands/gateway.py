"""`amoeba gateway`: starts the gateway `smg` (Shepherd Model Gateway) in front of several servers.

The settings of the gateway are tested with servers that `amoeba serve` starts.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from amoeba_jax.address import read_host, read_url
from amoeba_jax.errors import ConfigError

MAX_WORKERS = 256
VERSION = "1.13.0"
"""Version of smg with which the settings are tested."""
_SETTINGS = {
    # As for vLLM over HTTP: requests pass with all their fields, and /health is checked.
    "backend": "vllm",
    "policy": "cache_aware",
    # A dead server gets no further requests after at most 4 s, and gets requests again 2 s after it is back.
    "health-check-interval-secs": "2",
    "health-check-timeout-secs": "2",
    "health-failure-threshold": "2",
    "health-success-threshold": "1",
    "worker-startup-check-interval": "2",
    # A server that refuses connections is left out before the next health check.
    "cb-failure-threshold": "2",
    "cb-success-threshold": "1",
    "cb-timeout-duration-secs": "4",
    "log-level": "warn",
}


def gateway_command(
    workers: Sequence[str], host: str, port: int, metrics_port: int, more: Sequence[str] = ()
) -> list[str]:
    """Return the command line that starts the gateway smg.

    Args:
        workers: URLs of the HTTP ports of the servers.
        host: address of the gateway.
        port: port of the gateway.
        metrics_port: port of the gateway's Prometheus metrics, on 127.0.0.1.
        more: further arguments of smg. They take precedence over the arguments that this function adds.

    Raises `ConfigError` for a bad URL, host or port, and for too many servers.
    """
    if not 0 < len(workers) <= MAX_WORKERS:
        raise ConfigError(f"--worker was given {len(workers)} times: give the URLs of 1 to {MAX_WORKERS} servers")
    for worker in workers:
        read_url(worker, "--worker")
    for name, value in (("--port", port), ("--metrics-port", metrics_port)):
        if not 1 <= value <= 65535:
            raise ConfigError(f"{name}={value} must be from 1 to 65535")
    settings = [text for name, value in _SETTINGS.items() for text in (f"--{name}", value)]
    return [
        *("smg", "launch", "--host", read_host(host, "--host"), "--port", str(port)),
        *("--worker-urls", *(worker.removesuffix("/") for worker in workers)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        # Otherwise smg asks the Hugging Face hub for a tokenizer. Routing by text needs none.
        "--disable-tokenizer-autoload",
        *settings,
        *more,
    ]


def run_gateway(command: Sequence[str], prints: bool) -> None:
    """Replace this process by the gateway, or print the command if `prints` is set.

    Raises `ConfigError` if smg is not installed.
    """
    if prints:
        print(shlex.join(command))
        return
    beside = Path(sys.executable).with_name("smg")
    program = str(beside) if beside.exists() else shutil.which("smg")
    if program is None:
        raise ConfigError(f"smg is not installed: pip install 'amoeba-jax[gateway]', which has smg {VERSION}")
    os.execv(program, [program, *command[1:]])
