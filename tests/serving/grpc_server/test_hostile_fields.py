"""Hostile fields: limits apply before fields are read, errors are short, and clients can ask for the limits."""

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import TIMEOUT_S, Live, code_and_text

from amoeba_jax.client import Client, requests
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.errors import RequestError
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from amoeba_jax.tokenizer import Tokenizer
from serving.grpc_server._proto import open_inference_pb2 as oip
from serving.grpc_server._proto import open_inference_pb2_grpc as oip_grpc
from serving.grpc_server.config import Limits
from serving.grpc_server.open_inference_tensors import Inputs, read_inputs, wanted_outputs
from serving.grpc_server.settings_json import _depth, parse_settings
from serving.grpc_server.statuses import MAX_MESSAGE_CHARS, public_text, status_of

pytestmark = pytest.mark.usefixtures("quick_compile")
Status = grpc.StatusCode
HOSTILE = "/" + "a" * 60_000
SMALL: dict[str, Any] = {
    "max_prompt_chars": 40,
    "max_chat_messages": 2,
    "max_stop_strings": 3,
    "max_stop_string_chars": 5,
    "max_stop_token_ids": 4,
    "max_bad_words": 3,
    "max_bad_word_chars": 6,
    "max_logit_bias": 2,
    "max_allowed_token_ids": 5,
    "max_id_chars": 10,
    "max_salt_chars": 7,
}


def params(**settings: Any) -> dict[str, Any]:
    return {"text": "x", "params": pb.SamplingParams(max_tokens=1, **settings)}


def chat(count: int, content: str = "hi") -> dict[str, Any]:
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content=content)] * count)}


AT_LIMIT: dict[str, Callable[[int], dict[str, Any]]] = {
    "max_prompt_chars": lambda n: {"text": "x" * n},
    "max_chat_messages": chat,
    "max_stop_strings": lambda n: params(stop=["q"] * n),
    "max_stop_string_chars": lambda n: params(stop=["q" * n]),
    "max_stop_token_ids": lambda n: params(stop_token_ids=[7] * n),
    "max_bad_words": lambda n: params(bad_words=["q"] * n),
    "max_bad_word_chars": lambda n: params(bad_words=["q" * n]),
    "max_logit_bias": lambda n: params(logit_bias=dict.fromkeys(range(n), 1.0)),
    "max_allowed_token_ids": lambda n: params(allowed_token_ids=pb.TokenIds(ids=range(n))),
    "max_id_chars": lambda n: {"text": "x", "request_id": "i" * n},
    "max_salt_chars": lambda n: {"text": "x", "cache_salt": "s" * n},
}


@pytest.mark.parametrize("name", AT_LIMIT)
def test_fields_are_taken_at_their_limit_and_refused_beyond(start: Callable[..., Live], name: str):
    live, limit = start(**SMALL), SMALL[name]
    list(live.generate(**AT_LIMIT[name](limit)))
    code, text = code_and_text(lambda: list(live.generate(**AT_LIMIT[name](limit + 1))))
    assert code is Status.INVALID_ARGUMENT
    assert name in text
    assert str(limit + 1) in text
    assert str(limit) in text
    live.check_idle()


def test_clients_are_told_the_limits(start: Callable[..., Live]):
    live = start(**SMALL, max_refusals_per_second=Limits().max_refusals_per_second)
    limits = live.inference.GetModelInfo(pb.GetModelInfoRequest()).limits
    assert dict(limits) == {field.name: SMALL.get(field.name, field.default) for field in fields(Limits)}
    with Client(live.target) as client:
        assert client.model_info().limits["max_stop_strings"] == 3


def test_prompts_of_more_tokens_than_any_context_are_refused_before_they_are_read(live: Live):
    ids = pb.TokenIds(ids=[300] * 5000)  # no id is in the vocabulary
    code, text = code_and_text(lambda: list(live.generate(token_ids=ids)))
    assert code is Status.INVALID_ARGUMENT
    assert "5000 tokens" in text
    assert "4096" in text


