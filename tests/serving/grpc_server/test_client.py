"""`amoeba_jax.client`, for threads and for asyncio."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from live_server import GREEDY, TIMEOUT_S, Live, LoopThread
from typer.testing import CliRunner

from amoeba_jax import SamplingParams
from amoeba_jax.client import AsyncClient, Client, Retries
from amoeba_jax.errors import RequestError
from serving.cli import app
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.server import Server

pytestmark = pytest.mark.usefixtures("quick_compile")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_generate_has_what_the_api_has(live: Live):
    params = SamplingParams(n=2, temperature=0.7, seed=4, max_tokens=6, logprobs=1, prompt_logprobs=2)
    expected = live.llm.generate("hello", params)[0]
    assert expected.prompt_logprobs is not None
    with Client(live.target) as client:
        generations = client.generate("hello", params, request_id="mine", timeout_s=TIMEOUT_S)
    for generation, output in zip(generations, expected.outputs, strict=True):
        assert (generation.request_id, generation.index) == ("mine", output.index)
        assert (generation.text, generation.token_ids) == (output.text, output.token_ids)
        assert (generation.finish_reason, generation.stop_reason) == (output.finish_reason, output.stop_reason)
        assert generation.logprobs == output.logprobs
        assert generation.prompt_logprobs == expected.prompt_logprobs
        own = [next(iter(position)) for position in (generation.prompt_logprobs or ()) if position is not None]
        assert own == list(expected.prompt_token_ids[1:]), "each position's own token is the first"
        assert generation.usage.completion_tokens == 12
    with Client(live.target) as client:
        assert client.generate("hello", GREEDY)[0].prompt_logprobs is None
    live.check_idle()


def test_leaving_the_loop_ends_the_request(live: Live):
    with Client(live.target) as client:
        params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        for chunk in client.stream([72, 101], params):
            assert chunk.token_ids
            break
        live.check_idle()


def test_every_other_call(live: Live):
    conversation = [{"role": "user", "content": "hello"}]
    assert live.llm.tokenizer is not None
    with Client(live.target) as client:
        assert client.detokenize(client.tokenize("déjà")) == "déjà"
        assert client.tokenize(conversation) == live.llm.tokenizer.apply_chat_template(conversation)
        assert client.model_info().max_model_len == 4096
        assert client.abort("no one") is False
        assert client.cluster().state == "ready"
        assert next(client.watch_cluster(0.1)).instances[0].tensor_parallel_size == 1
        assert client.transform(2).tensor_parallel_size == 2
        assert client.transform(1, [0, 1], "in_place", layers_per_step=2).tensor_parallel_size == 1
        answer = client.generate(conversation, GREEDY)[0]
        assert answer.token_ids == live.llm.chat(conversation, GREEDY)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="variant"):
            client.transform(2, variant="magic")
        with pytest.raises(RequestError, match="prompt must be"):
            client.generate([1.5])  # type: ignore[list-item]
        with pytest.raises(RequestError, match="role"):
            client.generate([{"content": "x"}])
    live.check_idle()


def test_asyncio_client_does_the_same(live: Live):
    async def use() -> list:
        async with AsyncClient(live.target) as client:
            generations = await asyncio.gather(*(client.generate(f"request {i}", GREEDY) for i in range(8)))
            assert await client.detokenize(await client.tokenize("déjà")) == "déjà"
            assert (await client.model_info()).model == "tiny-chat"
            assert (await client.cluster()).state == "ready"
            assert (await client.transform(2)).tensor_parallel_size == 2
            assert (await client.transform(1)).tensor_parallel_size == 1
            assert not await client.abort("no one")
            watch = client.watch_cluster(0.1)
            assert (await anext(watch)).state == "ready"
            await watch.aclose()
            stream = client.stream("hello", SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            return [generation[0].token_ids for generation in generations]

    tokens = asyncio.run(use())
    expected = live.llm.generate([f"request {i}" for i in range(8)], GREEDY)
    assert tokens == [output.outputs[0].token_ids for output in expected]
    live.check_idle()


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_server_that_is_loading_is_tried_again(start: Callable[..., Live], kind: str):
    live = start(attach=False)
    retries = Retries(attempts=60, first_delay_s=0.05, longest_delay_s=0.2)
    refused = live.server.request_handler

    def ask() -> tuple[int, ...]:
        if kind == "sync":
            with Client(live.target, retries=retries) as client:
                return client.generate("hello", GREEDY, timeout_s=TIMEOUT_S)[0].token_ids

        async def use() -> tuple[int, ...]:
            async with AsyncClient(live.target, retries=retries) as client:
                return (await client.generate("hello", GREEDY, timeout_s=TIMEOUT_S))[0].token_ids

        return asyncio.run(use())

    was_refused = _first_refusal(live)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask)
        assert live.loop.run(asyncio.wait_for(was_refused, TIMEOUT_S))
        assert refused.state.name == "LOADING"
        live.loop.run(live.server.attach(live.llm))
        assert answer.result(TIMEOUT_S) == live.llm.generate("hello", GREEDY)[0].outputs[0].token_ids


async def _set(event: asyncio.Event) -> bool:
    await event.wait()
    return True


def _first_refusal(live: Live):
    """Return an awaitable that ends when the server refuses a call."""
    event = asyncio.Event()
    request_handler = live.server.request_handler
    original = request_handler.check_model

    def check(name: str) -> None:
        event.set()
        original(name)

    request_handler.check_model = check  # type: ignore[method-assign]
    return _set(event)


def test_tries_end_with_the_deadline():
    """Nothing listens on the port. A thousand attempts would take minutes."""
    retries = Retries(attempts=1000, first_delay_s=0.05, longest_delay_s=0.1)
    with Client(f"127.0.0.1:{free_port()}", retries=retries) as client, pytest.raises(grpc.RpcError) as caught:
        client.model_info(timeout_s=0.5)
    assert caught.value.code() in (  # type: ignore[attr-defined]
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def test_tries_are_counted(start: Callable[..., Live]):
    live = start(attach=False)
    calls = []
    original = live.server.request_handler.check_model

    def check(name: str) -> None:
        calls.append(name)
        original(name)

    live.server.request_handler.check_model = check  # type: ignore[method-assign]
    with Client(live.target, retries=Retries(attempts=3, first_delay_s=0.01)) as client:
        with pytest.raises(grpc.RpcError, match="loading"):
            client.tokenize("x")
        assert len(calls) == 3


BAD = "a\ud800"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda client: client.generate(BAD), "the prompt"),
        (lambda client: client.generate([{"role": "user", "content": BAD}]), r"messages\[0\].content"),
        (lambda client: client.generate([{"role": BAD, "content": "x"}]), r"messages\[0\].role"),
        (lambda client: client.generate("x", request_id=BAD), "request_id"),
        (lambda client: client.generate("x", cache_salt=BAD), "cache_salt"),
        (lambda client: client.tokenize(BAD), "the text"),
        (lambda client: client.abort(BAD), "request_id"),
        (lambda client: client.set_policy(BAD), "policy"),
    ],
)
def test_text_that_is_no_unicode_is_refused_by_the_client(call: Callable[..., Any], name: str, loop: LoopThread):
    """The client sends nothing: no server listens on the port."""
    expected = rf"^{name} must be valid Unicode: character 1 is the unpaired surrogate U\+D800$"
    with Client("127.0.0.1:1") as client, pytest.raises(RequestError, match=expected):
        call(client)

    async def run() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await call(client)

    with pytest.raises(RequestError, match=expected):
        loop.run(run())


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment to a proxy that does not answer, and return its address."""
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("http_proxy", f"http://user:secret@{address}")
    return address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "dns:///127.0.0.1"])
