"""Changes with `order="memory_first"`: the FFNs of all layers change before or after the pages move."""

from pathlib import Path
from typing import Any

import jax
import pytest
from harness import engine_of
from transform_cases import Background, decoding, make, requests, tokens

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.reports import memory_report
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.transform.movers import InPlaceMover
from amoeba_jax.transform.relayout import Relayout
from amoeba_jax.views import MemoryReport
from sharding.owners import Owner

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("quick_steps")]


@pytest.mark.slow
@pytest.mark.parametrize("chain", [[4, 1], [2, 4, 2, 1]], ids=str)
def test_tokens_are_those_of_an_undisturbed_run(idle: LLM, chain: list[int]):
    running, expected = decoding(idle, 8, requests(12, max_tokens=90))
    reports = [idle.transform(tp, order="memory_first", layers_per_step=1) for tp in chain]
    assert sum(report.tokens for report in reports) > 0
    assert tokens(running.result()) == expected
    assert all(request.metrics.num_preemptions == 0 for request in running.outputs)


def kv_bytes(report: MemoryReport) -> dict[int | None, int]:
    """Return the bytes of the KV cache on device 0, by layer."""
    return {e.layer: e.num_bytes for e in report.entries if e.device == 0 and e.owner == Owner.KV_CACHE}


@pytest.mark.first_by_default
@pytest.mark.parametrize("order", [pytest.param("layer", marks=pytest.mark.slow), "memory_first"])
def test_a_merge_gives_room_before_the_first_page_moves(idle: LLM, monkeypatch: pytest.MonkeyPatch, order: Any):
    """With `memory_first`, all layers have their new memory, and each lane has more pages."""
    seen: list[tuple[dict[int | None, int], list[int]]] = []
    move = InPlaceMover.move

    def watched(mover: InPlaceMover, extents: list[jax.Array]) -> list[jax.Array]:
        instances = [instance for instance in engine_of(idle).instances if instance.transition is not None]
        sites = [(site, lane) for i in instances for site, lane in zip(i.transition.members, i.lanes, strict=True)]
        totals = [min(lane.pages.total_by_rank()[lane.ranks[site.group.home]]) for site, lane in sites]
        seen.append((kv_bytes(memory_report(engine_of(idle))), totals))
        return move(mover, extents)

    before, pages = kv_bytes(idle.memory()), idle.instances[0].kv_total_pages
    running, expected = decoding(idle, 8, requests(12, max_tokens=60))
    with monkeypatch.context() as patch:
        patch.setattr(InPlaceMover, "move", watched)
        idle.transform(4, order=order, layers_per_step=1)
    after = kv_bytes(idle.memory())
    first, totals = seen[0]
    grown = [layer for layer in before if first[layer] > before[layer]]
    last = idle.dims.config.num_layers - 1
    assert grown == (list(before) if order == "memory_first" else [last])
    assert {layer: first[layer] for layer in grown} == {layer: after[layer] for layer in grown}
    assert all((total > pages) == (order == "memory_first") for total in totals)
    idle.transform(1, order=order)
    assert tokens(running.result()) == expected


@pytest.mark.slow
def test_scarce_pages(directory: Path, compile_cache: str):
    """Requests wait and are preempted around the changes."""
    scarce = {"kv_cache_tokens": 24 * 4, "max_model_len": 64, "max_num_seqs": 8}
    with make(directory, compile_cache, **scarce) as llm:
        prompts, params = requests(16, max_tokens=20)
        prompts = [prompt[:9] for prompt in prompts]
        expected = tokens(llm.generate(prompts, params))
        running = Background(llm, prompts, params)
        llm.transform(4, order="memory_first", layers_per_step=1)
        llm.transform(1, order="memory_first", layers_per_step=1)
        assert tokens(running.result()) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["_release_ffns", "_append_low", "take_extents", "hand_over", "_restore_ffns", "_restore"]
)
@pytest.mark.parametrize("after", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_failure_loses_no_request(idle: LLM, monkeypatch: pytest.MonkeyPatch, where: str, after: int):
    running, expected = decoding(idle, 6, requests(8, max_tokens=80))
    method, calls, failed = getattr(Relayout, where), [0], []

    def failing(self: Relayout, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == after and not failed:
            failed.append(where)
            raise RuntimeError("injected")
        return method(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Relayout, where, failing)
        errors = 0
        for degree in (4, 1, 4, 1):
            try:
                idle.transform(degree, order="memory_first", layers_per_step=1)
            except TransformError:
                errors += 1
    once = where in ("_release_ffns", "_restore_ffns") and after == 3
    assert errors == (0 if once else 1)
    idle.transform(1)  # a failed split leaves the higher degree
    assert {view.tensor_parallel_size for view in idle.instances} == {1}
    assert tokens(running.result()) == expected


def test_orders_that_are_not_known_and_models_that_cannot(idle: LLM, directory: Path, compile_cache: str):
    with pytest.raises(RequestError, match="order='sideways' is not known: it must be one of layer, memory_first"):
        idle.transform(2, order="sideways")  # type: ignore[arg-type]
    with make(directory, compile_cache, transform_attention=True) as llm:
        with pytest.raises(RequestError, match="needs transform_attention=False"):
            llm.transform(2, order="memory_first")
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].error is None
