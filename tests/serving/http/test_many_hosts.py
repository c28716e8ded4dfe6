"""Two server processes behind `amoeba gateway`: conversations stay with their host, and a host dies."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import TIMEOUT_S, wait_until

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SMG is None, reason="smg is not installed: pip install 'amoeba-jax[gateway]'"),
]
START_S = 300
"""Seconds in which a server must start. Two start at the same time."""
# Texts with different beginnings. Each is longer than a page of the prefix cache.
TOPICS = [
    "Anchors, ropes and sails: a captain explains how ships were rigged in the days of the tea trade. ",
    "Bread needs flour, water, salt and time; this is the diary of a baker in a village by the sea. ",
    "Comets return after many years, and the observatory on the hill keeps a list of all of them. ",
    "Dance in the old town hall began at nine, with two fiddles and a drum that was far too loud. ",
]


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_amoeba(*arguments: str | Path) -> subprocess.Popen[bytes]:
    code = "from serving.cli import main; main()"
    environment = os.environ | {"NPROC": "16", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["PATH"] = f"{Path(SMG or '').parent}{os.pathsep}{environment.get('PATH', '')}"
    command = [sys.executable, "-c", code, *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def answers(port: int, path: str) -> bool:
    """Return whether a GET succeeds."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def count(port: int, metric: str) -> float:
    """Return the value of a server's counter."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as response:
        found = re.search(rf"^amoeba:{metric}(?:{{[^}}]*}})? (\S+)$", response.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


class Hosts:
    """Two servers, keyed by port, and a gateway. `__init__` starts them, and `wait` returns when they are ready."""

    def __init__(self, model: Path, cache: str):
        self._model, self._cache = model, cache
        *self.ports, self.gateway, metrics = free_ports(4)
        workers = [argument for port in self.ports for argument in ("--worker", f"http://127.0.0.1:{port}")]
        self.servers = {port: self.start(port) for port in self.ports}
        self._gateway = start_amoeba("gateway", *workers, "--port", str(self.gateway), "--metrics-port", str(metrics))

    def start(self, port: int) -> subprocess.Popen[bytes]:
        memory = ("--device-memory", "64MiB", "--max-num-seqs", "4", "--compile-cache", self._cache, "--no-warmup")
        ports = ("--port", "0", "--metrics-port", "0", "--http-port", str(port))
        return start_amoeba("serve", "--model", self._model, "--num-devices", "1", *memory, *ports)

    def wait(self) -> None:
        """Wait until the servers are ready and the gateway knows them."""
        for port in self.ports:
            wait_until(lambda port=port: answers(port, "/health") or self.servers[port].poll() is not None, START_S)
            assert self.servers[port].poll() is None
        wait_until(lambda: answers(self.gateway, "/v1/models") or self._gateway.poll() is not None)
        assert self._gateway.poll() is None

    def close(self) -> None:
        for process in (self._gateway, *self.servers.values()):
            process.kill()
            process.wait(TIMEOUT_S)

    def post(self, messages: list[dict[str, str]], **fields: Any) -> http.client.HTTPResponse:
        """Send a conversation to the gateway."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway, timeout=TIMEOUT_S)
        body = {"model": self._model.name, "messages": messages, "temperature": 0, **fields}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def say(self, messages: list[dict[str, str]]) -> tuple[int, float]:
        """Send a conversation and append the answer.

        Return the host that answered, and the number of prompt tokens from its prefix cache.
        """
        names = ("generation_tokens_total", "prefix_cache_hits_total")
        before = {port: [count(port, name) for name in names] for port in self.ports if answers(port, "/health")}
        response = self.post(messages, max_tokens=8)
        text = response.read()
        assert response.status == 200, text
        messages.append(json.loads(text)["choices"][0]["message"])
        after = {port: [count(port, name) for name in names] for port in before}
        (host,) = [port for port in before if after[port][0] > before[port][0]]
        return host, after[host][1] - before[host][1]


@pytest.fixture
def hosts(served_model: Path, compile_cache: str) -> Iterator[Hosts]:
    hosts = Hosts(served_model, compile_cache)
    try:
        hosts.wait()
        yield hosts
    finally:
        hosts.close()


def ask(topic: str, question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": 3 * topic + question}]


def test_conversations_stay_with_their_host_and_a_host_may_die(hosts: Hosts):
    conversations = [ask(topic, "What happens then?") for topic in TOPICS]
    # The first answers overlap: a new conversation goes to the host with fewer running requests.
    streams, homes = [], []
    for messages in conversations:
        before = {port: count(port, "prompt_tokens_total") for port in hosts.ports}
        streams.append(Stream(hosts, messages, 150))
        streams[-1].started.wait(TIMEOUT_S)
        homes += [port for port in hosts.ports if count(port, "prompt_tokens_total") > before[port]]
    assert len(homes) == len(TOPICS)
    assert set(homes) == set(hosts.ports)
    for stream in streams:
        stream.thread.join(TIMEOUT_S)
        assert stream.completed, stream.end
    for messages, home in zip(conversations, homes, strict=True):
        known = len(messages[0]["content"])
        messages += [{"role": "assistant", "content": "..."}, {"role": "user", "content": "And after that?"}]
        host, hits = hosts.say(messages)
        assert host == home
        assert hits > 0.8 * known  # a token is a byte

    # One host dies while it answers.
    streams = [Stream(hosts, messages, 400) for messages in conversations]
    for stream in streams:
        stream.started.wait(TIMEOUT_S)
    dead = homes[0]
    hosts.servers[dead].send_signal(signal.SIGKILL)
    hosts.servers[dead].wait(TIMEOUT_S)
    for stream, home in zip(streams, homes, strict=True):
        stream.thread.join(TIMEOUT_S)
        assert stream.completed == (home != dead), stream.end
        assert home != dead or "error" in stream.end, stream.end
    assert not answers(dead, "/health")

    # All conversations continue on the other host, without an error.
    (other,) = set(hosts.ports) - {dead}
    for messages in conversations:
        messages += [{"role": "assistant", "content": "..."}, {"role": "user", "content": "Then?"}]
        assert hosts.say(messages)[0] == other

    # The host comes back, and gets conversations again.
    hosts.servers[dead] = hosts.start(dead)
    wait_until(lambda: answers(dead, "/health"), START_S)
    numbers = iter(range(1000))
    wait_until(lambda: hosts.say(ask(f"{next(numbers)} {os.urandom(40).hex()} ", "Well?"))[0] == dead)


class Stream:
    """Streamed answer of a conversation, read by a thread.

    Attributes:
        started: set after the first events.
        completed: whether the stream has ended with its last event.
        end: last part of the stream.
    """

    def __init__(self, hosts: Hosts, messages: list[dict[str, str]], max_tokens: int):
        self.started, self.completed, self.end = threading.Event(), False, ""
        self._open: Callable[[], http.client.HTTPResponse] = lambda: hosts.post(
            messages, max_tokens=max_tokens, ignore_eos=True, stream=True
        )
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        lines: list[str] = []
        try:
            response = self._open()
            while line := response.readline().decode():
                lines.append(line)
                if len(lines) == 10:
                    self.started.set()
        except (OSError, http.client.HTTPException) as error:
            lines.append(f"error: {error!r}")
        self.end = "".join(lines[-6:])
        self.completed = "data: [DONE]\n" in lines[-3:] and "error" not in self.end
        self.started.set()
