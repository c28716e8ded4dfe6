"""Data-parallel attention beside expert-parallel FFNs: from the start, through every change, and after failures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import settled_live_bytes
from harness import engine_of, in_dispatcher, ledger_entries
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import ragged_prompts
from transform_cases import (
    EXPERTS_FIRST,
    SHARED,
    Background,
    after_each_switch,
    make,
    requests,
    tokens,
    wait_until_decoding,
)

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import LayoutError, RequestError, TransformError
from amoeba_jax.instances.runner import Runner
from amoeba_jax.transform import merge_split, parallel_attention
from amoeba_jax.transform.movers import InPlaceMover
from amoeba_jax.transform.transition import Transition

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]

GOLDEN = Path(__file__).parent.parent / "golden"
ASKED = requests(8, max_tokens=48)


@pytest.fixture(
    scope="module",
    params=[*EXPERTS_FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3-moe-mixed", "gpt-oss"))],
)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


def apart(num_layers: int = 2, devices: int = 4, degree: int = 1) -> dict[str, Any]:
    """Attention on parts of the devices, and FFNs on all of them."""
    whole = list(range(devices))
    parts = [whole[start : start + degree] for start in range(0, devices, degree)]
    attention = {"layers": [0, num_layers], "module": "attention", "homes": parts}
    return {"head": whole, "stages": [attention, {"layers": [0, num_layers], "module": "ffn", "homes": [whole]}]}


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, placement=apart(), **SHARED) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[tuple[int, ...]]]:
    """Tokens of `ASKED` at 4 x TP1."""
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
        assert report.device_bytes(device) == pytest.approx(live[device], rel=0.01, abs=4096)


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


@pytest.mark.parametrize(
    "chain",
    [
        [(4, 4), (4, 1)],
        pytest.param([(1, 1), (4, 1), (2, 2), (4, 2), (4, 1)], marks=pytest.mark.slow),
        pytest.param([(2, 1), (4, 1), (1, 1), (2, 1), (4, 2), (1, 1), (4, 1)], marks=pytest.mark.slow),
    ],
    ids=str,
)
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


@pytest.mark.slow
def test_split_to_replicas_and_back(idle: LLM, expected: list[list[tuple[int, ...]]]):
    """The way leads through TP4, in one call."""
    background = running(idle)
    report = idle.transform(1)
    assert [(group.from_degree, group.to_degree) for group in report.groups] == [(1, 4), (4, 1)]
    assert [view.tensor_parallel_size for view in idle.instances] == [1] * 4
    assert tokens(background.result()) == expected


@pytest.mark.slow
def test_cached_prefixes_survive(idle: LLM):
    prompts = [np.random.default_rng(seed).integers(3, 200, 40).tolist() for seed in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    before = tokens(idle.generate(prompts, greedy))
    for attention in (4, 1):
        idle.transform(4, attention_degree=attention)
        cached = idle.stats.cached_tokens
        assert tokens([idle.generate(prompt, greedy)[0] for prompt in prompts]) == before
        assert idle.stats.cached_tokens - cached >= 4 * 36


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


@pytest.mark.first_by_default
@pytest.mark.parametrize("up", [True, False], ids=["join", "divide"])
@pytest.mark.parametrize(
    ("owner", "name", "call", "at_start"),
    [
        (InPlaceMover, "move", 1, False),
        pytest.param(Transition, "hand_over", 2, False, marks=pytest.mark.slow),
        (Transition, "_plan_moves", 1, True),
        (None, "prepare", 1, True),
        (Runner, "run", 1, False),
    ],
)
def test_a_failure_loses_no_request(
    idle: LLM,
    expected: list[list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    up: bool,
    owner: Any,
    name: str,
    call: int,
    at_start: bool,
):
    """Before the first switch, all stays as it was. Later, the group ends with attention of its own degree."""
    if not up:
        idle.transform(4)
    owner = owner or (parallel_attention if up else merge_split)
    background, method, calls = running(idle), getattr(owner, name), [0]

    def failing(*arguments: Any, **options: Any) -> Any:
        if owner is not Runner or engine_of(idle).instances[0].transition is not None:
            calls[0] += 1
            if calls[0] == call:
                raise RuntimeError("injected")
        return method(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(TransformError, match="injected"):
            idle.transform(4, attention_degree=4 if up else 1, layers_per_step=1)
    (instance,) = engine_of(idle).instances
    assert instance.attention_degree == (1 if up and at_start else 4)
    assert tokens(background.result()) == expected


@pytest.mark.slow
def test_a_step_that_fails_loses_no_request(
    idle: LLM, expected: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
):
    background, run, failed = running(idle), Runner.run, idle.stats.failed_steps

    def failing(self: Runner, inputs: Any) -> Any:
        monkeypatch.setattr(Runner, "run", run)
        for site in self.sites.values():  # as after a donation
            for extent in site.extents():
                extent.delete()
        raise RuntimeError("injected")

    monkeypatch.setattr(Runner, "run", failing)
    assert tokens(background.result()) == expected
    assert idle.stats.failed_steps == failed + 1
    assert is_apart(idle)


@pytest.mark.slow
def test_a_budget_that_is_exceeded_refuses(idle: LLM, expected: list[list[tuple[int, ...]]]):
    background, ledger = running(idle), engine_of(idle).cluster.ledgers[2]

    def fill() -> int:
        needed, ledger.reserved["staging"] = ledger.reserved["staging"], 0
        ledger.reserve("test", ledger.free_bytes)
        return needed

    def empty(needed: int) -> None:
        del ledger.reserved["test"]
        ledger.reserved["staging"] = needed

    needed = in_dispatcher(idle, fill)
    try:
        with pytest.raises((RequestError, TransformError), match="staging"):
            idle.transform(4)
    finally:
        in_dispatcher(idle, empty, needed)
    assert is_apart(idle)
    assert tokens(background.result()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("up", [True, False], ids=["join", "divide"])
def test_requests_are_cancelled_on_the_way(
    idle: LLM, expected: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch, up: bool
):
    if not up:
        idle.transform(4)
    names = [f"r{index}" for index in range(len(ASKED[0]))]
    background = Background(idle, *ASKED, request_ids=names)
    wait_until_decoding(idle, 6)
    cancelled: list[str] = []

    def cancel(_: Transition) -> None:
        if not cancelled:
            cancelled.append(names[1])
            running = [s for i in engine_of(idle).instances for s in i.running if s.request_id == names[1]]
            engine_of(idle).finish(running, "abort")

    with monkeypatch.context() as patch:
        after_each_switch(patch, cancel)
        idle.transform(4, attention_degree=4 if up else 1, layers_per_step=1)
    assert cancelled
    found = tokens(background.result())
    assert found[:1] + found[2:] == expected[:1] + expected[2:]
    assert all(want[: len(have)] == have for have, want in zip(found[1], expected[1], strict=True))


@pytest.mark.slow
def test_devices_without_room_for_all_weights_keep_the_placement(directory: Path, compile_cache: str):
    """They serve, but do not merge."""
    with make(directory, compile_cache, **SHARED) as llm:
        report, prompts = llm.memory(), ragged_prompts(200)
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = tokens(llm.generate(prompts, greedy))
    owners = report.by_owner(0)
    budget = report.reserved_bytes[0] + sum(size for owner, size in owners.items() if owner != "kv cache")
    with make(
        directory, compile_cache, placement=apart(), **SHARED | {"device_memory": budget, "kv_cache_tokens": None}
    ) as llm:
        assert tokens(llm.generate(prompts, greedy)) == expected
        with pytest.raises(LayoutError, match="do not hold all weights"):
            llm.transform(4)


@pytest.mark.slow
def test_warm_ups_compile_all_programs(directory: Path, compile_cache: str, expected: list[list[tuple[int, ...]]]):
    sizes = {**SHARED, "num_devices": 2, "max_tensor_parallel_size": 2, "max_num_seqs": 2, "strict_compile": True}
    with make(directory, compile_cache, placement=apart(devices=2), **sizes) as llm:
        llm.warmup()
        assert is_apart(llm)
        background = Background(llm, *ASKED)
        wait_until_decoding(llm, 2)
        for attention in (2, 1):
            llm.transform(2, attention_degree=attention)
        assert tokens(background.result()) == expected
        assert llm.stats.late_programs == 0
