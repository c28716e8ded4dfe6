"""Prompts, new requests and cached prefixes while layers change their homes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import tiny_config, write_model
from transform_cases import SETTINGS, SHARED, Background, after_each_switch, make, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.transform.options import TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]

NUM_LAYERS = 6
PAGE = SETTINGS["page_size"]
CHUNK = SETTINGS["max_num_batched_tokens"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Provide 4 x TP1 of a model with six layers."""
    config = tiny_config("llama2") | {"num_hidden_layers": NUM_LAYERS}
    directory = write_model(config, tmp_path_factory.mktemp("models") / "six")
    with make(directory, compile_cache, **SHARED | {"device_memory": "16MiB"}) as llm:
        yield llm


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, length).tolist()


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


KINDS: dict[str, tuple[list[int], SamplingParams]] = {
    "one chunk": (prompt(9, 1), greedy(12)),
    "three chunks": (prompt(2 * CHUNK + 5, 2), greedy(12)),
    "two samples": (prompt(7, 3), SamplingParams(temperature=0.9, seed=7, n=2, max_tokens=12, ignore_eos=True)),
    "penalties": (prompt(6, 4), greedy(12, repetition_penalty=1.4)),
    "log-probabilities of the prompt": (prompt(11, 5), greedy(12, prompt_logprobs=2, logprobs=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
def test_new_requests_start_while_layers_change(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool, at: int):
    """Requests of every kind start early, halfway or late in a change. Their tokens equal an undisturbed run."""
    asked = list(KINDS.values())
    expected = [idle.generate(p, params)[0] for p, params in asked]
    forget_prefixes(idle)
    if not up:
        idle.transform(4)
    load = Background(idle, [prompt(5, 10 + i) for i in range(5)], greedy(90))
    wait_until_decoding(idle, 5)
    late: list[Background] = []

    def on_switch(transition: Any) -> None:
        if transition.num_switched == at:
            late.extend(Background(idle, [p], params) for p, params in asked)

    with monkeypatch.context() as patch:
        after_each_switch(patch, on_switch)
        idle.transform(4 if up else 1)
    outputs = [background.result()[0] for background in late]
    assert tokens(outputs) == tokens(expected)
    (want,), (have,) = ([o for o in found if o.prompt_logprobs] for found in (expected, outputs))
    for wanted, had in zip(want.prompt_logprobs[1:], have.prompt_logprobs[1:], strict=True):
        assert wanted.keys() == had.keys()
        np.testing.assert_allclose(
            [entry.logprob for entry in wanted.values()], [entry.logprob for entry in had.values()], atol=1e-4
        )
    load.result()
    check_idle(idle)


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_prompt_does_not_wait_for_the_last_layer(idle: LLM, up: bool):
    """The prompt arrives after the change has begun. It has its first token before the last layer has switched."""
    if not up:
        idle.transform(4)
    busy = idle._registry.make(prompt(5, 20), greedy(60), lambda _: None, None, None)
    new = idle._registry.make(prompt(9, 21), greedy(4), lambda _: None, None, None)
    (sequence,) = new.sequences

    def switched(engine: Engine) -> int:
        present = [i.transition for i in engine.instances if i.transition is not None]
        return present[0].num_switched if present else NUM_LAYERS

    def drive() -> int:
        engine = idle._engine
        engine.submit(busy.sequences)
        while not busy.sequences[0].output:
            engine.advance()
            engine.drain()
        engine.transform(TransformOptions(4 if up else 1, (0, 1, 2, 3), layers_per_step=1))
        engine.submit([sequence])
        while not sequence.output:
            engine.advance()
            engine.drain()
        at = switched(engine)
        engine.end_transformations()
        return at

    assert idle._dispatcher.call(drive).result(TIMEOUT_S) < NUM_LAYERS
    idle._registry.end([busy, new])


def test_prompts_that_are_half_computed_go_on(idle: LLM):
    """Some chunks are computed before the merge, and some while layers change."""
    params = greedy(6)
    prompts = [prompt(5 * CHUNK + 3, 30 + i) for i in range(4)]
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    requests = [idle._registry.make(p, params, lambda _: None, None, None) for p in prompts]
    sequences = [request.sequences[0] for request in requests]

    def drive() -> list[int]:
        engine = idle._engine
        engine.submit(sequences)
        engine.advance()
        engine.drain()
        before = [sequence.num_computed for sequence in sequences]
        for degree in (4, 1):
            engine.transform(TransformOptions(degree, (0, 1, 2, 3), layers_per_step=1))
            engine.end_transformations()
        while not all(sequence.finished for sequence in sequences):
            engine.advance()
            engine.drain()
        return before

    before = idle._dispatcher.call(drive).result(TIMEOUT_S)
    assert all(0 < count < 5 * CHUNK for count in before)
    assert [[tuple(sequence.output)] for sequence in sequences] == expected
    idle._registry.end(requests)


@pytest.mark.slow
@pytest.mark.parametrize("running", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_cached_prefixes_survive_merges_and_splits(idle: LLM, running: int):
    """At least 90% of the cached tokens are found again, with the right keys and values."""
    shared = [prompt(6 * PAGE, 40 + i) for i in range(5)]
    asked = [[*prefix, 9, 8, 7] for prefix in shared]
    expected = tokens(idle.generate(asked, greedy(6)))
    load = Background(idle, [prompt(5, 50 + i) for i in range(running)], greedy(100)) if running else None
    if running:
        wait_until_decoding(idle, running)
    for degree in (4, 2, 1):
        idle.transform(degree)
        before = idle.stats.cached_tokens
        outputs = [idle.generate(p, greedy(6))[0] for p in asked]
        assert tokens(outputs) == expected
        assert idle.stats.cached_tokens - before >= 0.9 * len(asked) * 6 * PAGE, f"at TP{degree}"
    if load is not None:
        load.result()
    check_idle(idle)


@pytest.mark.slow
def test_prefixes_without_room_are_dropped_from_their_ends(idle: LLM):
    """A TP4 instance has cached more than a TP1 instance holds. The beginnings of the prefixes are kept."""
    idle.transform(4)
    pages = idle.instances[0].kv_total_pages
    prompts = [prompt(100, 60 + i) for i in range(pages // 25 + 2)]
    expected = tokens(idle.generate(prompts, greedy(2)))
    assert idle.instances[0].num_cached_pages > idle._engine.cluster.memory_plan.num_pages
    idle.transform(1)
    cached = sum(view.num_cached_pages for view in idle.instances)
    assert cached > 2 * idle._engine.cluster.memory_plan.num_pages, "on four devices"
    assert tokens(idle.generate(prompts[::5], greedy(2))) == expected[::5]
    check_idle(idle)
