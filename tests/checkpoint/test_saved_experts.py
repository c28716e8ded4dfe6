"""Models with experts that `LLM.save` wrote give the same answers, also at other degrees."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import ragged_prompts, tiny_model

from amoeba_jax import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe-mixed", "gpt-oss-mxfp4"])
def test_saved_experts_answer_alike_at_every_degree(name: str, tmp_path: Path, compile_cache: str):
    """The model is saved in two shards and loaded in two and four shards."""
    recorded, prompts = np.load(GOLDEN / f"{name}.npz"), ragged_prompts(211)[2:]
    expected = [recorded[f"tokens_{index}"].tolist() for index in range(2, 5)]

    def answers(model: Path, devices: int, saved: Path | None = None) -> list[list[int]]:
        with LLM(
            model,
            num_devices=devices,
            tensor_parallel_size=devices,
            device_memory="8MiB",
            max_num_batched_tokens=16,
            max_num_seqs=4,
            max_model_len=128,
            segment_layers=1,
            compile_cache=compile_cache,
            progress=False,
        ) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            if saved is not None:
                llm.save(saved)
        return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]

    saved = tmp_path / "saved"
    assert answers(tiny_model(name, tmp_path), 2, saved) == expected
    assert answers(saved, 2) == expected
    assert answers(saved, 4) == expected
