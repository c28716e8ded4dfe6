"""Eight instances merge into one TP8 instance, and split again."""

from pathlib import Path

import pytest
from serving_checks import check_idle
from tiny_models import tiny_model
from transform_cases import SHARED, make, requests, tokens

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_tokens_at_tp8_are_those_of_tp1(tmp_path: Path, compile_cache: str):
    """The model has one KV head, so each rank has a copy."""
    prompts, params = requests(2, max_tokens=8)
    sizes = {**SHARED, "num_devices": 8, "max_tensor_parallel_size": 8, "max_num_seqs": 2, "device_memory": "8MiB"}
    with make(tiny_model("qwen3", tmp_path), compile_cache, **sizes) as llm:
        expected = tokens(llm.generate(prompts, params))
        for degree in (8, 1):
            llm.transform(degree)
            assert {view.tensor_parallel_size for view in llm.instances} == {degree}
            assert tokens(llm.generate(prompts, params)) == expected
        check_idle(llm)
