"""Constrained text and forced tool calls over HTTP."""

import json
import threading
from typing import Any

import openai
import pytest
from harness import registry_of
from live_server import TIMEOUT_S

from amoeba_jax import StructuredOutput
from amoeba_jax.sampling import structured

pytestmark = pytest.mark.usefixtures("quick_compile")

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SAMPLED: Any = {"model": "tiny-chat", "messages": MESSAGES, "temperature": 1.0, "max_completion_tokens": 200}
# Short enough for a model that writes at random.
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
    """Also if the text ends with it, and not with an end-of-sequence token."""
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


def test_known_grammars_do_not_wait_for_new_ones(http, monkeypatch: pytest.MonkeyPatch):
    """A client cannot fill the queue of new grammars."""
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


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_of_every_length_are_equal_in_a_stream(http, choice: Any):
    for max_tokens in range(1, 61):
        settings = SAMPLED | {"tools": TOOLS, "tool_choice": choice, "seed": 5, "max_completion_tokens": max_tokens}
        (whole,) = http.client.chat.completions.create(**settings).choices
        chunks = [chunk.choices[0] for chunk in http.client.chat.completions.create(**settings, stream=True)]
        names, arguments = [], {}
        for chunk in chunks:
            for call in chunk.delta.tool_calls or ():
                if call.function.name:
                    names.append(call.function.name)
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
        expected = whole.message.tool_calls or []
        assert names == [call.function.name for call in expected]
        assert list(arguments.values()) == [call.function.arguments for call in expected]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (whole.message.content or "")
        assert chunks[-1].finish_reason == whole.finish_reason
