"""A bad request fails alone. Its message names the value and the limit."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import CHAT_TEMPLATE, tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import RequestOutput

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
GOOD = [[5, 6, 7], [8, 9]]
A = 261
"""The token of " a"."""
SETTINGS: dict[str, Any] = {
    "device_memory": "16MiB",
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "progress": False,
}

# Prompt, settings and a pattern of the message, by fault.
BAD_REQUESTS: dict[str, tuple[Any, SamplingParams, str]] = {
    "token above": ([1, 512], GREEDY, r"token id 512 at position 1 .*\[0, 512\)"),
    "token below": ([1, 2, -1], GREEDY, r"token id -1 at position 2 .*\[0, 512\)"),
    "token is a float": ([1, 2.0], GREEDY, r"token id 2\.0 at position 1"),
    "token is a bool": ([1, True], GREEDY, r"token id True at position 1"),
    "token is a list": ([1, [2]], GREEDY, r"token id \[2\] at position 1"),
    "token is huge": ([10**30], GREEDY, rf"token id {10**30} at position 0"),
    "array of floats": (np.array([1.5, 2]), GREEDY, r"token id .*1\.5.* at position 0"),
    "array of two dimensions": (np.ones((2, 2), int), GREEDY, "at position 0 is outside the vocabulary"),
    "array of no dimension": (np.array(5), GREEDY, "a prompt must be a text or a list of token ids"),
    "empty": ([], GREEDY, "the prompt is empty"),
    "nothing": (None, GREEDY, "got NoneType"),
    "number": (1.5, GREEDY, "got float"),
    "bytes": (b"abc", GREEDY, "got bytes"),
    "surrogate": ("a\ud800", GREEDY, "valid Unicode"),
    "too long": ([1] * 600, GREEDY, "prompt of 600 tokens plus max_tokens=4 is 604 tokens, over the limit of 512"),
    "too long by one": ([1] * 509, GREEDY, "prompt of 509 tokens plus max_tokens=4 is 513 tokens.* limit of 512"),
    "max_tokens": ([1], SamplingParams(max_tokens=10**9), "max_tokens=1000000000 .* limit of 512"),
    "logit_bias": ([1], SamplingParams(logit_bias={3: 1, 512: 1}), r"logit_bias .* 512, .*\[0, 512\)"),
    "allowed_token_ids": ([1], SamplingParams(allowed_token_ids=[3, 600]), r"allowed_token_ids .* 600, .*\[0, 512\)"),
    "stop_token_ids": ([1], SamplingParams(stop_token_ids=[10**30]), rf"stop_token_ids .* {10**30}, .*\[0, 512\)"),
    "only a bad word": (
        [1],
        SamplingParams(allowed_token_ids=[A], bad_words=["a"]),
        r"\) and bad_words leave no token",
    ),
    "only an end": ([1], SamplingParams(allowed_token_ids=[2], min_tokens=5), "and min_tokens=5 leave no token"),
}


@pytest.fixture(scope="module")
def llm(shared_data: Path, compile_cache: str) -> Iterator[LLM]:
    with LLM(shared_data / "models" / "stories260K", compile_cache=compile_cache, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple[int, ...]]:
    return [tokens(output) for output in llm.generate(GOOD, GREEDY)]


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_request_fails_alone(llm: LLM, expected: list, prompt: Any, params: SamplingParams, message: str):
    first, bad, last = llm.generate([GOOD[0], prompt, GOOD[1]], [GREEDY, params, GREEDY])
    assert [tokens(first), tokens(last)] == expected
    assert (first.error, last.error) == (None, None)
    assert bad.outputs == ()
    assert bad.error is not None
    assert re.search(message, bad.error), bad.error
    check_idle(llm)


def test_all_bad_requests_at_once(llm: LLM, expected: list):
    prompts = [prompt for prompt, _, _ in BAD_REQUESTS.values()]
    params = [params for _, params, _ in BAD_REQUESTS.values()]
    *bad, first, last = llm.generate(prompts + GOOD, [*params, GREEDY, GREEDY])
    assert all(output.error for output in bad)
    assert [tokens(first), tokens(last)] == expected


def test_bad_conversation_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    assert llm.tokenizer is not None
    hello, bad = [{"role": "user", "content": "hello"}], [{"role": "user", "content": 7}]
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([hello, bad], GREEDY)
    monkeypatch.setattr(llm.tokenizer._fast, "chat_template", CHAT_TEMPLATE)
    (expected,) = llm.chat(hello, GREEDY)
    outputs = llm.chat([hello, bad, [], hello], [GREEDY] * 4)
    assert [tokens(outputs[0]), tokens(outputs[3])] == [tokens(expected)] * 2
    assert [output.outputs for output in outputs[1:3]] == [(), ()]
    assert outputs[1].error == "messages[0] needs a string 'content', not 7"
    assert outputs[2].error is not None
    for alone in (bad, [bad]):
        with pytest.raises(RequestError, match="needs a string 'content', not 7"):
            llm.chat(alone, GREEDY)
    check_idle(llm)


def test_id_that_is_taken_fails_alone(llm: LLM, expected: list):
    first, second, last = llm.generate([GOOD[0], GOOD[0], GOOD[1]], GREEDY, request_ids=["a", "a", "b"])
    assert [tokens(first), tokens(last)] == expected
    assert second.error == "request_id 'a' is taken by an unfinished request"


@pytest.mark.parametrize(
    ("prompt", "params", "what"),
    [
        ("text", GREEDY, "a text prompt"),
        ([1], SamplingParams(stop="x"), "stop"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words"),
    ],
    ids=["text", "stop", "bad_words"],
)
def test_what_needs_a_tokenizer_fails_alone(
    tmp_path: Path, compile_cache: str, prompt: Any, params: SamplingParams, what: str
):
    with LLM(tiny_model("llama2", tmp_path), compile_cache=compile_cache, **SETTINGS) as llm:
        good, bad = llm.generate([GOOD[0], prompt], [GREEDY, params])
        assert good.error is None
        assert len(tokens(good)) == 4
        assert bad.error == f"{what} needs a tokenizer, and the model has no tokenizer.json: give token ids"


def test_settings_that_leave_no_token_harm_nobody(llm: LLM, expected: list):
    """After the first token, every token is banned. Later tokens are undefined but valid, and the request ends."""
    params = SamplingParams(allowed_token_ids=[A], bad_words=["a a"], max_tokens=4, ignore_eos=True, seed=1)
    first, odd, last = llm.generate([GOOD[0], [1, 2], GOOD[1]], [GREEDY, params, GREEDY])
    assert [tokens(first), tokens(last)] == expected
    assert (len(tokens(odd)), tokens(odd)[0]) == (4, A)
    assert tokens(odd) != (A,) * 4
    assert all(0 <= token < 512 for token in tokens(odd))
    check_idle(llm)
