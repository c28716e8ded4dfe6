"""Constrained text and forced tool calls over HTTP."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
from harness import registry_of
from live_server import TIMEOUT_S

from amoeba_jax import SamplingParams, StructuredOutput
from amoeba_jax.sampling import structured
from serving.http_server import chat_generation
from serving.http_server.chat_generation import ChatGeneration

pytestmark = pytest.mark.usefixtures("quick_compile")

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SAMPLED: Any = {"model": "tiny-chat", "messages": MESSAGES, "temperature": 1.0, "max_completion_tokens": 200}
# Short enough for a model that generates random text.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "warm"}
    assert value["city"] in ("Oslo", "Rome")
    assert isinstance(value["warm"], bool)


@pytest.mark.parametrize("seed", range(3))
def test_response_format_is_kept(http, seed: int):
    answer = http.client.chat.completions.create(**SAMPLED, response_format=FORMAT, seed=seed)
    assert answer.choices[0].finish_reason == "stop"
    check(answer.choices[0].message.content)
    chunks = list(http.client.chat.completions.create(**SAMPLED, response_format=FORMAT, seed=seed, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


def test_vllm_constraints_are_kept(http):
    def complete(constraint: dict[str, Any]) -> str:
        return (
            http.client.completions.create(
                model="tiny-chat", prompt="x", max_tokens=100, seed=1, extra_body={"structured_outputs": constraint}
            )
            .choices[0]
            .text
        )

    assert complete({"choice": ["yes", "no"]}) in ("yes", "no")
    assert complete({"regex": "[a-c]{3}"}).strip("abc") == ""
    assert complete({"grammar": 'start: "ab" | "ba"'}) in ("ab", "ba")
    check(complete({"json": SCHEMA}))


def test_responses_keep_their_format(http):
    answer = http.client.responses.create(
        model="tiny-chat",
        input="hello",
        max_output_tokens=200,
        text={"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}},
    )
    assert answer.status == "completed"
    check(answer.output_text)
    answer = http.client.responses.create(
        model="tiny-chat",
        input="hello",
        max_output_tokens=200,
        tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
    )
    (item,) = answer.output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")
    check(item.arguments)


@pytest.mark.parametrize("streams", [False, True])
def test_named_tool_is_called(http, streams: bool):
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    settings = SAMPLED | {"tools": TOOLS, "tool_choice": choice, "seed": 1}
    if streams:
        chunks = [chunk.choices[0] for chunk in http.client.chat.completions.create(**settings, stream=True)]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert {call.index for call in calls} == {0}
        names = [call.function.name for call in calls if call.function.name]
        arguments = "".join(call.function.arguments for call in calls)
        reason = chunks[-1].finish_reason
    else:
        (answer,) = http.client.chat.completions.create(**settings).choices
        (call,) = answer.message.tool_calls
        assert answer.message.content is None
        names, arguments, reason = [call.function.name], call.function.arguments, answer.finish_reason
    assert (names, reason) == (["weather"], "stop")
    check(arguments)


@pytest.mark.parametrize("streams", [False, True])
def test_required_calls_name_known_tools(http, streams: bool):
    settings = SAMPLED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    if streams:
        chunks = [chunk.choices[0] for chunk in http.client.chat.completions.create(**settings, stream=True)]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        reason = chunks[-1].finish_reason
    else:
        (answer,) = http.client.chat.completions.create(**settings).choices
        calls, reason = answer.message.tool_calls, answer.finish_reason
    (call,) = calls
    assert (call.type, reason) == ("function", "tool_calls")
    assert call.function.name in ("weather", "time")
    if call.function.name == "weather":
        check(call.function.arguments)
    else:
        assert json.loads(call.function.arguments) == {}


def test_last_token_of_constrained_text_has_a_logprob(http):
    """This text ends with its last token, without an end-of-sequence token."""
    settings = SAMPLED | {"logprobs": True, "extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}}
    (choice,) = http.client.chat.completions.create(**settings).choices
    assert choice.finish_reason == "stop"
    assert "".join(it.token for it in choice.logprobs.content) == choice.message.content
    assert len(choice.message.content) == 3


def test_bad_schemas_are_refused(http):
    for schema in ({"type": "strange"}, {"$ref": "#/$defs/none"}):
        format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError):
            http.client.chat.completions.create(**SAMPLED, response_format=format)
    with pytest.raises(openai.BadRequestError) as caught:
        http.client.chat.completions.create(**SAMPLED, response_format=FORMAT, tools=TOOLS)
    assert caught.value.param == "tools"
    http.check_idle()


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": {"const": "x" * 2**20}}, "over the limit of 131072"),
        ({"json": {"$ref": "#"}}, "allows no text"),
        ({"regex": "(" * 2**16}, "cannot be used"),
    ],
    ids=["size", "recursive", "parentheses"],
)
def test_bombs_are_refused_beside_other_requests(http, constraint: dict[str, Any], reason: str):
    settings: dict[str, Any] = {"model": "tiny-chat", "prompt": "x", "temperature": 0, "max_tokens": 60}
    expected = http.client.completions.create(**settings).choices[0].text
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(http.client.completions.create, **settings)
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            http.client.completions.create(**settings, extra_body={"structured_outputs": constraint})
        assert caught.value.status_code == 400
        assert other.result(TIMEOUT_S).choices[0].text == expected
    http.check_idle()


def test_known_grammars_do_not_wait_for_new_ones(http, monkeypatch: pytest.MonkeyPatch):
    """If a client has too many new grammars, known grammars still work."""
    known, new = {"regex": "[ab]{2}"}, {"regex": "[cd]{2}"}

    def complete(constraint: dict[str, Any]) -> str:
        settings = {"model": "tiny-chat", "prompt": "x", "max_tokens": 8}
        return http.client.completions.create(**settings, extra_body={"structured_outputs": constraint}).choices[0].text

    complete(known)
    go_on, compiler = threading.Event(), registry_of(http.llm).grammars()

    def trial(_: str) -> str:
        go_on.wait(TIMEOUT_S)
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(structured, "_trial", trial)
        slow = [StructuredOutput(regex=f"x{{{index}}}") for index in range(1, structured.MAX_PENDING_GRAMMARS + 1)]
        compilations = [compiler.compile_soon(it, "127.0.0.1") for it in slow]
        try:
            assert compiler.compile_soon(slow[0], "127.0.0.1") is compilations[0]
            assert complete(known).strip("ab") == ""
            with pytest.raises(openai.RateLimitError, match="new grammars of this client"):
                complete(new)
        finally:
            go_on.set()
        for it in compilations:
            assert it is not None
            it.result(TIMEOUT_S)
    assert complete(new).strip("cd") == ""


Answer = tuple[str, str, list[tuple[str, str]], str]


def whole_answer(http, settings: dict[str, Any]) -> Answer:
    """Return the reasoning, content, calls and finish reason."""
    (choice,) = http.client.chat.completions.create(**settings).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return reasoning, choice.message.content or "", calls, choice.finish_reason


def streamed_answer(http, settings: dict[str, Any]) -> Answer:
    """Return the same fields, collected from a stream."""
    chunks = [chunk.choices[0] for chunk in http.client.chat.completions.create(**settings, stream=True)]
    names, arguments = [], dict[int, str]()
    for call in [call for chunk in chunks for call in chunk.delta.tool_calls or ()]:
        if call.function.name:
            names.append(call.function.name)
        arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert list(arguments) == list(range(len(names)))
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    reasoning = "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks)
    content = "".join(chunk.delta.content or "" for chunk in chunks)
    calls = list(zip(names, arguments.values(), strict=True))
    return reasoning, content, calls, chunks[-1].finish_reason or ""


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_of_every_length_are_equal_in_a_stream(http, choice: Any):
    settings = SAMPLED | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 2}
    answers = []
    for max_tokens in [*range(1, 61), 200]:
        settings["max_completion_tokens"] = max_tokens
        answers.append(whole_answer(http, settings))
        assert streamed_answer(http, settings) == answers[-1]
    assert answers[0][3] == "length"
    assert answers[-1][3] == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.slow
def test_reasoning_and_free_calls_of_every_length_are_equal_in_a_stream(http, monkeypatch: pytest.MonkeyPatch):
    """A constraint makes the random model write reasoning, content and a call."""
    text = StructuredOutput(choice=['<think>hm</think>ok<tool_call>{"name": "time"}</tool_call>'])
    start = ChatGeneration._start

    def forced(self: ChatGeneration, tokens: list[int]) -> SamplingParams:
        return replace(start(self, tokens), structured=text)

    monkeypatch.setattr(ChatGeneration, "_start", forced)
    monkeypatch.setattr(chat_generation, "reasons", lambda _: True)
    answers = []
    for max_tokens in range(1, 61):
        settings = SAMPLED | {"tools": TOOLS, "max_completion_tokens": max_tokens}
        answers.append(whole_answer(http, settings))
        assert streamed_answer(http, settings) == answers[-1]
    assert answers[-1] == ("hm", "ok", [("time", "{}")], "tool_calls")
    assert answers[8] == ("hm", "", [], "length")
    http.check_idle()