def test_servers_of_this_machine_are_reached_without_the_proxy(live: Live, proxy: str, host: str):
    target = f"{host}:{live.server.port}"
    with Client(target) as client:
        assert client.tokenize("x", timeout_s=TIMEOUT_S)

    async def run() -> None:
        async with AsyncClient(target) as client:
            assert await client.tokenize("x", timeout_s=TIMEOUT_S)

    live.loop.run(run())


def test_errors_behind_a_proxy_name_its_variable(proxy: str, loop: LoopThread):
    once = Retries(attempts=1)
    with Client("node.invalid:1", retries=once) as client:
        for call in (client.model_info, lambda: client.transform(2), lambda: next(client.watch_cluster())):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            (note,) = caught.value.__notes__
            assert "http_proxy" in note
            assert "no_proxy" in note
            assert "secret" not in note

    async def run() -> None:
        async with AsyncClient("node.invalid:1", retries=once) as client:
            await client.model_info()

    with pytest.raises(grpc.RpcError) as caught:
        loop.run(run())
    assert "http_proxy" in caught.value.__notes__[0]
    said = CliRunner().invoke(app, ["transform", "2", "--target", "node.invalid:1"]).stderr
    assert "UNAVAILABLE" in said
    assert "http_proxy" in said


def test_errors_without_a_proxy_name_none(proxy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "localhost, .invalid")
    with Client("node.invalid:1", retries=Retries(attempts=1)) as client, pytest.raises(grpc.RpcError) as caught:
        client.model_info()
    assert not hasattr(caught.value, "__notes__")


def test_client_needs_no_jax():
    code = "import sys, amoeba_jax.client; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_port_that_is_taken_is_a_config_error():
    loop = LoopThread()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        async def run() -> None:
            server = Server(ServerConfig(port=taken.getsockname()[1], metrics_port=None))
            try:
                await server.start()
            finally:
                await server.stop()

        with pytest.raises(ValueError, match="cannot be bound"):
            loop.run(run())
    loop.close()
