"""Data-parallel attention beside expert-parallel FFNs: at the start, through all changes, and after failures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import settled_live_bytes
from harness import engine_of, ledger_entries
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import ragged_prompts
from transform_cases import (
    EXPERTS,
    SHARED,
    Background,
    make,
    requests,
    tokens,
    wait_until_decoding,
)

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import LayoutError, RequestError, TransformError
from amoeba_jax.transform.movers import InPlaceMover

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]

GOLDEN = Path(__file__).parent.parent / "golden"
ASKED = requests(8, max_tokens=48)


@pytest.fixture(scope="module")
def model_name() -> str:
    return EXPERTS


def apart(num_layers: int = 2, devices: int = 4, degree: int = 1) -> dict[str, Any]:
    """Return a placement with attention on parts of the devices and FFNs on all devices."""
    whole = list(range(devices))
    parts = [whole[start : start + degree] for start in range(0, devices, degree)]
    attention = {"layers": [0, num_layers], "module": "attention", "homes": parts}
    return {"head": whole, "stages": [attention, {"layers": [0, num_layers], "module": "ffn", "homes": [whole]}]}


ELSEWHERE: dict[int, int] = {}
"""Bytes of each device that earlier tests in this process left. They may become free at any time."""


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    ELSEWHERE.update(settled_live_bytes())
    with make(directory, compile_cache, placement=apart(), **SHARED) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[tuple[int, ...]]]:
    """Return the tokens of `ASKED` at 4 x TP1."""
    llm.transform(1)
    found = tokens(llm.generate(*ASKED))
    llm.transform(4, attention_degree=1)
    return found


def is_apart(llm: LLM) -> bool:
    return [i.runner.placement.attention_degree for i in engine_of(llm).instances] == [1]


@pytest.fixture
def idle(llm: LLM, expected: list[list[tuple[int, ...]]]) -> Iterator[LLM]:
    """Provide the engine with data-parallel attention. Check afterwards that no page or byte is lost."""
    if not is_apart(llm):
        llm.transform(4, attention_degree=1)
    forget_prefixes(llm)
    before = ledger_entries(llm)
    yield llm
    llm.transform(4, attention_degree=1)
    assert is_apart(llm)
    check_idle(llm)
    assert ledger_entries(llm) == before
    live, report = settled_live_bytes(), llm.memory()
    for device in range(4):
        most = 1.01 * report.device_bytes(device) + 4096
        assert 0.99 * report.device_bytes(device) - 4096 <= live[device] <= most + ELSEWHERE.get(device, 0)


def running(llm: LLM, count: int = 6) -> Background:
    found = Background(llm, *ASKED)
    wait_until_decoding(llm, count)
    return found


def test_tokens_at_the_start_are_those_of_transformers(llm: LLM, model_name: str):
    golden = np.load(GOLDEN / f"{model_name}.npz")
    prompts = ragged_prompts(llm.dims.config.vocab_size)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert list(output.outputs[0].token_ids) == golden[f"tokens_{index}"][len(prompt) :].tolist()
    (view,) = llm.instances
    assert view.tensor_parallel_size == 4
    assert llm.placement().attention_degree == 1


@pytest.mark.slow
@pytest.mark.parametrize("chain", [[(4, 4), (4, 1)]], ids=str)
def test_tokens_do_not_depend_on_changes(
    idle: LLM, expected: list[list[tuple[int, ...]]], chain: list[tuple[int, int]]
):
    background, sampled = running(idle), 0
    for degree, attention in chain:
        report = idle.transform(degree, attention_degree=attention, layers_per_step=1)
        sampled += report.tokens
        assert report.extra_bytes <= engine_of(idle).cluster.memory_plan.staging_bytes
        assert {(i.tp, i.attention_degree) for i in engine_of(idle).instances} == {(degree, attention)}
    assert tokens(background.result()) == expected
    assert sampled > 0, "the requests had ended before"
    assert all(request.metrics.num_preemptions == 0 for request in background.outputs)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.transform(4, running="pause", release_weights=False), RequestError, "running='pause' is not"),
        (lambda llm: llm.transform(4, attention_degree=3), LayoutError, "attention_degree=3 must be a power of two"),
        (lambda llm: llm.transform(2, attention_degree=4), LayoutError, "at most tensor_parallel_size=2"),
        (lambda llm: llm.transform(4, attention_degree=0), LayoutError, "attention_degree=0"),
        (lambda llm: llm.transform(4, attention_degree=True), LayoutError, "attention_degree=True"),
        (lambda llm: llm.transform(2, devices=[0, 1]), LayoutError, "cut instance"),
        (lambda llm: llm.replicate(range(1), 1), LayoutError, "already computes"),
        (lambda llm: llm.replicate(range(1), 1, modules="ffn"), LayoutError, "already computes"),
        (lambda llm: llm.migrate(range(1), 1, modules="attention"), LayoutError, "Split the instance first"),
        (lambda llm: llm.migrate(range(1), 1, modules="ffn"), LayoutError, "Split the instance first"),
        (lambda llm: llm.evict(range(1), 1, modules="attention"), LayoutError, "Split the instance first"),
        (lambda llm: llm.scale_out(1), LayoutError, "must have all layers on one device"),
        (lambda llm: llm.scale_in(1), LayoutError, "must have all layers on one device"),
    ],
)
def test_what_makes_no_sense_is_refused(idle: LLM, call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(idle)
    assert is_apart(idle)


def test_a_failure_loses_no_request(idle: LLM, expected: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch):
    """A failed move leaves the group with attention of its own degree."""

    def failing(*_: Any) -> Any:
        raise RuntimeError("injected")

    background = running(idle)
    with monkeypatch.context() as patch:
        patch.setattr(InPlaceMover, "move", failing)
        with pytest.raises(TransformError, match="injected"):
            idle.transform(4, attention_degree=4, layers_per_step=1)
    assert engine_of(idle).instances[0].attention_degree == 4
    assert tokens(background.result()) == expected
