"""An engine for the tests of transformations, and that engine between two of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_checks import check_idle
from tiny_models import tiny_model
from transform_cases import SHARED, make

from amoeba_jax import LLM


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, **SHARED) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The engine as 4 x TP1 without requests, and found so afterwards, with no page lost."""
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)
