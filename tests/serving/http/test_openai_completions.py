"""`/v1/completions` with OpenAI's client."""

import numpy as np
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


def test_settings_reach_the_engine(http):
    """Every setting has the same effect as in the Python API."""
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    more = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True}
    params = SamplingParams(n=2, max_tokens=6, logit_bias={65: 2.0}, stop=["zz"], **settings, **more)
    expected = http.llm.generate("hello", params)[0]
    answer = http.client.completions.create(
        model="tiny-chat",
        prompt="hello",
        n=2,
        max_tokens=6,
        logit_bias={"65": 2},
        stop="zz",
        extra_body=more,
        **settings,
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]


def test_several_prompts_are_numbered(http):
    prompts = ["one", "two", "three"]
    answer = http.client.completions.create(model="tiny-chat", prompt=prompts, n=2, max_tokens=3, seed=1)
    alone = [
        choice.text
        for prompt in prompts
        for choice in http.client.completions.create(
            model="tiny-chat", prompt=prompt, n=2, max_tokens=3, seed=1
        ).choices
    ]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage.prompt_tokens == 2 * 0 + sum(map(len, prompts))
    texts = [""] * 6
    for chunk in http.client.completions.create(
        model="tiny-chat", prompt=prompts, n=2, max_tokens=3, seed=1, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_has_the_logprobs_of_the_prompt(http, max_tokens: int):
    tokens = http.llm.tokenizer.encode("hello world")
    logits = np.float64(http.llm.logits(tokens))
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    answer = http.client.completions.create(
        model="tiny-chat", prompt=tokens, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    (choice,) = answer.choices
    given = choice.logprobs
    assert choice.text.startswith("hello world")
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens
    assert len(given.tokens) == len(given.token_logprobs) == len(given.text_offset) == len(tokens) + max_tokens
    assert given.token_logprobs[0] is None
    expected = [logprobs[position - 1, tokens[position]] for position in range(1, len(tokens))]
    np.testing.assert_allclose(given.token_logprobs[1 : len(tokens)], expected, atol=2e-3)
    best = [max(top.values()) for top in given.top_logprobs[1 : len(tokens)]]
    np.testing.assert_allclose(best, logprobs[:-1].max(-1)[: len(best)], atol=2e-3)
    assert "".join(given.tokens) == choice.text
    assert given.text_offset == list(np.cumsum([0, *map(len, given.tokens[:-1])]))


def test_a_stop_token_has_a_logprob(http):
    tokens = http.llm.generate("hello", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    answer = http.client.completions.create(
        model="tiny-chat",
        prompt="hello",
        echo=True,
        logprobs=1,
        max_tokens=8,
        temperature=0,
        extra_body={"stop_token_ids": [tokens[2]]},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens) == 5 + answer.usage.completion_tokens


def test_echo_in_a_stream_comes_first(http):
    chunks = http.client.completions.create(
        model="tiny-chat", prompt="hello", echo=True, max_tokens=3, temperature=0, stream=True
    )
    whole = http.client.completions.create(model="tiny-chat", prompt="hello", echo=True, max_tokens=3, temperature=0)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole.choices[0].text
    assert text.startswith("hello")


def test_models_and_version(http):
    (model,) = http.client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny-chat", "model", 4096)
    assert http.client.models.retrieve("tiny-chat").id == "tiny-chat"
