"""Refusals of the HTTP server and their form."""

import json
import socket
from typing import Any

import httpx2
import openai
import pytest
from live_server import TIMEOUT_S
from pydantic import ValidationError

from serving.http_server import fields
from serving.http_server.errors import field_error

pytestmark = pytest.mark.usefixtures("quick_compile")

CHAT = {"model": "tiny-chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def post(http: Any, path: str, body: Any, **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes | str) else json.dumps(body)
    return httpx2.post(
        http.url + path, content=data, headers={"content-type": "application/json", **headers}, timeout=TIMEOUT_S
    )


def check_error(response: httpx2.Response, status: int) -> dict[str, Any]:
    """Return the error after checking that it has OpenAI's form and no details of this machine."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) <= 1000
    assert "/tmp" not in response.text
    assert "site-packages" not in response.text
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny-chat"',
        b"\xff\xfe",
        b'{"model": "tiny-chat", "messages": ' + b"[" * 100_000,
        b'{"a":' * 100_000,
        json.dumps(CHAT | {"stop": ["x"] * 17}),
        json.dumps(CHAT | {"stop": [["x"]]}),
        json.dumps(CHAT | {"stop_token_ids": [1] * 100_000}),
        json.dumps(CHAT | {"logit_bias": {str(index): 1 for index in range(5000)}}),
        json.dumps(CHAT | {"messages": CHAT["messages"] * 1025}),
        json.dumps(CHAT | {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
        json.dumps(CHAT | {"max_tokens": 10**30}),
        json.dumps(CHAT | {"n": 10**6}),
        json.dumps(CHAT | {"request_id": "x" * 200}),
        json.dumps(CHAT | {"request_id": "a\r\nb: c"}),
        json.dumps(CHAT | {"request_id": "\u00e9"}),
        json.dumps(CHAT | {"temperature": float("nan")}),
        json.dumps(CHAT | {"messages": [{"role": "user", "content": "\ud800"}]}),
    ],
    ids=str,
)
def test_bad_bodies_are_refused(http, body: Any):
    check_error(post(http, "/v1/chat/completions", body), 400)
    http.check_idle()


def test_error_names_its_field(http):
    error = check_error(post(http, "/v1/chat/completions", CHAT | {"surprise": 1}), 400)
    assert (error["param"], error["type"]) == ("surprise", "invalid_request_error")
    error = check_error(post(http, "/v1/chat/completions", {"messages": CHAT["messages"]}), 400)
    assert error["param"] == "model"


@pytest.mark.parametrize("changes", [{"max_tokens": 5000}, {"messages": [{"role": "user", "content": "x" * 5000}]}])
def test_requests_over_the_context_have_a_code_of_their_own(http, changes: dict[str, Any]):
    """Clients shorten the conversation if they get this code."""
    error = check_error(post(http, "/v1/chat/completions", CHAT | changes), 400)
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]


def test_unknown_model_and_path_are_not_found(http):
    error = check_error(post(http, "/v1/chat/completions", CHAT | {"model": "other"}), 404)
    assert "other" in error["message"]
    check_error(post(http, "/v1/nothing", CHAT), 404)
    check_error(httpx2.get(f"{http.url}/v1/models/other", timeout=TIMEOUT_S), 404)
    check_error(httpx2.get(f"{http.url}/v1/chat/completions", timeout=TIMEOUT_S), 405)
    for path in ("/docs", "/redoc", "/openapi.json"):
        check_error(httpx2.get(http.url + path, timeout=TIMEOUT_S), 404)


def test_other_content_types_are_refused(http):
    """Browsers let pages of other sites send these types without a preflight request."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        check_error(post(http, "/v1/chat/completions", CHAT, **{"content-type": kind}), 400)


def test_long_bodies_are_refused(start_http):
    with start_http(max_message_bytes=100_000) as http:
        body = CHAT | {"messages": [{"role": "user", "content": "x" * 2**20}]}
        error = check_error(post(http, "/v1/chat/completions", body), 413)
        assert "100000" in error["message"]

        def pieces():
            for _ in range(20):
                yield b" " * 10_000

        # The body is chunked and has no length. The server may close the connection before it has read all chunks.
        try:
            response = httpx2.post(
                f"{http.url}/v1/chat/completions",
                content=pieces(),
                headers={"content-type": "application/json"},
                timeout=TIMEOUT_S,
            )
        except httpx2.TransportError:
            pass
        else:
            check_error(response, 413)
        http.check_idle()


def test_tokens_are_needed_for_generation_only(start_http):
    with start_http(api_token="secret", admin_token="admin") as http:
        for token in (None, "wrong"):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            error = check_error(post(http, "/v1/chat/completions", CHAT, **headers), 401)
            assert error["code"] == "invalid_api_key"
            check_error(post(http, "/tokenize", {"prompt": "x"}, **headers), 401)
            check_error(httpx2.get(f"{http.url}/v1/models", headers=headers, timeout=TIMEOUT_S), 401)
        for token in ("secret", "admin"):
            assert post(http, "/v1/chat/completions", CHAT, authorization=f"Bearer {token}").status_code == 200
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert httpx2.get(http.url + path, timeout=TIMEOUT_S).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            http.client.models.list()


def test_full_server_says_when_to_come_again(start_http):
    with start_http(max_requests_per_client=1) as http, http.client as client:
        stream = client.chat.completions.create(
            model="tiny-chat", messages=CHAT["messages"], max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        response = post(http, "/v1/chat/completions", CHAT)
        error = check_error(response, 429)
        assert (error["type"], response.headers["retry-after"]) == ("rate_limit_error", "1")
        stream.close()
        http.check_idle()
        assert post(http, "/v1/chat/completions", CHAT).status_code == 200


def test_server_without_a_model_is_unavailable(loop):
    from serving.grpc_server.config import ServerConfig
    from serving.grpc_server.server import Server
    from serving.http_server.server import HttpServer

    config = ServerConfig(port=0, metrics_port=None)

    async def begin() -> tuple[Server, HttpServer]:
        server = Server(config)
        http = HttpServer(config, server.request_handler)
        await http.start(0)
        return server, http

    server, http = loop.run(begin())
    try:
        url = f"http://127.0.0.1:{http.port}"
        assert httpx2.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 503
        assert httpx2.get(f"{url}/version", timeout=TIMEOUT_S).status_code == 200
        for path, body in (("chat/completions", CHAT), ("completions", {"model": "m", "prompt": "x"})):
            response = httpx2.post(f"{url}/v1/{path}", json=body, timeout=TIMEOUT_S)
            assert check_error(response, 503)["type"] == "service_unavailable_error"
        assert httpx2.get(f"{url}/v1/models", timeout=TIMEOUT_S).status_code == 503
    finally:
        loop.run(http.stop())
        loop.run(server.stop())


def test_tokenize_and_detokenize(http):
    answer = post(http, "/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (http.llm.tokenizer.encode("hello"), 5, 4096)
    assert "".join(answer["token_strs"]) == "hello"
    spaced = post(http, "/tokenize", {"prompt": " h", "return_token_strs": True}).json()
    assert spaced["token_strs"] == ["\u0120", "h"]  # same as `convert_ids_to_tokens` of transformers
    assert post(http, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hello"}
    chat = post(http, "/tokenize", {"model": "tiny-chat", "messages": CHAT["messages"]}).json()
    assert http.llm.tokenizer.decode(chat["tokens"]) == "<user> x\n<assistant>"
    check_error(post(http, "/tokenize", {}), 400)
    check_error(post(http, "/detokenize", {"tokens": [256]}), 400)
    check_error(post(http, "/detokenize", {"tokens": [0] * 5000}), 400)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": ["x"] * 1000}, "tokens[0]"),
        ("/detokenize", {"tokens": {}}, "tokens"),
        ("/v1/chat/completions", CHAT | {"logit_bias": {str(index): "x" for index in range(1000)}}, None),
        ("/v1/chat/completions", CHAT | {"modalities": [1] * 1000}, "modalities"),
        ("/v1/chat/completions", CHAT | {str(index): 1 for index in range(1000)}, "the body"),
        ("/v1/chat/completions", CHAT | {"stream_options": dict.fromkeys(map(str, range(1000)))}, "stream_options"),
        ("/v1/responses", {"model": "tiny-chat", "input": "x", "include": [1] * 1000}, "include[0]"),
        ("/cluster/transform", {"tensor_parallel_size": 1, "devices": ["x"] * 1000}, "devices[0]"),
    ],
    ids=["tokens", "object", "bias", "modalities", "keys", "nested keys", "include", "devices"],
)
def test_bad_elements_are_not_collected(http, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str | None):
    """Each collected error would delay the event loop."""
    counts = []

    def count(error: ValidationError) -> Any:
        counts.append(error.error_count())
        return field_error(error)

    monkeypatch.setattr(fields, "field_error", count)
    assert check_error(post(http, path, body), 400)["param"] == param
    assert counts in ([], [1])


def test_replies_that_repeat_prompts_are_limited(start_http):
    """The limits apply to the sum over all samples of all prompts, also in streams."""
    with start_http(max_reply_entries=60, max_echo_bytes=100) as http:
        body = {"model": "tiny-chat", "prompt": ["x" * 10] * 2, "max_tokens": 1}
        for more, name in (
            ({"echo": True, "n": 6}, "max_echo_bytes"),
            ({"echo": True, "logprobs": 1, "n": 2}, "max_reply_entries"),
            ({"return_token_ids": True, "n": 4}, "max_reply_entries"),
        ):
            for streams in (False, True):
                answer = post(http, "/v1/completions", body | more | {"stream": streams})
                assert name in check_error(answer, 400)["message"]
            assert post(http, "/v1/completions", body | more | {"n": 1}).status_code == 200
        http.check_idle()


def test_replies_of_every_endpoint_are_limited(start_http):
    with start_http(max_reply_entries=4) as http:
        for path, body in (
            ("/v1/completions", {"model": "tiny-chat", "prompt": "x", "max_tokens": 8}),
            ("/v1/chat/completions", CHAT | {"max_tokens": 8}),
            ("/v1/responses", {"model": "tiny-chat", "input": "x", "max_output_tokens": 8}),
        ):
            answer = post(http, path, body | {"ignore_eos": True})
            assert "max_reply_entries" in check_error(answer, 400)["message"]
        http.check_idle()


def test_a_stream_has_the_token_ids_of_its_prompt_once(http):
    body = CHAT | {"n": 2, "temperature": 1, "stream": True, "return_token_ids": True}
    text = post(http, "/v1/chat/completions", body).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert prompts == [http.llm.tokenizer.encode("<user> x\n<assistant>")]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["metadata", "tools"])
def test_numbers_that_json_lacks_are_refused(http, number: str, field: str):
    tools = [{"type": "function", "name": "f", "parameters": {"maximum": "NUMBER"}}]
    body = {"model": "tiny-chat", "input": "x", "metadata": {"x": "NUMBER"}, "tools": tools, "max_output_tokens": 1}
    del body["tools" if field == "metadata" else "metadata"]
    check_error(post(http, "/v1/responses", json.dumps(body).replace('"NUMBER"', number)), 400)


def test_definitions_of_tools_must_be_objects(http):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": [1]}}}
    error = check_error(post(http, "/v1/chat/completions", CHAT | {"tools": [tool], "tool_choice": "required"}), 400)
    assert error["param"] == "tools.parameters.$defs"


def test_metrics_count_http_requests(http):
    def prompt_tokens() -> float:
        text = httpx2.get(f"{http.url}/metrics", timeout=TIMEOUT_S).text
        (line,) = [it for it in text.splitlines() if it.startswith("amoeba:prompt_tokens_total")]
        return float(line.split()[-1])

    before = prompt_tokens()
    assert post(http, "/v1/completions", {"model": "tiny-chat", "prompt": "hello"}).status_code == 200
    assert prompt_tokens() == before + 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_allowed_tools_are_limited_and_differ(http, path: str):
    """The prompt would contain a tool's description once for each name."""
    tool: dict[str, Any] = {"type": "function", "name": "f"}
    named: Any = {"type": "allowed_tools", "mode": "auto", "tools": [tool] * 2}
    body = {"model": "tiny-chat", "input": "x", "max_output_tokens": 1, "tools": [tool], "tool_choice": named}
    if path == "/v1/chat/completions":
        tool = {"type": "function", "function": {"name": "f"}}
        named = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool] * 2}}
        body = CHAT | {"tools": [tool], "tool_choice": named}
    assert "twice" in check_error(post(http, path, body), 400)["message"]
    named.get("allowed_tools", named)["tools"] = [tool] * 129
    assert "max_tools" in check_error(post(http, path, body), 400)["message"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_host_of_all_addresses_serves_ipv4_and_ipv6(start_http):
    with start_http(host="::") as http:
        for host in ("127.0.0.1", "[::1]"):
            answer = httpx2.get(f"http://{host}:{http.http.port}/version", timeout=TIMEOUT_S)
            assert answer.status_code == 200
