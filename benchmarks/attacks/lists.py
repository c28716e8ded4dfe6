"""Attacks with long lists, and with settings that make each token expensive."""

import itertools
import json
import random
import string
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from amoeba_jax.client._proto import inference_pb2 as pb
from attacks.pressure import Attacker, Call, generate, infer
from serving.grpc_server._proto import open_inference_pb2 as oip

Run = Callable[[], Awaitable[None]]
_IDS_8_MIB = 2**22  # Two bytes each.
_PROMPT = [1, 403, 407, 261, 378]


async def lists(attacker: Attacker) -> Run:
    """Send long lists of ids, words, biases, stop strings and chat messages. Some requests exceed the maximum size."""
    vocab, params = attacker.info.vocab_size, pb.SamplingParams
    several = {"n": 16, "max_tokens": 64, "ignore_eos": True}
    ids = [128 + i % (vocab - 128) for i in range(_IDS_8_MIB)]
    letters = ["a" * 1000] * 16
    words = ["".join(pair) + str(i % 10) for i, pair in enumerate(itertools.product(string.ascii_letters, repeat=3))]
    biases = dict.fromkeys(range(vocab), 1.0)
    strangers = dict.fromkeys(range(500_000), 1.0)
    messages = [pb.ChatMessage(role="user", content="a")] * 100_000
    calls = [
        generate("stop token ids", params(stop_token_ids=ids, **several)),
        generate("allowed token ids", params(allowed_token_ids=pb.TokenIds(ids=ids), **several)),
        generate("logit biases, all tokens", params(logit_bias=biases, **several)),
        generate("logit biases, 500,000", params(logit_bias=strangers, **several)),
        generate("bad words", params(bad_words=words[:32_000], **several)),
        generate("stop strings, 10,000", params(stop=words[:10_000], **several)),
        generate("stop strings, 16 of equal letters", params(stop=letters, **several)),
        generate("stop strings, 16 of 1 MiB", params(stop=["ab" * 2**19] * 16, **several)),
        generate("messages", chat=pb.Chat(messages=messages)),
        generate("messages, none with text", chat=pb.Chat(messages=[pb.ChatMessage()] * 2**20)),
        generate("prompt of 16 MiB", token_ids=pb.TokenIds(ids=ids * 2)),
        generate("message over the limit", token_ids=pb.TokenIds(ids=ids * 9)),
        infer("JSON ids", attacker.info.model, json.dumps({"n": 16, "stop_token_ids": ids[:50_000]})),
        infer("JSON biases", attacker.info.model, json.dumps({"logit_bias": dict.fromkeys(range(20_000), 1)})),
        infer("tensors", attacker.info.model, more_raw=[b""] * 2**20),
        infer("parameters", attacker.info.model, parameters=_parameters(100_000)),
    ]
    return partial(attacker.flood, calls, at_once=4)


def _parameters(count: int) -> dict[str, oip.InferParameter]:
    return {f"p{i}": oip.InferParameter(int64_param=i) for i in range(count)}


async def samples(attacker: Attacker) -> Run:
    """Request 128 long samples with log-probabilities. Over amoeba.v1, also request log-probabilities of the prompt."""
    room = attacker.info.max_model_len

    def ours(max_tokens: int) -> Call:
        params = pb.SamplingParams(n=128, logprobs=20, prompt_logprobs=20, max_tokens=max_tokens, ignore_eos=True)
        return generate("amoeba.v1", params, token_ids=pb.TokenIds(ids=_PROMPT * 8))

    def theirs(max_tokens: int, stream: bool | None) -> Call:
        settings = {"n": 128, "logprobs": 20, "max_tokens": max_tokens, "ignore_eos": True}
        outputs = [f"return_{name}" for name in ("logprobs", "cumulative_logprob", "finish_reason")]
        label = {None: "infer", False: "infer stream, not streaming", True: "infer stream"}[stream]
        flags = {"more_inputs": [_flag(name) for name in outputs], "more_raw": [b"\1"] * len(outputs)}
        return infer(label, attacker.info.model, json.dumps(settings), text="Once " * 30, stream=stream, **flags)

    longest = await attacker.longest(ours, room - 8 * len(_PROMPT))
    calls = [ours(longest), theirs(longest // 2, None), theirs(longest // 2, False), theirs(longest // 2, True)]
    return partial(attacker.flood, calls, at_once=4)


def _flag(name: str) -> oip.ModelInferRequest.InferInputTensor:
    return oip.ModelInferRequest.InferInputTensor(name=name, datatype="BOOL", shape=[1])


async def bad_words(attacker: Attacker) -> Run:
    """Keep 32 requests open, each with up to 24 bad words of two or three tokens."""
    words: list[str] = []
    for pair in itertools.product("qzxjkvwbp", repeat=2):
        word = "".join(pair)
        message = pb.TokenizeRequest(text=word, add_special_tokens=False)
        tokens = (await attacker.ask("Tokenize", message, pb.TokenizeResponse)).token_ids
        if 2 <= len(tokens) <= 3 and len(words) < 24:
            words.append(word)

    def build(max_tokens: int) -> Call:
        params = pb.SamplingParams(bad_words=words, max_tokens=max_tokens, ignore_eos=True)
        return generate(f"{len(words)} bad words", params)

    longest = await attacker.longest(build, attacker.info.max_model_len - 16)
    return partial(attacker.flood, [build(longest)], at_once=32)


async def undecodable(attacker: Attacker) -> Run:
    """Request long outputs in which the only allowed tokens are not valid UTF-8."""
    vocab = attacker.info.vocab_size
    tokens = [
        t for t in [*range(min(vocab, 1000)), *range(max(1000, vocab - 500), vocab)] if await _broken(attacker, t)
    ]
    if not tokens:
        raise ValueError("this tokenizer has no tokens of single bytes")

    def build(max_tokens: int, n: int = 1) -> Call:
        allowed = pb.TokenIds(ids=tokens)
        params = pb.SamplingParams(allowed_token_ids=allowed, max_tokens=max_tokens, n=n, ignore_eos=True, stop=["a"])
        return generate(f"{n} samples", params)

    longest = await attacker.longest(build, attacker.info.max_model_len - 16)
    return partial(attacker.flood, [build(longest), build(longest // 2, 8), build(longest)], at_once=16)


async def _broken(attacker: Attacker, token: int) -> bool:
    """Return whether repetitions of a token decode to replacement characters only."""
    message = pb.DetokenizeRequest(token_ids=[token] * 4, skip_special_tokens=False)
    try:
        text = (await attacker.ask("Detokenize", message, pb.DetokenizeResponse)).text
    except grpc.RpcError:
        return False
    return set(text) == {"\N{REPLACEMENT CHARACTER}"}


async def priorities(attacker: Attacker) -> Run:
    """Send requests with the highest priority."""
    params = pb.SamplingParams(priority=-(2**31), max_tokens=64, ignore_eos=True)
    settings = json.dumps({"priority": -(2**31), "max_tokens": 64, "ignore_eos": True})
    long = pb.TokenIds(ids=random.Random(0).choices(range(3, attacker.info.vocab_size), k=200))
    calls = [
        generate("first", params),
        generate("first, long prompt", params, token_ids=long),
        infer("first, Open Inference", attacker.info.model, settings),
    ]
    return partial(attacker.flood, calls, at_once=64)
