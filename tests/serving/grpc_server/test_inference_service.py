"""amoeba.v1.InferenceService through plain stubs generates the same output as the Python API."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import TIMEOUT_S

from amoeba_jax import SamplingParams
from amoeba_jax.client import requests
from amoeba_jax.client._proto import inference_pb2 as pb

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_text_streams_as_the_api_generates_it(live):
    expected = live.llm.generate("hello", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    messages = list(live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=20)))
    completions = [completion for message in messages for completion in message.completions]
    assert "".join(c.text for c in completions) == expected.text
    assert [token for c in completions for token in c.token_ids] == list(expected.token_ids)
    assert [c.finish_reason for c in completions if c.finish_reason] == [pb.FINISH_REASON_LENGTH]
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 20)
    assert 0 <= usage.queue_s <= usage.ttft_s <= usage.e2e_s
    assert not any(message.HasField("usage") for message in messages[:-1])
    live.check_idle()


def test_times_begin_when_the_request_comes(live, monkeypatch: pytest.MonkeyPatch):
    """The times in the usage and in the histograms include tokenization."""
    tokenizer, metrics = live.llm.tokenizer, live.server.metrics
    encode = tokenizer.encode

    def slowly(*arguments: object) -> list[int]:
        time.sleep(0.3)
        return encode(*arguments)

    monkeypatch.setattr(tokenizer, "encode", slowly)
    *_, last = live.generate(text="hello")
    usage = last.usage
    assert 0.3 <= usage.queue_s <= usage.ttft_s <= usage.e2e_s
    live.loop.run(asyncio.wait_for(live.server.request_handler._idle.wait(), TIMEOUT_S))
    for histogram in (metrics.queue, metrics.ttft, metrics.e2e):
        (family,) = histogram.collect()
        values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
        assert values["sum"] >= 0.3 * values["count"] > 0


def test_token_ids_and_conversations_are_prompts(live):
    conversation = [{"role": "user", "content": "hello"}]
    assert live.llm.tokenizer is not None
    for fields, prompt in (
        ({"token_ids": pb.TokenIds(ids=[72, 105])}, [72, 105]),
        ({"chat": requests.chat(conversation)}, live.llm.tokenizer.apply_chat_template(conversation)),
    ):
        expected = live.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
        messages = list(live.generate(**fields))
        tokens = [token for message in messages for c in message.completions for token in c.token_ids]
        assert tokens == list(expected.token_ids)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=5, max_tokens=6),
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(
            temperature=0, max_tokens=12, logit_bias={65: 80.0}, stop=["AAA"], include_stop_str_in_output=True
        ),
        SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=[65, 66], frequency_penalty=1.5, min_tokens=4),
        SamplingParams(
            temperature=0.5, seed=2**32 - 1, max_tokens=4, bad_words=["a"], stop_token_ids=[3], ignore_eos=True
        ),
    ],
)
def test_every_setting_arrives(live, params: SamplingParams):
    expected = live.llm.generate("once", params)[0]
    messages = list(live.generate(text="once", params=requests.params_message(params)))
    completions = [completion for message in messages for completion in message.completions]
    for output in expected.outputs:
        mine = [c for c in completions if c.index == output.index]
        assert "".join(c.text for c in mine) == output.text
        assert [token for c in mine for token in c.token_ids] == list(output.token_ids)
        positions = [position for c in mine for position in c.logprobs]
        assert len(positions) == len(output.logprobs or ())
        for position, token, entry in zip(positions, output.token_ids, output.logprobs or (), strict=False):
            assert position.tokens[0].token_id == token
            assert {t.token_id: (t.logprob, t.rank) for t in position.tokens} == {
                token: (logprob.logprob, logprob.rank) for token, logprob in entry.items()
            }
        last = mine[-1]
        assert (last.stop_string or last.stop_token_id or None) == output.stop_reason
    prompt_logprobs = [position for message in messages for position in message.prompt_logprobs]
    assert [[(t.token_id, t.logprob, t.rank) for t in position.tokens] for position in prompt_logprobs] == [
        [(token, it.logprob, it.rank) for token, it in (entry or {}).items()]
        for entry in expected.prompt_logprobs or ()
    ]
    if prompt_logprobs:
        own = [position.tokens[0].token_id for position in prompt_logprobs[1:]]
        assert own == list(expected.prompt_token_ids[1:]), "the token that stands there is the first"


def test_many_requests_at_once_get_their_own_answers(live):
    prompts = [f"request {index}" for index in range(24)]
    expected = [o.outputs[0].token_ids for o in live.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))]

    def ask(prompt: str) -> tuple[int, ...]:
        return tuple(t for message in live.generate(text=prompt) for c in message.completions for t in c.token_ids)

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(ask, prompts)) == expected
    live.check_idle()


def test_tokenize_and_detokenize_are_inverse(live):
    tokens = live.inference.Tokenize(pb.TokenizeRequest(text="déjà vu")).token_ids
    assert live.llm.tokenizer is not None
    assert list(tokens) == live.llm.tokenizer.encode("déjà vu")
    assert live.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokens)).text == "déjà vu"


def test_model_info_names_model_and_limits(live):
    info = live.inference.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.max_model_len) == ("tiny-chat", 256, live.llm.max_model_len)
    assert info.has_tokenizer
    assert info.has_chat_template
    assert set(info.eos_token_ids) == live.llm.eos_token_ids


def test_abort_ends_a_request_with_what_it_has(live):
    stream = live.generate(
        text="hello", request_id="mine", params=pb.SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    )
    first = next(stream)
    assert first.request_id == "mine"
    assert live.inference.Abort(pb.AbortRequest(request_id="mine"), timeout=TIMEOUT_S).aborted
    *_, last = stream
    assert [c.finish_reason for c in last.completions] == [pb.FINISH_REASON_ABORT]
    assert not live.inference.Abort(pb.AbortRequest(request_id="mine"), timeout=TIMEOUT_S).aborted
    live.check_idle()