def test_texts_that_fit_no_context_are_not_tokenized(live: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "apply_chat_template", None)
    text = "x" * 1_000_000
    for call in (
        lambda: list(live.generate(text=text)),
        lambda: list(live.generate(**chat(1, text))),
        lambda: live.inference.Tokenize(pb.TokenizeRequest(text=text)),
        lambda: live.inference.Tokenize(pb.TokenizeRequest(chat=chat(1, text)["chat"])),
    ):
        code, said = code_and_text(call)
        assert code is Status.INVALID_ARGUMENT
        assert "characters" in said


def test_detokenize_takes_no_more_tokens_than_a_context(live: Live):
    request = pb.DetokenizeRequest(token_ids=[1] * 4097)
    code, text = code_and_text(lambda: live.inference.Detokenize(request))
    assert code is Status.INVALID_ARGUMENT
    assert "4096" in text


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
def test_tokenizing_counts_as_a_request_of_its_client(start: Callable[..., Live], method: str):
    live = start(max_requests_per_client=1)
    stream = live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True))
    next(stream)
    request = pb.TokenizeRequest(text="x") if method == "Tokenize" else pb.DetokenizeRequest(token_ids=[1])
    code, text = code_and_text(lambda: getattr(live.inference, method)(request, timeout=TIMEOUT_S))
    assert code is Status.RESOURCE_EXHAUSTED
    assert "max_requests_per_client" in text
    stream.cancel()
    live.check_idle()


def test_bytes_of_a_client_are_bounded(start: Callable[..., Live]):
    live = start(max_client_bytes=10_000)
    first = live.generate(
        text="hello",
        request_id="first",
        params=pb.SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, stop_token_ids=[3] * 1000),
    )
    next(first)
    streams = [live.generate(text="x", params=pb.SamplingParams(stop_token_ids=[3] * 1000)) for _ in range(12)]
    codes = []
    for stream in streams:
        try:
            list(stream)
            codes.append(Status.OK)
        except grpc.RpcError as error:
            codes.append(error.code())  # type: ignore[attr-defined]
    assert set(codes) <= {Status.OK, Status.RESOURCE_EXHAUSTED}
    first.cancel()
    live.check_idle()
    assert not live.server.request_handler.admission._bytes_of


@pytest.mark.parametrize(
    "fields_",
    [
        params(stop=["", HOSTILE[:500]]),
        {"text": "x", "model": HOSTILE},
        {"text": "x", "request_id": HOSTILE},
        {"text": "x", "cache_salt": HOSTILE},
        params(bad_words=[" ", HOSTILE[:100]]),
        {"chat": pb.Chat(messages=[pb.ChatMessage(role=HOSTILE, content="x")])},
    ],
)
def test_errors_do_not_repeat_what_the_client_sent(live: Live, fields_: dict[str, Any]):
    code, text = code_and_text(lambda: list(live.generate(**fields_)))
    assert code in (Status.INVALID_ARGUMENT, Status.NOT_FOUND)
    assert len(text) <= MAX_MESSAGE_CHARS
    assert "a" * 200 not in text


@pytest.mark.parametrize(
    "data",
    [
        b'{"' + HOSTILE.encode() + b'": 1}',
        b'{"stop": ["", "' + HOSTILE[:500].encode() + b'"]}',
        b'{"temperature": "' + HOSTILE.encode() + b'"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"temperature": [' + b"1," * 30_000 + b"1]}",
        HOSTILE.encode(),
    ],
)
def test_errors_of_the_other_protocol_do_not_either(live: Live, data: bytes):
    request = oip.ModelInferRequest(
        model_name="tiny-chat", inputs=[tensor("text_input"), tensor("sampling_parameters")]
    )
    for value in (b"x", data):
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    stub = oip_grpc.GRPCInferenceServiceStub(live.channel)
    code, text = code_and_text(lambda: stub.ModelInfer(request, timeout=TIMEOUT_S))
    assert code is Status.INVALID_ARGUMENT
    assert len(text) <= MAX_MESSAGE_CHARS
    assert "a" * 200 not in text


