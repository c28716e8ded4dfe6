"""Engine for tests of transformations, without requests between tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import engine_of
from serving_checks import check_idle
from tiny_models import tiny_model
from transform_cases import DENSE, SHARED, make

from amoeba_jax import LLM


@pytest.fixture(scope="module")
def model_name() -> str:
    """Return the name of the tiny model of the module. Modules override this fixture with `EXPERTS_FIRST`.

    Running each test with both models would take too long, so most modules use the dense model. `test_transform.py` and
    `test_parallel_attention.py` share compiled programs. They use the model with experts by default.
    """
    return DENSE


@pytest.fixture(scope="module")
def directory(model_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(model_name, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def device_memory() -> str:
    """Return the memory budget of the engine. Modules override this fixture if their transformations copy layers."""
    return "4MiB"


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str, device_memory: str) -> Iterator[LLM]:
    with make(directory, compile_cache, device_memory=device_memory, **SHARED) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """Provide the engine as 4 x TP1 without requests. Check afterwards that no page or byte is lost."""
    before = [(dict(ledger.entries), dict(ledger.reserved)) for ledger in engine_of(llm).cluster.ledgers]
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)
    assert [(dict(ledger.entries), dict(ledger.reserved)) for ledger in engine_of(llm).cluster.ledgers] == before
