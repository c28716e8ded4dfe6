"""The engine computes what `transformers` computes, at every degree, through the paged path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY_CONFIGS, ragged_prompts, tiny_config, tiny_model

from amoeba_jax import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"
NEW_TOKENS = 12
TOLERANCE = 1e-4
# What most families have of their own is in one of these; the default model is compared at every degree in
# `test_golden.py`. The rest is for long runs.
AT_TP1 = ("llama3-scaled-rope", "qwen2", "phi3")
AT_TP4 = ("mistral-window", "qwen3", "gemma3", "gpt-oss")


def cases() -> list[Any]:
    """Each family at each degree, some in long runs alone."""
    often = {(family, 1) for family in AT_TP1} | {(family, 4) for family in AT_TP4}
    every = [(family, tp) for family in TINY_CONFIGS for tp in (1, 2, 4)]
    return [pytest.param(*case, marks=() if case in often else pytest.mark.slow) for case in every]


@pytest.fixture(scope="module", params=list(TINY_CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = tiny_model(family, tmp_path_factory.mktemp("models"))
    # Chunks of 16 tokens and pages of 8: prompts cross both borders. Layers share a program, which takes half the time
    # to compile that one of both takes.
    with LLM(
        directory,
        num_devices=4,
        device_memory="8MiB",
        page_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=64,  # the context for which LongRoPE has short factors
        segment_layers=1,
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        yield llm


@pytest.mark.parametrize(("family", "tp"), cases(), indirect=["family"])
def test_logits_and_greedy_tokens_equal_recorded_transformers(llm: LLM, family: str, tp: int):
    """One prompt after the other: batches of several sizes would compile as many programs."""
    llm.set_layout(tp)
    for index, prompt in enumerate(ragged_prompts(llm.dims.config.vocab_size)):
        (tokens,) = check_greedy_tokens(llm, family, [index])
        expected = np.load(GOLDEN / f"{family}.npz")[f"logits_{index}"]
        prefill = llm.logits(tokens[:-1])
        assert prefill.shape == (len(tokens) - 1, llm.dims.config.vocab_size)
        np.testing.assert_allclose(prefill[-len(expected) :], expected, atol=TOLERANCE, rtol=0)
        decoded = llm.logits(tokens[:-1], decode_from=len(prompt))
        np.testing.assert_allclose(decoded[-len(expected) :], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_greedy_tokens_of_a_batch_equal_recorded_transformers(llm: LLM, family: str, tp: int):
    llm.set_layout(tp)
    check_greedy_tokens(llm, family, list(range(len(ragged_prompts(1)))))


def check_greedy_tokens(llm: LLM, family: str, indices: list[int]) -> list[list[int]]:
    """Prompts of these indices, at once, go on as recorded. Returns all tokens of each, recorded ones."""
    golden = np.load(GOLDEN / f"{family}.npz")
    everything = ragged_prompts(llm.dims.config.vocab_size)
    prompts, tokens = [everything[i] for i in indices], [golden[f"tokens_{i}"].tolist() for i in indices]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    for prompt, expected, output in zip(prompts, tokens, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected[len(prompt) :]
        assert output.outputs[0].finish_reason == "length"
    return tokens


def test_recorded_logits_are_what_transformers_computes_now(family: str, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="torch is not installed: recorded logits are used alone")
    from transformers import AutoModelForCausalLM

    golden = np.load(GOLDEN / f"{family}.npz")
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family, tmp_path), dtype=torch.float32, **eager)
    for index in range(len(ragged_prompts(tiny_config(family)["vocab_size"]))):
        tokens, expected = golden[f"tokens_{index}"], golden[f"logits_{index}"]
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[None, :-1].astype(np.int64))).logits[0].numpy()
        np.testing.assert_allclose(logits[-len(expected) :], expected, atol=1e-5, rtol=0)


def test_padding_is_reported(llm: LLM, family: str):
    padding = llm.memory().padding
    heads = llm.dims.heads
    assert padding["kv cache"] == pytest.approx(heads.kv_heads / tiny_config(family)["num_key_value_heads"])
    if (experts := llm.dims.config.experts) is None:
        assert padding["mlp.down"] == pytest.approx(llm.dims.ffn_shard * 4 / llm.dims.config.ffn_size)
    else:
        stored = 4 * llm.dims.experts.num_experts * llm.dims.experts.size
        assert padding["experts.down"] == pytest.approx(stored / experts.count / experts.ffn_size)
    assert padding["attention.qkv"] >= 1.0
