"""Clients that disconnect, and clients that do not read."""

import asyncio
import json
import random
import socket
from typing import Any

import httpx2
import pytest
from live_server import TIMEOUT_S, wait_until

from amoeba_jax import SamplingParams
from serving.http_server import server as http_server

pytestmark = pytest.mark.usefixtures("quick_compile")

LONG: Any = {"model": "tiny-chat", "prompt": "hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def http_connection(http: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", http.http.port), timeout=TIMEOUT_S)


def slow_connection(http: Any) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", http.http.port))
    return connection


@pytest.mark.parametrize("streams", [True, False])
def test_client_that_leaves_frees_its_pages(http, streams: bool):
    with socket.create_connection(("127.0.0.1", http.http.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(request(LONG | {"stream": streams}))
        wait_until(lambda: any(view.running for view in http.llm.instances))
        if streams:
            assert connection.recv(1).startswith(b"H")
    http.check_idle()
    text = http.llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text
    assert http.client.completions.create(**{**_plain(LONG), "max_tokens": 4}).choices[0].text == text


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "ignore_eos"}


def test_client_that_does_not_read_is_cut_off(start_http, monkeypatch: pytest.MonkeyPatch):
    """The buffers of a connection hold about 100 events with 20 log-probabilities each."""
    monkeypatch.setattr(http_server, "LAST_READ_S", 0.5)
    with start_http(max_buffered_tokens=16) as http:
        with slow_connection(http) as connection:
            connection.sendall(request(LONG | {"stream": True, "logprobs": 20}))
            wait_until(lambda: any(view.running for view in http.llm.instances))
            http.check_idle()
            wait_until(lambda: not http.http._uvicorn.server_state.connections)
        assert http.server.metrics.requests.labels("abort")._value.get() == 1


def test_connection_without_a_request_is_closed(start_http, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEADER_S", 0.05)
    with start_http() as http, socket.create_connection(("127.0.0.1", http.http.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        assert connection.recv(1) == b""


def test_idle_connection_is_closed_whatever_it_sends(http, monkeypatch: pytest.MonkeyPatch):
    """The first byte stops uvicorn's idle timer. Further bytes do not restart our time limit."""
    monkeypatch.setattr(http_server, "HEADER_S", 0.2)
    with socket.create_connection(("127.0.0.1", http.http.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(4096)
        for byte in b"GE":
            connection.sendall(bytes([byte]))
        assert connection.recv(1) == b""


def test_client_address_has_a_limit_of_connections(start_http, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "MAX_CLIENT_CONNECTIONS", 1)
    with start_http() as http, http_connection(http) as first:
        first.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert first.recv(1) == b"H"
        with http_connection(http) as second:
            assert second.recv(1) == b""
        first.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in first.recv(2**16), "the first connection goes on"


def test_unread_reply_is_dropped_after_a_time(start_http, monkeypatch: pytest.MonkeyPatch):
    """Until then, the reply's bytes count against the client."""
    monkeypatch.setattr(http_server, "LAST_READ_S", 0.5)
    monkeypatch.setattr(http_server, "_SEND_BUFFER_BYTES", 4096)
    body = LONG | {"prompt": [65] * 500, "n": 16, "temperature": 1, "max_tokens": 1}
    body |= {"echo": True, "return_token_ids": True}
    with start_http() as http:
        admission, connections = http.server.request_handler.admission, http.http._uvicorn.server_state.connections
        with slow_connection(http) as connection:
            connection.sendall(request(body))
            wait_until(lambda: admission._bytes_of["127.0.0.1"] > 2**13)
            wait_until(lambda: not connections)
        http.check_idle()


@pytest.mark.slow
def test_two_hundred_cut_streams_leave_nothing(http):
    """Each stream is cut after a random number of bytes, then all prompts are sent again at once.

    Other requests run meanwhile, and their tokens do not change.
    """
    numbers = random.Random(0)
    prompts, others = [f"prompt {index}" for index in range(200)], [f"other {index}" for index in range(20)]
    settings = {"model": "tiny-chat", "temperature": 0, "max_tokens": 40, "stream": True, "ignore_eos": True}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected, of_others = (
        [it.outputs[0].text for it in http.llm.generate(asked, params)] for asked in (prompts, others)
    )

    async def run() -> tuple[list[str], list[str]]:
        async with httpx2.AsyncClient(timeout=TIMEOUT_S, limits=httpx2.Limits(max_connections=None)) as client:

            async def cut(prompt: str) -> None:
                left = numbers.randrange(4000)
                body = settings | {"prompt": prompt}
                async with client.stream("POST", f"{http.url}/v1/completions", json=body) as response:
                    async for data in response.aiter_bytes():
                        left -= len(data)
                        if left <= 0:
                            return

            async def whole(prompt: str) -> str:
                body = settings | {"prompt": prompt, "stream": False}
                response = await client.post(f"{http.url}/v1/completions", json=body)
                return response.json()["choices"][0]["text"]

            beside = asyncio.gather(*map(whole, others))
            await asyncio.gather(*map(cut, prompts))
            again = await asyncio.gather(*map(whole, prompts))
            return list(again), list(await beside)

    assert asyncio.run(run()) == (expected, of_others)
    http.check_idle()
