"""Weights that instances release and restore while they keep their degree, beside running requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import engine_of, in_dispatcher, ledger_entries
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import tiny_config, write_model
from transform_cases import SHARED, Background, make, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.transform import residency
from amoeba_jax.transform.movers import InPlaceMover
from sharding.owners import Owner

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.fixture(scope="module", params=[False, True], ids=["feed-forward", "attention too"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = write_model(tiny_config("llama2"), tmp_path_factory.mktemp("models") / "tiny")
    settings = SHARED | {"device_memory": "16MiB", "transform_attention": request.param}
    with make(directory, compile_cache, **settings) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """4 x TP1 without requests, and found so afterwards, with no page or byte lost."""
    before = ledger_entries(llm)
    yield llm
    llm.transform(1)
    check_idle(llm)
    assert ledger_entries(llm) == before


def capacity(llm: LLM) -> int:
    return in_dispatcher(llm, lambda: engine_of(llm).instances[0].capacity_tokens)


def kv_bytes(llm: LLM) -> int:
    return sum(
        size for entries in ledger_entries(llm) for (_, owner), size in entries.items() if owner == Owner.KV_CACHE
    )


def test_the_same_degree_releases_and_restores(idle: LLM):
    """While requests decode: their tokens are as of an undisturbed run, and capacities those of the weights."""
    prompts, params = requests(8, max_tokens=60)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    idle.transform(4, release_weights=False)
    kept, kept_bytes = capacity(idle), kv_bytes(idle)
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 8)
    report = idle.transform(4)
    assert [group.to_degree for group in report.groups] == [4]
    assert capacity(idle) == engine_of(idle).capacity_tokens(4) > kept
    assert kv_bytes(idle) > kept_bytes
    report = idle.transform(4, release_weights=False)
    assert report.extra_bytes > 0
    assert (capacity(idle), kv_bytes(idle)) == (kept, kept_bytes)
    assert not idle.transform(4, release_weights=False).groups, "nothing is left to do"
    assert tokens(running.result()) == expected


def test_pages_in_released_extents_move_out(idle: LLM):
    """Prefixes that are cached there are found afterwards, as many as there is room for."""
    idle.transform(4)
    total = idle.instances[0].kv_total_pages
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [np.random.default_rng(i).integers(3, 200, 100).tolist() for i in range(total // 25 + 2)]
    expected = tokens(idle.generate(prompts, params))
    before = idle.instances[0].num_cached_pages
    (group,) = idle.transform(4, release_weights=False).groups
    assert group.prefix_pages_kept + group.prefix_pages_dropped == before
    assert group.prefix_pages_dropped > 0
    assert group.prefix_pages_kept == idle.instances[0].num_cached_pages >= 0.9 * idle.instances[0].kv_total_pages
    cached = idle.stats.cached_tokens
    assert tokens(idle.generate(prompts[-3:], params)) == expected[-3:]
    assert idle.stats.cached_tokens - cached >= 0.9 * 3 * 96


def test_requests_that_would_not_fit_refuse_it(tmp_path: Path, compile_cache: str):
    """They have more pages than there would be without the released weights. Nothing changes, and they go on."""
    directory = write_model(tiny_config("llama2"), tmp_path / "tiny")
    with make(directory, compile_cache, kv_cache_tokens=32, device_memory="8MiB", max_num_seqs=8) as llm:
        llm.transform(4)
        total = llm.instances[0].kv_total_pages
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompts = [np.random.default_rng(i).integers(3, 200, 80).tolist() for i in range(4)]
        expected = tokens(llm.generate(prompts, params))
        forget_prefixes(llm)
        running = Background(llm, prompts, params)
        wait_until_decoding(llm, len(prompts))
        with pytest.raises(
            RequestError, match=r"requests have \d+ pages, and without the released weights there are 32"
        ):
            llm.transform(4, release_weights=False)
        assert llm.instances[0].kv_total_pages == total
        assert tokens(running.result()) == expected


@pytest.mark.parametrize("layer", [0, 1])
def test_restoring_that_fails_loses_no_request(idle: LLM, monkeypatch: pytest.MonkeyPatch, layer: int):
    """In any layer: the instance goes on without the weights, and computes its requests again."""
    prompts, params = requests(6, max_tokens=40)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    idle.transform(4)
    with_weights_released = capacity(idle)
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 6)
    real = InPlaceMover.restore
    calls: list[Any] = []

    def failing(self: InPlaceMover, released: Any, extents: Any) -> Any:
        calls.append(released)
        if len(calls) > layer:
            raise RuntimeError("no memory")
        return real(self, released, extents)

    with monkeypatch.context() as patch:
        patch.setattr(residency.InPlaceMover, "restore", failing)
        with pytest.raises(TransformError, match=r"no memory.*computed again"):
            idle.transform(4, release_weights=False)
    assert capacity(idle) == with_weights_released
    assert tokens(running.result()) == expected
    idle.transform(4, release_weights=False)
    assert tokens(idle.generate(prompts, params)) == expected


def test_nothing_is_released_while_requests_are_paused(idle: LLM):
    prompts, params = requests(4, max_tokens=40)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 4)
    idle.transform(4, release_weights=False, running="pause")
    with pytest.raises(RequestError, match="requests are paused on devices"):
        idle.transform(4)
    idle.transform(1)
    assert tokens(running.result()) == expected
