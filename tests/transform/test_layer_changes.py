"""Layers replicate, migrate and leave devices while requests run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from device_memory import settled_live_bytes
from harness import engine_of, in_dispatcher
from serving_checks import check_idle
from tiny_models import tiny_config, write_model
from transform_cases import SETTINGS, Background, decoding, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.reports import memory_report
from amoeba_jax.errors import EngineClosedError, LayoutError, MemoryBudgetError, RequestError
from sharding.owners import Owner

pytestmark = pytest.mark.usefixtures("quick_steps")

NUM_LAYERS = 6
ONE = {"head": [0], "stages": [{"layers": [0, NUM_LAYERS], "homes": [[0]]}]}
SIZES: dict[str, Any] = {
    **SETTINGS,
    "device_memory": "16MiB",
    "kv_cache_tokens": 1024,
    "segment_layers": 2,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3") | {"num_hidden_layers": NUM_LAYERS}
    return write_model(config, tmp_path_factory.mktemp("model"))


ENGINES: WeakSet[LLM] = WeakSet()
"""Engines of these tests, which share the devices."""


def engine(directory: Path, compile_cache: str, **changes: Any) -> LLM:
    llm = LLM(directory, compile_cache=compile_cache, **{**SIZES, "num_devices": 4, **changes})
    ENGINES.add(llm)
    return llm


@pytest.fixture(scope="module")
def first_only(directory: Path, compile_cache: str) -> Iterator[LLM]:
    """Provide an engine with one instance, on device 0. The other devices are empty."""
    with engine(directory, compile_cache, placement=ONE) as llm:
        yield llm


@pytest.fixture(scope="module")
def replicas(directory: Path, compile_cache: str) -> Iterator[LLM]:
    """Provide an engine with an instance on each of four devices."""
    with engine(directory, compile_cache) as llm:
        yield llm


def check_bytes() -> None:
    """Check that the ledgers match the bytes of all live buffers within 1%."""
    live = settled_live_bytes()
    reports = []
    for llm in ENGINES:
        with contextlib.suppress(EngineClosedError):
            reports.append(llm.memory())
    for device in range(4):
        held = sum(report.device_bytes(device) for report in reports)
        assert held == pytest.approx(live.get(device, 0), rel=0.01, abs=4096)


def weight_bytes(llm: LLM, layers: range) -> int:
    specs = engine_of(llm).cluster.weights.specs.values()
    return sum(spec.num_bytes(llm.dims.dtype) for spec in specs if spec.layer in layers)


@pytest.mark.slow
def test_ten_layers_of_two_devices(first_only: LLM):
    """Device 1 gains only weights, KV cache and hidden states of the layers. `evict` frees them."""
    llm, layers = first_only, range(1, 5)
    before = llm.memory()
    assert [before.device_bytes(device) for device in (1, 2, 3)] == [0, 0, 0]
    running, expected = decoding(llm, 4, requests(4, max_tokens=60))
    report = llm.replicate(layers, 1)
    wait_until_decoding(llm, 1)
    assert report.copied_bytes == weight_bytes(llm, layers)
    assert (report.shared_bytes, report.recomputed) == (0, 0)
    assert report.steps > 0
    assert report.kv_moved_bytes > 0
    memory = llm.memory()
    kv = sum(e.num_bytes for e in before.entries if e.device == 0 and e.owner == Owner.KV_CACHE and e.layer in layers)
    owners = memory.by_owner(1)
    assert owners.pop(Owner.KV_CACHE) == kv
    assert owners.pop(Owner.HIDDEN) == before.by_owner(0)[Owner.HIDDEN]
    assert sum(owners.values()) == weight_bytes(llm, layers)
    assert report.device_bytes_delta == (0, memory.device_bytes(1), 0, 0)
    assert str(llm.placement()) == "0: TP1[0]   1-4: TP1[0], TP1[1]   5: TP1[0]"
    assert tokens(running.result()) == expected
    check_bytes()
    check_idle(llm)
    assert tokens(llm.generate(*requests(4, max_tokens=60))) == expected
    report = llm.evict(layers, 1)
    assert [llm.memory().device_bytes(device) for device in (1, 2, 3)] == [0, 0, 0]
    assert llm.memory().by_owner(0) == before.by_owner(0)
    check_bytes()
    check_idle(llm)


def test_every_running_request_gets_a_token_in_every_step(first_only: LLM):
    llm = first_only

    def progress() -> tuple[int, int]:
        engine = engine_of(llm)
        engine.drain()
        return engine.stats.steps, sum(len(sequence.output) for sequence in engine.sequences.running)

    prompts = [list(range(3 + index, 11 + index)) for index in range(4)]
    running, expected = decoding(llm, 4, (prompts, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)))
    steps, generated = in_dispatcher(llm, progress)
    for change in (
        lambda: llm.replicate(range(1, 5), 1),
        lambda: llm.migrate(range(5, 6), 2),
        lambda: llm.evict(range(1, 5), 1),
        lambda: llm.migrate(range(5, 6), 0),
    ):
        report = change()
        assert report.steps > 0
        now_steps, now_generated = in_dispatcher(llm, progress)
        assert now_generated - generated == 4 * (now_steps - steps) > 0
        steps, generated = now_steps, now_generated
    assert tokens(running.result()) == expected
    check_idle(llm)


def test_requests_that_decode_keep_their_tokens_through_every_change(replicas: LLM):
    llm = replicas
    running, expected = decoding(llm, 4, requests(8, max_tokens=80))
    logits = llm.logits(list(range(3, 40)), 20)
    reports = [
        llm.replicate(range(0, 3), 1),
        llm.replicate(range(2, 6), 2),
        llm.migrate(range(4, 5), 3, modules="ffn"),
        llm.migrate(range(5, 6), 3),
        llm.replicate(range(0, 2), 0, instance=1),
        llm.evict(range(0, 3), 1),
        llm.migrate(range(5, 6), 0),
    ]
    np.testing.assert_allclose(llm.logits(list(range(3, 40)), 20), logits, atol=1e-4, rtol=0)
    assert [report.copied_bytes for report in reports] == [0] * 6 + [weight_bytes(llm, range(5, 6))]
    assert not any(report.recomputed for report in reports)
    assert tokens(running.result()) == expected
    check_bytes()
    for call in (
        lambda: llm.evict(range(2, 6), 2),
        lambda: llm.migrate(range(4, 5), 0, modules="ffn"),
        lambda: llm.evict(range(0, 2), 0, instance=1),
    ):
        call()
    assert [str(llm.placement(number)) for number in range(4)] == [f"0-5: TP1[{number}]" for number in range(4)]
    check_idle(llm)
    check_bytes()


@pytest.mark.slow
def test_all_layers_migrate_and_the_rest_of_the_memory_becomes_cache(first_only: LLM):
    llm = first_only
    before, pages = llm.memory(), llm.instances[0].kv_total_pages
    running, expected = decoding(llm, 4, requests(4, max_tokens=80))
    report = llm.migrate(range(2, 6), 1)
    assert report.copied_bytes == weight_bytes(llm, range(2, 6))
    memory = llm.memory()
    gone = sum(e.num_bytes for e in before.entries if e.device == 0 and e.layer in range(2, 6))
    left = sum(e.num_bytes for e in memory.entries if e.device == 0 and e.layer in range(2, 6))
    assert (left, gone > report.copied_bytes) == (0, True)
    assert memory.by_owner(1)[Owner.KV_CACHE] == before.by_owner(0)[Owner.KV_CACHE] * 4 // 6
    kv = {e.layer: e.num_bytes for e in memory.entries if e.device == 0 and e.owner == Owner.KV_CACHE and e.num_bytes}
    assert kv.keys() == {0, 1}
    assert kv[0] > before.by_owner(0)[Owner.KV_CACHE] // 6
    llm.migrate(range(0, 2), 1)
    assert str(llm.placement()) == "0-5: TP1[1]"
    assert llm.memory().by_owner(0).get(Owner.KV_CACHE, 0) == 0
    assert llm.instances[0].kv_total_pages == pages
    assert tokens(running.result()) == expected
    assert tokens(llm.generate(*requests(4, max_tokens=80))) == expected
    check_idle(llm)
    running = Background(llm, *requests(4, max_tokens=80))
    wait_until_decoding(llm, 4)
    llm.migrate(range(0, 6), 0)
    assert tokens(running.result()) == expected
    assert [llm.memory().device_bytes(device) for device in (1, 2, 3)] == [0, 0, 0]
    assert llm.memory().by_owner(0) == before.by_owner(0)
    check_bytes()
    check_idle(llm)


def test_a_replica_scales_out_and_in(first_only: LLM):
    llm = first_only
    before = llm.memory()
    running, expected = decoding(llm, 3, requests(3, max_tokens=80))
    report = llm.scale_out(1)
    assert report.recomputed == 0
    assert [view.devices for view in llm.instances] == [(0,), (1,)]
    assert all(view.running > 0 for view in llm.instances)
    check = llm.memory()
    assert check.by_owner(0) == check.by_owner(1) == before.by_owner(0)
    report = llm.scale_in(1)
    assert [view.devices for view in llm.instances] == [(0,)]
    assert llm.memory().by_owner(0) == before.by_owner(0)
    assert llm.memory().device_bytes(1) == 0
    assert tokens(running.result()) == expected
    check_idle(llm)
    llm.scale_out(1)
    llm.transform(2, devices=[0, 1])
    assert [view.devices for view in llm.instances] == [(0, 1)]
    assert tokens(llm.generate(*requests(3, max_tokens=80))) == expected
    llm.transform(1, devices=[0, 1])
    llm.scale_in(1)
    check_bytes()
    check_idle(llm)
    assert llm.memory().by_owner(0) == before.by_owner(0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.replicate(range(0, 7), 1), LayoutError, "layers 0-6 are not among the model's 6"),
        (lambda llm: llm.replicate(range(3, 3), 1), LayoutError, "not among"),
        (lambda llm: llm.replicate(range(0, 4, 2), 1), LayoutError, "not among"),
        (lambda llm: llm.replicate([1, 2], 1), RequestError, "must be a range"),
        (lambda llm: llm.replicate(range(2), 0), LayoutError, "already computes"),
        (lambda llm: llm.replicate(range(2), 4), LayoutError, "there are devices 0 to 3"),
        (lambda llm: llm.replicate(range(2), -1), LayoutError, "there are devices 0 to 3"),
        (lambda llm: llm.replicate(range(2), 1, instance=3), RequestError, r"there is no instance 3: there are \[0\]"),
        (lambda llm: llm.replicate(range(2), 1, modules="head"), RequestError, "must be one of layer"),
        (lambda llm: llm.replicate(range(2), "1"), RequestError, "must be an integer"),
        (lambda llm: llm.evict(range(2), 0), LayoutError, "the only home"),
        (lambda llm: llm.evict(range(2), 1), LayoutError, "no home"),
        (lambda llm: llm.migrate(range(2), 0), LayoutError, "are at TP1\\[0\\] already"),
        (lambda llm: llm.migrate(range(2), 1, modules="kv", move_kv=False), RequestError, "move_kv=False"),
        (lambda llm: llm.scale_out(0), LayoutError, "not empty"),
        (lambda llm: llm.scale_in(2), LayoutError, "no other instance"),
        (lambda llm: llm.transform(2, devices=[0, 1]), LayoutError, r"devices \[1\] are empty"),
    ],
)
def test_what_is_not_possible_is_refused(first_only: LLM, call: Any, error: type[Exception], message: str):
    before = first_only.memory()
    with pytest.raises(error, match=message):
        call(first_only)
    assert first_only.memory() == before


def test_groups_and_guests_stand_in_each_others_way(replicas: LLM):
    replicas.transform(2, devices=[2, 3])
    with pytest.raises(LayoutError, match="split it first"):
        replicas.replicate(range(2), 2)
    with pytest.raises(LayoutError, match="Split the instance"):
        replicas.replicate(range(2), 1, instance=2)
    replicas.transform(1, devices=[2, 3])
    replicas.replicate(range(2), 1)
    with pytest.raises(LayoutError, match="Evict its replicas"):
        replicas.transform(2, devices=[0, 1])
    replicas.evict(range(2), 1)


def test_a_device_without_memory_refuses(directory: Path, compile_cache: str):
    with engine(directory, compile_cache, placement=ONE) as llm:
        ledger = engine_of(llm).cluster.ledgers[1]
        in_dispatcher(llm, lambda: ledger.reserve("test", ledger.budget_bytes))
        before = llm.memory()
        with pytest.raises(MemoryBudgetError, match="device 1 has"):
            llm.replicate(range(2), 1)
        assert llm.memory() == before
        assert llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))[0].outputs
        assert in_dispatcher(llm, lambda: memory_report(engine_of(llm))).device_bytes(1) == 0
