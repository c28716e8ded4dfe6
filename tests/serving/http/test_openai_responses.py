"""`/v1/responses` with OpenAI's client."""

from typing import Any

import openai
import pytest

from amoeba_jax import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY: Any = {"model": "tiny-chat", "temperature": 0, "max_output_tokens": 6}


def test_response_is_what_the_api_generates(http):
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected = http.llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))[0]
    answer = http.client.responses.create(**GREEDY, input="hello", instructions="be brief")
    assert answer.output_text == expected.outputs[0].text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(expected.prompt_token_ids), 6)
    assert answer.store is False
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")


def test_events_add_up_to_the_response(http):
    whole = http.client.responses.create(**GREEDY, input="hello")
    events = list(http.client.responses.create(**GREEDY, input="hello", stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    usages = [events[index].response.usage for index in (0, 1, -1)]
    assert {usage.input_tokens for usage in usages} == {whole.usage.input_tokens}
    assert usages[-1].output_tokens == 6
    with http.client.responses.stream(**GREEDY, input="hello") as stream:
        for _ in stream:
            pass


def test_end_of_sequence_completes_a_response(http):
    messages: Any = [{"role": "user", "content": "hello"}]
    tokens = http.llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    answer = http.client.responses.create(**GREEDY, input="hello", extra_body={"stop_token_ids": [tokens[3]]})
    assert answer.status == "completed"
    assert answer.incomplete_details is None
    assert answer.output[0].status == "completed"


def test_items_become_a_conversation(http):
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}], "id": "m"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    shown: Any = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": 'wait<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>',
        },
        {"role": "tool", "content": "rain"},
    ]
    expected = http.llm.chat(shown, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text
    assert http.client.responses.create(**GREEDY, input=items).output_text == expected


def test_logprobs_come_if_they_are_included(http):
    answer = http.client.responses.create(
        **GREEDY, input="hello", include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == 6
    assert all(len(it.top_logprobs) == 2 for it in logprobs)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"truncation": "middle"}, "truncation"),
    ],
)
def test_state_and_images_are_refused_by_name(http, changes: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        http.client.responses.create(**{**GREEDY, "input": "hello", **changes})
    assert caught.value.param == param
    http.check_idle()
