"""The paged engine gives the results of `transformers`, for every family at every degree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    CLOSE_CALL,
    ROUTER_BIASES,
    TINY_CONFIGS,
    ragged_prompts,
    spread_positions,
    tiny_config,
    tiny_model,
)

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims

GOLDEN = Path(__file__).parent.parent / "golden"
GREEDY_TOKENS = 64
TOLERANCE = 1e-4
"""Largest difference of logits, as a share of the largest logit if that exceeds 1."""
DEGREES = (1, 2, 4, 8)
# `test_golden.py` compares the default model at every degree. The rest is for long runs.
OFTEN = {("gpt-oss", 4), ("gemma3", 4)}


def cases(degrees: tuple[int, ...] = DEGREES) -> list[Any]:
    """Return each family at each degree, as parameters of the fixture `llm` and of a test."""
    return [
        pytest.param((family, max(tp, 4)), tp, id=f"{family}-tp{tp}", marks=marks(family, tp))
        for family in TINY_CONFIGS
        for tp in degrees
    ]


def marks(family: str, tp: int) -> tuple[pytest.MarkDecorator, ...]:
    return () if (family, tp) in OFTEN else (pytest.mark.slow,)


def golden(family: str) -> dict[str, np.ndarray]:
    """Return results of `transformers`. `scripts/record_golden.py` describes the arrays."""
    with np.load(GOLDEN / f"{family}.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def llm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str
) -> Iterator[tuple[LLM, str]]:
    """Yield an engine of a family on 4 or 8 devices, and the family.

    Chunks have 16 tokens and pages 8, so prompts cross both borders. Layers share a program, which halves compile time.
    """
    family, devices = request.param
    with LLM(
        tiny_model(family, tmp_path_factory.mktemp("models")),
        num_devices=devices,
        max_tensor_parallel_size=devices,
        device_memory="8MiB",
        page_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=128,  # the context for which the model `phi3` has short factors
        segment_layers=1,
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        yield llm, family


def check_logits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * max(1, np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize(("llm", "tp"), cases(), indirect=["llm"])
def test_logits_and_greedy_tokens_equal_recorded_transformers(llm: tuple[LLM, str], tp: int):
    """Sequences run one at a time, because compiling the programs of batches would take most of the time."""
    engine, family = llm
    engine.set_layout(tp)
    recorded, prompts = golden(family), ragged_prompts(engine.dims.config.vocab_size)
    for index in range(len(prompts)):
        tokens, expected = recorded[f"tokens_{index}"].tolist(), recorded[f"logits_{index}"]
        found = engine.logits(tokens[:-1])
        assert found.shape == (len(tokens) - 1, engine.dims.config.vocab_size)
        check_logits(found[-len(expected) :], expected)
    check_logits(engine.logits(tokens[:-1], decode_from=len(prompts[-1]))[-len(expected) :], expected)
    tokens = [*prompts[-1], *recorded[f"greedy_{len(prompts) - 1}"].tolist()]
    check_logits(engine.logits(tokens[:-1])[spread_positions(len(tokens) - 1)], recorded["spread_logits"])
    check_greedy_tokens([engine.generate(prompt, greedy())[0] for prompt in prompts], recorded)


@pytest.mark.slow
@pytest.mark.parametrize(("llm", "tp"), [(("qwen3-moe", 4), 4), (("gemma3", 4), 4)], indirect=["llm"])
def test_greedy_tokens_of_a_batch_equal_recorded_transformers(llm: tuple[LLM, str], tp: int):
    engine, family = llm
    engine.set_layout(tp)
    check_greedy_tokens(engine.generate(ragged_prompts(engine.dims.config.vocab_size), greedy()), golden(family))


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)


def check_greedy_tokens(outputs: list[Any], recorded: dict[str, np.ndarray]) -> None:
    """Compare each row up to its first close call. There, the gap in `transformers` is at most `CLOSE_CALL`."""
    compared = 0
    for index, output in enumerate(outputs):
        (completion,), expected = output.outputs, recorded[f"greedy_{index}"].tolist()
        assert (len(completion.token_ids), completion.finish_reason) == (GREEDY_TOKENS, "length")
        close = np.flatnonzero(recorded[f"gaps_{index}"] <= CLOSE_CALL)
        sure = int(close[0]) if close.size else GREEDY_TOKENS
        assert list(completion.token_ids)[:sure] == expected[:sure], f"prompt {index}"
        compared += sure
    print(f"{compared} of {len(outputs) * GREEDY_TOKENS} greedy tokens compared")
    assert compared >= len(outputs) * GREEDY_TOKENS // 2, "most rows have a close call"


@pytest.mark.parametrize("name", ROUTER_BIASES)
def test_recorded_tokens_go_to_the_experts_that_the_biases_choose(name: str):
    counts = golden(name)["expert_tokens"]
    assert counts.shape == (2, tiny_config(name)["num_local_experts"])
    used = {"gpt-oss-one-rank": {0, 1}, "gpt-oss-unused": {0, 1, 2, 4, 5}}[name]
    for layer in counts:
        assert set(np.flatnonzero(layer)) == used
    one_rank = ModelDims(ModelConfig.from_hf(tiny_config("gpt-oss-one-rank")), 4, 8, "float32").experts
    assert (one_rank.whole, one_rank.num_experts) == (True, 2), "experts 0 and 1 are those of rank 0"


@pytest.mark.torch
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=marks(family, 4)) for family in TINY_CONFIGS if "mxfp4" not in family]
)
def test_recorded_logits_are_what_transformers_computes_now(family: str, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="torch is not installed: recorded logits are used alone")
    from transformers import AutoModelForCausalLM

    recorded = golden(family)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family, tmp_path), dtype=torch.float32, **eager)
    for index in range(len(ragged_prompts(tiny_config(family)["vocab_size"]))):
        tokens, expected = recorded[f"tokens_{index}"], recorded[f"logits_{index}"]
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[None, :-1].astype(np.int64))).logits[0].numpy()
        np.testing.assert_allclose(logits[-len(expected) :], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("llm", "tp"), cases((4, 8)), indirect=["llm"])
def test_padding_is_reported(llm: tuple[LLM, str], tp: int):
    engine, family = llm
    dims, padding = engine.dims, engine.memory().padding
    assert padding["kv cache"] == pytest.approx(dims.heads.kv_heads / tiny_config(family)["num_key_value_heads"])
    if (experts := dims.config.experts) is None:
        assert padding["mlp.down"] == pytest.approx(dims.ffn_shard * tp / dims.config.ffn_size)
    elif not dims.config.dense_layers:
        stored = tp * dims.experts.num_experts * dims.experts.size
        assert padding["experts.down"] == pytest.approx(stored / experts.count / experts.ffn_size)
    assert padding["attention.qkv"] >= 1.0
