"""Transformations that are refused before they begin, and prompts that arrive after the beginning."""

from typing import Any

import numpy as np
import pytest
from harness import engine_of, in_dispatcher, registry_of
from serving_checks import TIMEOUT_S, forget_prefixes
from transform_cases import decoding, requests, tokens

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.transform import merge_split
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.report import TransformVariant

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.fixture(scope="module")
def device_memory() -> str:
    return "16MiB"


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_refused_before_it_began_leaves_nothing(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """Its reservations are freed, and prefix caching stays enabled."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=40), tp=1 if up else 4)
    ledgers = idle._engine.cluster.ledgers
    before = [dict(ledger.reserved) for ledger in ledgers]

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(merge_split, "place_up" if up else "place_down", fails)
        with pytest.raises(RuntimeError, match="injected") as raised:
            idle.transform(4 if up else 1)
    assert raised.value.__cause__ is not raised.value
    assert [dict(ledger.reserved) for ledger in ledgers] == before
    assert all(instance.lane.cache.enabled for instance in idle._engine.instances)
    assert tokens(running.result()) == expected


@pytest.mark.parametrize("variant", list(TransformVariant))
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_prompts_that_come_after_the_transition_has_begun(idle: LLM, variant: TransformVariant, busy: bool):
    """Each variant also moves the pages of these prompts. If the engine was idle, no other pages exist."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 200, length).tolist() for length in (4, 90, 80, 70, 60)]
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    made = [registry_of(idle).make(p, params, lambda _: None, None, None) for p in prompts]
    first, late = ([request.sequences[0] for request in part] for part in (made[:busy], made[busy:]))

    def drive() -> None:
        engine = engine_of(idle)
        engine.submit(first)
        while not all(sequence.output for sequence in first):
            engine.advance()
            engine.drain()
        done = engine.transform(TransformOptions(4, (0, 1, 2, 3), variant, layers_per_step=1))
        engine.submit(late)
        engine.end_transformations()
        done.result()
        while engine.has_requests:
            engine.advance()
            engine.drain()

    in_dispatcher(idle, drive)
    assert [[tuple(sequence.output)] for sequence in (*first, *late)] == expected
    registry_of(idle).end(made)
