"""`/v1/completions` with OpenAI's client."""

import pytest

from amoeba_jax import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_completion_is_what_the_api_generates(http):
    expected = http.llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))[0]
    answer = http.client.completions.create(model="tiny-chat", prompt="hello", temperature=0, max_tokens=8)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.outputs[0].text, "length", 0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert (answer.object, answer.model) == ("text_completion", "tiny-chat")
    http.check_idle()


def test_stream_adds_up_to_the_completion(http):
    settings = {"model": "tiny-chat", "prompt": "hello", "temperature": 0, "max_tokens": 8}
    answer = http.client.completions.create(**settings)
    chunks = list(http.client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == answer.choices[0].text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-2].choices[0].finish_reason == "length"
    unasked = list(http.client.completions.create(**settings, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in unasked)
