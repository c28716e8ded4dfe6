"""OpenAI's client: asyncio, and the helpers that parse answers and collect streams."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from live_server import TIMEOUT_S
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.usefixtures("quick_compile")

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "tiny-chat", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 6}
COMPLETION: Any = {"model": "tiny-chat", "prompt": "hello", "temperature": 0, "max_tokens": 6}
RESPONSE: Any = {"model": "tiny-chat", "input": "hello", "temperature": 0, "max_output_tokens": 6}


class Weather(BaseModel):
    """Parameters of the tool `weather`, and content of constrained answers."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    warm: bool


def test_async_client_gets_what_the_sync_client_gets(http):
    sync = http.client
    expected = (
        sync.completions.create(**COMPLETION).choices[0].text,
        sync.chat.completions.create(**CHAT).choices[0].message.content,
        sync.responses.create(**RESPONSE).output_text,
    )

    async def run() -> list[tuple[str, ...]]:
        url = f"{http.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            assert [it.id async for it in await client.models.list()] == ["tiny-chat"]
            completion, chat, response = await asyncio.gather(
                client.completions.create(**COMPLETION),
                client.chat.completions.create(**CHAT),
                client.responses.create(**RESPONSE),
            )
            streams = await asyncio.gather(
                client.completions.create(**COMPLETION, stream=True),
                client.chat.completions.create(**CHAT, stream=True),
                client.responses.create(**RESPONSE, stream=True),
            )
            parts = [
                [chunk.choices[0].text async for chunk in streams[0]],
                [chunk.choices[0].delta.content or "" async for chunk in streams[1]],
                [event.delta async for event in streams[2] if event.type == "response.output_text.delta"],
            ]
        whole = (completion.choices[0].text, chat.choices[0].message.content, response.output_text)
        return [whole, tuple(map("".join, parts))]

    assert asyncio.run(run()) == [expected, expected]
    http.check_idle()


def test_answers_are_parsed_with_a_schema(http):
    settings = CHAT | {"temperature": 1.0, "max_completion_tokens": 200, "seed": 4}
    chat = http.client.chat.completions.parse(**settings, response_format=Weather)
    assert isinstance(chat.choices[0].message.parsed, Weather)
    json_object: Any = {"type": "json_object", "schema": Weather.model_json_schema()}
    chat = http.client.chat.completions.create(**settings, response_format=json_object)
    Weather.model_validate_json(chat.choices[0].message.content)
    settings = RESPONSE | {"temperature": 1.0, "max_output_tokens": 200}
    response = http.client.responses.parse(**settings, text_format=Weather)
    assert isinstance(response.output_parsed, Weather)


def test_helpers_gather_streamed_calls(http):
    """The helpers raise if an event does not fit the previous events."""
    tools: Any = [openai.pydantic_function_tool(Weather, name="weather")]
    settings = CHAT | {"temperature": 1.0, "max_completion_tokens": 200, "seed": 5}
    settings |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with http.client.chat.completions.stream(**settings) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    tool = {"type": "function", "name": "weather", "strict": True, "parameters": tools[0]["function"]["parameters"]}
    settings = RESPONSE | {"temperature": 1.0, "max_output_tokens": 200, "tools": [tool], "tool_choice": "required"}
    with http.client.responses.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert response.status == "completed"
    for item in response.output:
        assert (item.type, item.name) == ("function_call", "weather")
        Weather.model_validate_json(item.arguments)


def test_raw_responses_have_the_id_of_the_request(http):
    raw = http.client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-request-id"] == raw.parse().id
    with pytest.raises(openai.NotFoundError) as caught:
        http.client.chat.completions.create(**CHAT | {"model": "other"})
    assert (caught.value.code, caught.value.type) == ("model_not_found", "not_found_error")
