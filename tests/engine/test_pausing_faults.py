"""A single fault while requests pause, are paused or resume ends at most one transformation or request."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from fault_cases import NO_MEMORY, Faults, Outcome, PausingLoad, only_fault
from harness import engine_of
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM
from amoeba_jax.errors import MemoryBudgetError, RequestError, RequestFailedError, TransformError
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.transform import pausing

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]

SETTINGS: dict[str, Any] = {
    "num_devices": 2,
    "device_memory": "8MiB",
    "kv_cache_tokens": 256,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "segment_layers": 1,
    "phase_pages": 16,
    "progress": False,
}
EARLY = pytest.mark.parametrize("early", [False, True], ids=["after the urgent ones", "beside the urgent ones"])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with 2 x TP1."""
    directory: Path = write_model(
        tiny_config("llama2") | {"num_hidden_layers": 3}, tmp_path_factory.mktemp("models") / "model"
    )
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, Any]:
    """Return the tokens of the load without a fault."""
    found = []
    for early in (False, True):
        outcome = PausingLoad(llm, early).run()
        assert not outcome.failures
        found.append(outcome.tokens)
    assert found[0] == found[1]
    return found[0]


@pytest.fixture(autouse=True)
def no_records() -> Iterator[None]:
    """Disable logging. Pytest keeps log records, whose errors keep stack frames and device buffers alive."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def ledgers(llm: LLM) -> list[dict[Any, int]]:
    return [{key: size for key, size in it.entries.items() if size} for it in engine_of(llm).cluster.ledgers]


def check(llm: LLM, outcome: Outcome, expected: dict[str, Any], before: list[dict[Any, int]]) -> None:
    """Check that at most one failure of a known kind happened, and that another load gives the expected tokens."""
    assert len(outcome.failures) <= 1, outcome.failures
    for error in outcome.failures:
        assert isinstance(error, RequestFailedError | TransformError | RequestError | MemoryBudgetError), repr(error)
    assert outcome.tokens == {name: expected[name] for name in outcome.tokens}
    outcome.failures.clear()
    again = PausingLoad(llm).run()
    assert not again.failures
    assert again.tokens == expected
    check_idle(llm)
    assert ledgers(llm) == before


HOWS = [
    *((kind, "before") for kind in ("step", "head", "sample_full", "set_state", "exchange")),
    *(pytest.param(kind, "after", marks=pytest.mark.slow) for kind in ("step", "head", "sample_full", "set_state")),
    ("exchange", "after"),
    ("head", "unread"),
    pytest.param("sample_full", "unread", marks=pytest.mark.slow),
]


@EARLY
@pytest.mark.parametrize(("kind", "how"), HOWS)
def test_programs_that_fail_while_requests_are_paused(
    llm: LLM, expected: dict[str, Any], kind: str, how: str, early: bool
):
    """The middle call of each kind fails. Most of these calls happen while other requests are paused."""
    before = ledgers(llm)
    counted = Faults()
    with counted.injected(llm):
        PausingLoad(llm, early).run()
    if not counted.calls[kind]:
        assert kind == "exchange", "which only changes beside paused requests need"
        assert not early
        return
    fault = Faults(kind, how, (counted.calls[kind] + 1) // 2)
    with fault.injected(llm):
        outcome = PausingLoad(llm, early).run()
    assert fault.happened
    check(llm, outcome, expected, before)


@EARLY
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part % 4 == 1 else pytest.mark.slow) for part in range(12)]
)
def test_copies_to_devices_that_fail_once(llm: LLM, expected: dict[str, Any], part: int, early: bool):
    before = ledgers(llm)
    with pytest.MonkeyPatch.context() as patch:
        counting, count = only_fault(jax.device_put, 0, RuntimeError())
        patch.setattr(jax, "device_put", counting)
        PausingLoad(llm, early).run()
    with pytest.MonkeyPatch.context() as patch:
        failing, _ = only_fault(jax.device_put, 1 + part * count[0] // 12, jax.errors.JaxRuntimeError(NO_MEMORY))
        patch.setattr(jax, "device_put", failing)
        outcome = PausingLoad(llm, early).run()
    check(llm, outcome, expected, before)


BOUNDARIES: list[tuple[Any, str]] = [
    (pausing, "combine"),
    (InstanceFactory, "new_instance"),
    (InstanceFactory, "allocators_of"),
]
"""Functions that a pause calls before it changes anything."""


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("owner", "name"), BOUNDARIES, ids=[name for _, name in BOUNDARIES])
@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError(NO_MEMORY), MemoryBudgetError("injected")], ids=["device", "budget"]
)
def test_memory_that_is_missing_for_a_pause(
    llm: LLM, expected: dict[str, Any], owner: Any, name: str, number: int, error: Exception
):
    """The pause is refused or fails without any change. Its requests continue beside the urgent requests."""
    before = ledgers(llm)
    called: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        failing, count = only_fault(getattr(owner, name), number, error)
        patch.setattr(owner, name, failing)
        outcome = PausingLoad(llm).run()
        called += count
    assert called[0] >= 1
    assert len(outcome.failures) == (1 if called[0] >= number else 0)
    assert set(outcome.tokens) == set(expected), "all requests ended well"
    check(llm, outcome, expected, before)