def infer_request(settings: bytes) -> oip.ModelInferRequest:
    inputs = [tensor("text_input"), tensor("sampling_parameters")]
    raw = [len(value).to_bytes(4, "little") + value for value in (b"x", settings)]
    return oip.ModelInferRequest(model_name="tiny-chat", inputs=inputs, raw_input_contents=raw)


def tensor(name: str) -> oip.ModelInferRequest.InferInputTensor:
    return oip.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1])


@pytest.mark.timeout(60)
def test_the_public_text_of_an_error_takes_no_time_for_its_length():
    """A search of each whole text took seconds to hours and held the GIL."""
    for text in ("/a" * 2_000_000, HOSTILE * 50, "/aaaa" * 50_000 + " 0x", "~/" * 500_000, "C:\\" + "a.b-" * 500_000):
        assert len(public_text(text)) <= MAX_MESSAGE_CHARS
        assert len(status_of(RequestError(text))[1]) <= MAX_MESSAGE_CHARS


def test_paths_are_hidden_wherever_a_text_is_cut():
    for length in range(1900, 2100):
        assert "someone" not in public_text("y " * (length // 2) + "/home/someone/model")


def test_values_in_errors_are_short_however_long_they_are():
    for value in ("x" * 10**6, b"x" * 10**6, list(range(10**6)), dict.fromkeys(range(1000), "y" * 1000), 10**100_000):
        assert len(shorten(value)) < 200
    nested: Any = [1]
    for _ in range(10_000):
        nested = [nested]
    assert len(shorten(nested)) < 200
    assert shorten(["a", 1, None]) == "['a', 1, None]"
    with pytest.raises(RequestError) as error:
        SamplingParams(stop=["", *["y" * 1000] * 1000])
    assert len(str(error.value)) < 300


def test_settings_beyond_their_bytes_are_not_parsed():
    with pytest.raises(RequestError, match="max_settings_bytes"):
        parse_settings(b"[" * 300_000, Limits())


class Unread:
    """Sequence that may be sliced but not iterated."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> list[int]:
        return [2] * len(range(self._length)[index])

    def __iter__(self) -> Any:
        raise AssertionError("all of it is read")


def test_outputs_beyond_those_that_there_are_are_not_read():
    request = cast(Any, SimpleNamespace(outputs=Unread(2_000_000)))
    with pytest.raises(RequestError, match="2000000 outputs are listed: there are 6"):
        wanted_outputs(request, Inputs({}))


def test_a_wrong_shape_is_not_read():
    wrong = SimpleNamespace(name="text_input", datatype="BYTES", shape=Unread(4_000_000))
    with pytest.raises(RequestError, match=r"got 4000000 dimensions, \[(2, ){7}2\]$"):
        read_inputs(cast(Any, SimpleNamespace(raw_input_contents=[b""], inputs=[wrong])))


def depth_by_character(text: str) -> int:
    depth = deepest = 0
    characters = iter(text)
    for character in characters:
        if character == '"':
            for inner in characters:
                if inner == "\\":
                    next(characters, None)
                elif inner == '"':
                    break
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    return deepest


@given(st.text(st.sampled_from('[]{}"\\\n,aé')) | st.text())
def test_depth_is_that_of_brackets_outside_strings(text: str):
    assert _depth(text) == depth_by_character(text)


def test_replies_of_one_message_are_bounded(live: Live):
    data = b'{"n": 100, "max_tokens": 4000, "logprobs": 20, "temperature": 1}'
    request = oip.ModelInferRequest(
        model_name="tiny-chat", inputs=[tensor("text_input"), tensor("sampling_parameters")]
    )
    for value in (b"x", data):
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    stub = oip_grpc.GRPCInferenceServiceStub(live.channel)
    code, text = code_and_text(lambda: stub.ModelInfer(request, timeout=TIMEOUT_S))
    assert code is Status.INVALID_ARGUMENT
    assert "max_reply_entries" in text


@pytest.mark.parametrize("streams", [False, True])
def test_prompts_that_a_reply_repeats_are_bounded(start: Callable[..., Live], streams: bool):
    live = start(max_echo_bytes=100)
    stub = oip_grpc.GRPCInferenceServiceStub(live.channel)

    def texts(num_samples: int, flag: bytes = b"\0") -> str:
        request = oip.ModelInferRequest(model_name="tiny-chat")
        settings = b'{"n": %d, "max_tokens": 1}' % num_samples
        for name, value in (("text_input", b"x" * 25), ("sampling_parameters", settings)):
            request.inputs.append(tensor(name))
            request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
        for name, value in (("exclude_input_in_output", flag), ("stream", b"\1" if streams else b"\0")):
            request.inputs.add(name=name, datatype="BOOL", shape=[1])
            request.raw_input_contents.append(value)
        if not streams:
            return str(stub.ModelInfer(request, timeout=TIMEOUT_S).raw_output_contents)
        answers = list(stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S))
        return "".join(f"{it.error_message}{it.infer_response.raw_output_contents}" for it in answers)

    assert texts(4).count("x" * 25) == 4
    assert "x" * 25 not in texts(5, b"\1")
    if streams:
        said = texts(5)
    else:
        code, said = code_and_text(lambda: texts(5))
        assert code is Status.INVALID_ARGUMENT
    assert "n=5 samples takes 125 bytes of the reply: at most 100 are allowed (max_echo_bytes)" in said
    live.check_idle()


def test_log_probabilities_of_a_prompt_are_bounded(start: Callable[..., Live]):
    live = start(max_prompt_entries=60)
    ids = pb.TokenIds(ids=[1] * 20)
    list(live.generate(token_ids=ids, params=pb.SamplingParams(max_tokens=1, prompt_logprobs=2)))
    list(live.generate(token_ids=ids, params=pb.SamplingParams(max_tokens=1, logprobs=20)))
    wanted = pb.SamplingParams(max_tokens=1, prompt_logprobs=3)
    code, text = code_and_text(lambda: list(live.generate(token_ids=ids, params=wanted)))
    assert code is Status.INVALID_ARGUMENT
    assert "a prompt of 20 tokens gives 80 tokens and log-probabilities: at most 60" in text
    assert "max_prompt_entries" in text
    live.check_idle()


def test_long_replies_come_in_pieces(live: Live):
    """A stream splits a prompt's log-probabilities too: there could be hundreds of thousands."""
    settings = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=20, ignore_eos=True)
    prompt = [index % 256 for index in range(400)]
    messages = list(live.generate(token_ids=pb.TokenIds(ids=prompt), params=requests.params_message(settings)))
    positions = [position for message in messages for position in message.prompt_logprobs]
    expected = live.llm.generate([prompt], settings)[0].prompt_logprobs
    assert expected is not None
    assert [{t.token_id: t.rank for t in p.tokens} for p in positions] == [
        {token: it.rank for token, it in (entry or {}).items()} for entry in expected
    ]
    assert max(sum(len(p.tokens) for p in message.prompt_logprobs) for message in messages) < 2200
    assert len(messages) > 4


@pytest.mark.parametrize(
    ("path", "streams"),
    [
        ("/grpc.health.v1.Health/Check", False),
        ("/grpc.health.v1.Health/Watch", True),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
        ("/amoeba.v1.InferenceService/Tokenize", False),
    ],
)
@pytest.mark.parametrize("message", [b"\x0a\x02\xff\xfe", b"\xff\xff"])
def test_damaged_messages_are_the_clients_fault_in_every_service(live: Live, path: str, streams: bool, message: bytes):
    def call() -> None:
        if streams:
            list(live.channel.stream_stream(path)(iter([message]), timeout=TIMEOUT_S))
        else:
            live.channel.unary_unary(path)(message, timeout=TIMEOUT_S)

    code, text = code_and_text(call)
    assert code is Status.INVALID_ARGUMENT
    assert "damaged" in text
