"""Sixteen instances merge into two TP8 instances and split again. Each half also merges alone.

The tests run in a separate process, because the test session has fewer devices.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_compiling import compiling_quickly
from serving_checks import check_idle
from tiny_models import tiny_model
from transform_cases import SHARED, Background, make, requests, tokens, wait_until_decoding

from amoeba_jax import LLM

NUM_DEVICES, DEGREE = 16, 8
_SCRIPT = "import test_sixteen_devices as test; test.merge_and_split_halves()"

pytestmark = pytest.mark.timeout(1000)


def degrees(llm: LLM) -> list[int]:
    return [view.tensor_parallel_size for view in llm.instances]


def merge_and_split_halves() -> None:
    """Serve on sixteen devices, in a separate process. Its arguments are the model and the compile cache."""
    asked = requests(16, max_tokens=40)
    sizes = {**SHARED, "max_tensor_parallel_size": DEGREE, "max_num_seqs": 2, "device_memory": "8MiB"}
    with (
        compiling_quickly(),
        make(Path(sys.argv[1]), sys.argv[2], num_devices=NUM_DEVICES, compile_beside=False, **sizes) as llm,
    ):
        expected = tokens(llm.generate(*asked))
        for devices, merged in (
            (range(16), [8, 8]),
            (range(8), [8, *[1] * 8]),
            (range(8, 16), [*[1] * 8, 8]),
        ):
            running = Background(llm, *asked)
            wait_until_decoding(llm, 8)
            reports = [llm.transform(DEGREE, devices=devices)]
            assert degrees(llm) == merged
            assert tokens(llm.generate(*asked)) == expected
            assert tokens(running.result()) == expected
            running = Background(llm, *asked)
            wait_until_decoding(llm, 8)
            reports.append(llm.transform(1, devices=devices))
            assert degrees(llm) == [1] * NUM_DEVICES
            assert tokens(running.result()) == expected
            assert all(report.tokens > 0 for report in reports)
            check_idle(llm)


@pytest.mark.slow
def test_tokens_do_not_depend_on_merges_of_both_halves_or_of_one(tmp_path: Path, compile_cache: str):
    """The model has one KV head, so each rank has a copy."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "transform"), str(tests), *filter(None, sys.path)]
    environment = os.environ | {"NPROC": "32", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _SCRIPT, str(tiny_model("qwen3", tmp_path)), compile_cache]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
