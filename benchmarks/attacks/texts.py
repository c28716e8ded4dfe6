"""Attacks with long texts: in fields that error messages repeat, and in prompts."""

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from amoeba_jax.client._proto import inference_pb2 as pb
from attacks.pressure import ADMIN, INFERENCE, OPEN_INFERENCE, Attacker, Call, generate, infer
from serving.grpc_server._proto import open_inference_pb2 as oip

Run = Callable[[], Awaitable[None]]
# The second size is the maximum of JSON settings.
_SIZES = (50 * 1024, 256 * 1024 - 64)
_TOKENIZED_BYTES = 4 * 2**20


async def errors(attacker: Attacker) -> Run:
    """Send texts of 50 and 256 KiB in fields that error messages repeat. Each text looks like a path, a word or an
    address."""
    calls = []
    for size in _SIZES:
        shapes = {"path": "/a" * (size // 2), "word": "/" + "a" * (size - 1), "address": "0x" + "f" * (size - 2)}
        for shape, text in shapes.items():
            calls += _echoes(f"{shape} {size // 1024}K", text, attacker.info.model)
    random.Random(0).shuffle(calls)
    return partial(attacker.flood, calls, at_once=8)


def _echoes(kind: str, text: str, model: str) -> list[Call]:
    """Return one call for each field that error messages may repeat, with `text` in this field. `kind`: suffix of the
    labels."""

    def settings(label: str, json: str, **fields: Any) -> Call:
        return infer(f"{label} {kind}", model, json, **fields)

    def unary(label: str, path: str, message: Message) -> Call:
        return Call(f"{label} {kind}", path, message.SerializeToString())

    params = pb.SamplingParams
    chat = pb.Chat(messages=[pb.ChatMessage(role=text, content="hello")])
    named = oip.ModelInferRequest.InferInputTensor(name=text, datatype="BYTES", shape=[1])
    typed = oip.ModelInferRequest.InferInputTensor(name="return_logprobs", datatype=text, shape=[1])
    wanted = oip.ModelInferRequest.InferRequestedOutputTensor(name=text)
    one = oip.InferParameter(int64_param=1)
    long = oip.InferParameter(string_param=text)
    return [
        generate(f"stop {kind}", params(stop=["", text])),
        generate(f"bad words {kind}", params(bad_words=["", text])),
        generate(f"model {kind}", model=text),
        generate(f"request id {kind}", request_id=text),
        generate(f"cache salt {kind}", cache_salt=text, params=params(top_p=2)),
        generate(f"role {kind}", chat=chat),
        unary("tokenize role", INFERENCE + "Tokenize", pb.TokenizeRequest(chat=chat)),
        unary("tokenize model", INFERENCE + "Tokenize", pb.TokenizeRequest(model=text)),
        unary("abort id", INFERENCE + "Abort", pb.AbortRequest(request_id=text)),
        unary("policy", ADMIN + "SetPolicy", pb.SetPolicyRequest(policy=text)),
        unary("ready model", OPEN_INFERENCE + "ModelReady", oip.ModelReadyRequest(name=text)),
        unary("metadata", OPEN_INFERENCE + "ModelMetadata", oip.ModelMetadataRequest(name=text)),
        settings("JSON key", f'{{"{text}": 1}}'),
        settings("JSON key in stream", f'{{"{text}": 1}}', stream=True),
        settings("JSON damaged", f'{{"stop": "{text}'),
        settings("JSON text only", text),
        settings("JSON string", f'"{text}"'),
        settings("JSON stop", f'{{"stop": ["", "{text}"]}}'),
        settings("JSON seed", f'{{"seed": "{text}"}}'),
        settings("JSON digits", f'{{"seed": {"9" * len(text)}}}'),
        settings("JSON stop token", f'{{"stop_token_ids": ["{text}"]}}'),
        settings("JSON bias key", f'{{"logit_bias": {{"{text}": 1}}}}'),
        settings("JSON bias", f'{{"logit_bias": "{text}"}}'),
        settings("JSON flag", f'{{"ignore_eos": "{text}"}}'),
        settings("infer id", "{}", id=text),
        settings("infer id in stream", '{"top_p": 2}', id=text, stream=True),
        settings("infer version", "{}", model_version=text),
        infer(f"infer model {kind}", text),
        settings("parameter name", "{}", parameters={text: one}),
        settings("parameter without value", "{}", parameters={text: oip.InferParameter()}),
        settings("parameter value", "{}", parameters={"timeout": long}),
        settings("priority", "{}", parameters={"priority": long}),
        settings("tensor name", "{}", more_inputs=[named], more_raw=[b"\0\0\0\0"]),
        settings("tensor type", "{}", more_inputs=[typed], more_raw=[b"\0"]),
        settings("output name", "{}", outputs=[wanted]),
    ]


async def tokenizing(attacker: Attacker) -> Run:
    """Send texts of 4 MiB to every RPC that tokenizes, and lists of a million tokens or more to Detokenize."""
    words = "Once upon a time there was a little girl, " * (_TOKENIZED_BYTES // 42)
    same = "a" * _TOKENIZED_BYTES
    letters = "abcdefghijklmnop qrstuvwxyz.,'\n0123456789äß€日"
    mixed = "".join(random.Random(0).choices(letters, k=_TOKENIZED_BYTES // 2))
    calls = []
    for kind, text in {"words": words, "one word": same, "mixed": mixed}.items():
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
        tokenize = [pb.TokenizeRequest(text=text), pb.TokenizeRequest(chat=chat)]
        calls += [
            generate(f"generate {kind}", text=text),
            generate(f"generate chat {kind}", chat=chat),
            *(Call(f"tokenize {kind}", INFERENCE + "Tokenize", it.SerializeToString()) for it in tokenize),
            infer(f"infer {kind}", attacker.info.model, text=text),
            infer(f"infer stream {kind}", attacker.info.model, text=text, stream=True),
        ]
    ids = [random.Random(1).randrange(attacker.info.vocab_size) for _ in range(2**20)]
    for kind, tokens in {"random": ids, "one token": [attacker.info.vocab_size - 1] * 2**22}.items():
        message = pb.DetokenizeRequest(token_ids=tokens)
        calls.append(Call(f"detokenize {kind}", INFERENCE + "Detokenize", message.SerializeToString()))
    random.Random(2).shuffle(calls)
    return partial(attacker.flood, calls, at_once=16)
