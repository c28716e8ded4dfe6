"""`/v1/chat/completions` with OpenAI's client."""

import asyncio
from typing import Any

import openai
import pytest
from live_server import TIMEOUT_S

from amoeba_jax import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
GREEDY: Any = {"model": "tiny-chat", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 6}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_answer_is_what_the_api_generates(http):
    expected = http.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=6))[0]
    answer = http.client.chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert (choice.finish_reason, choice.logprobs, choice.message.tool_calls) == ("length", None, None)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 6


def test_stream_adds_up_to_the_answer(http):
    chunks = list(http.client.chat.completions.create(**GREEDY, stream=True))
    answer = http.client.chat.completions.create(**GREEDY)
    assert text_of(chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counted = http.client.chat.completions.create(**GREEDY, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in counted]
    assert (counts[0], counts[-2:]) == (0, [6, 6])
    assert counts == sorted(counts)
    with http.client.chat.completions.stream(**GREEDY) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == answer.choices[0].message.content


def test_async_client_streams_many_conversations(http):
    async def run() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

        async def one(index: int) -> str:
            stream = await client.chat.completions.create(
                **GREEDY | {"messages": [{"role": "user", "content": f"number {index}"}]}, stream=True
            )
            return text_of([chunk async for chunk in stream])

        async with client:
            return await asyncio.gather(*map(one, range(12)))

    prompts: Any = [[{"role": "user", "content": f"number {index}"}] for index in range(12)]
    expected = http.llm.chat(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert asyncio.run(run()) == [output.outputs[0].text for output in expected]
    http.check_idle()


def test_logprobs_are_those_of_the_api(http):
    expected = http.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=6, logprobs=3))[0].outputs[0]
    settings = GREEDY | {"logprobs": True, "top_logprobs": 3}
    (choice,) = http.client.chat.completions.create(**settings).choices
    assert expected.logprobs is not None
    assert len(choice.logprobs.content) == 6
    for given, entry, token in zip(choice.logprobs.content, expected.logprobs, expected.token_ids, strict=True):
        assert (given.token, given.logprob) == (entry[token].decoded_token, entry[token].logprob)
        ranked = sorted(entry.values(), key=lambda it: it.rank)[:3]
        assert [it.logprob for it in given.top_logprobs] == [it.logprob for it in ranked]
    streamed = [
        entry
        for chunk in http.client.chat.completions.create(**settings, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert streamed == choice.logprobs.content


def test_logprobs_of_the_prompt_are_those_of_the_api(http):
    expected = http.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2))[0]
    settings = GREEDY | {"temperature": 1.0, "n": 2, "extra_body": {"prompt_logprobs": 2}}
    answer = http.client.chat.completions.create(**settings).model_dump()
    assert answer["prompt_logprobs"][0] is None
    for given, entry in zip(answer["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True):
        assert {token: it["logprob"] for token, it in given.items()} == {str(k): it.logprob for k, it in entry.items()}


def test_samples_are_independent(http):
    settings = GREEDY | {"temperature": 1.0, "seed": 3, "n": 3}
    answer = http.client.chat.completions.create(**settings)
    texts = [""] * 3
    for chunk in http.client.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3


def test_stop_string_ends_the_answer(http):
    whole = http.client.chat.completions.create(**GREEDY).choices[0].message.content
    stop = whole[2:4]
    (choice,) = http.client.chat.completions.create(**GREEDY, stop=[stop]).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", whole[: whole.index(stop)])
    assert choice.stop_reason == stop
    chunks = list(http.client.chat.completions.create(**GREEDY, stop=[stop], stream=True))
    assert text_of(chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_roles_and_parts_become_the_same_prompt(http):
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},
    ]
    answers = [
        http.client.chat.completions.create(**GREEDY | {"messages": messages}).choices[0].message.content
        for messages in (MESSAGES, parts)
    ]
    assert answers[0] == answers[1]


def test_fields_without_effect_are_accepted(http):
    answer = http.client.chat.completions.create(
        **GREEDY,
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="key",
        safety_identifier="me",
        user="me",
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "hello"},
        modalities=["text"],
        response_format={"type": "text"},
        tools=[WEATHER],
        tool_choice="none",
        stream_options=None,
    )
    assert answer.choices[0].message.content == http.client.chat.completions.create(**GREEDY).choices[0].message.content


def image(kind: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": "data:image/png;base64,AA=="}}]}]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": image("image_url")}, "messages[0].content[0].type"),
        ({"messages": image("input_audio")}, "messages[0].content[0].type"),
        ({"messages": image("file")}, "messages[0].content[0].type"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"audio": {"voice": "alloy", "format": "mp3"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"guided_decoding": "x"}}, "guided_decoding"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "named"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"tools": [WEATHER] * 129}, "tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http, changes: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        http.client.chat.completions.create(**GREEDY | changes)
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.type == "invalid_request_error"
    http.check_idle()


def test_answer_without_a_limit_needs_no_larger_instance(http):
    """By default, an answer may fill the context or the smallest instance."""
    capacity = min(4096, *(http.llm._engine.capacity_tokens(degree) for degree in (1, 2)))
    assert http.llm.default_max_tokens(10) == capacity - 10
    assert http.llm.default_max_tokens(10_000) == 1
    whole = http.client.chat.completions.create(**GREEDY).choices[0].message.content
    settings = {key: value for key, value in GREEDY.items() if key != "max_completion_tokens"}
    (choice,) = http.client.chat.completions.create(**settings, stop=whole[5]).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", whole[: whole.index(whole[5])])


def test_tool_messages_reach_the_template(http):
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    shown: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>',
        },
        {"role": "tool", "content": "rain"},
    ]
    answer = http.client.chat.completions.create(**GREEDY | {"messages": messages}, tools=[WEATHER], tool_choice="none")
    expected = http.llm.chat(shown, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text
    assert answer.choices[0].message.content == expected


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_every_length_is_equal_in_a_stream(http, tools: Any):
    for max_tokens in range(1, 61):
        settings = GREEDY | {"max_completion_tokens": max_tokens, "temperature": 1.0, "seed": max_tokens}
        if tools:
            settings["tools"] = tools
        (choice,) = http.client.chat.completions.create(**settings).choices
        chunks = list(http.client.chat.completions.create(**settings, stream=True))
        assert text_of(chunks) == choice.message.content
        assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    http.check_idle()
