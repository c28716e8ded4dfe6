"""Changes that wait for steps of which some parts are launched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from begun_steps import begin, end, long_steps, num_preemptions
from harness import engine_of, in_dispatcher
from pausing_cases import KINDS, done, expected_of, options, outputs, steps
from serving_checks import TIMEOUT_S
from transform_cases import SHARED, make

from amoeba_jax import LLM
from amoeba_jax.request import Request

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, prepare_pausing=True, **SHARED) as llm:
        yield llm


@pytest.mark.parametrize("degree", [2, 4])
def test_a_change_waits_for_steps_that_were_begun(idle: LLM, degree: int):
    """No layer moves before, and no other step begins."""
    expected = expected_of(idle, KINDS)

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        members = engine.instances
        future = engine.transform(options(degree, release=True))
        engine.advance()
        engine.collect()
        assert engine.instances == members
        assert all(member.begun is not None for member in members)
        steps(idle, lambda: engine.instances != members)
        engine.end_transformations()
        assert future.result().groups[0].recomputed == 0
        steps(idle, lambda: done(submitted))
        assert outputs(submitted) == expected
        assert num_preemptions(submitted) == 0
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_a_merge_that_waits_for_a_step_whose_requests_are_cancelled(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """Nothing is left of the step that was begun, so no result of it will come: the engine is told so."""

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        for instance in engine.instances:
            while instance.pending:
                engine.results.take(instance, instance.pending.popleft())
        future = engine.transform(options(4, release=True))
        assert all(instance.begun is not None for instance in engine.instances), "it waits for these"
        engine.finish([s for r in submitted for s in r.sequences], "abort")
        woken: list[None] = []
        monkeypatch.setattr(engine, "on_result", lambda: woken.append(None))
        for count, instance in enumerate(engine.instances, 1):
            engine.launching.launch(instance)
            assert not instance.has_steps
            assert len(woken) == count
        engine.collect()
        engine.end_transformations()
        assert [group.to_degree for group in future.result().groups] == [4]
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_a_change_ends_though_the_steps_that_it_waits_for_fail(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """At their launch, with no sequence left: no result comes that could tell."""

    def fail(*_: Any) -> None:
        raise RuntimeError("the device failed")

    @long_steps()
    def drive() -> tuple[list[Request], Any]:
        engine = engine_of(idle)
        submitted = begin(idle)
        future = engine.transform(options(4, release=True))
        for instance in engine.instances:
            monkeypatch.setattr(instance.runner, "run", fail)
            engine.launching.finish_begun(instance)
        engine.finish([s for r in submitted for s in r.sequences], "abort")
        return submitted, future

    submitted, future = in_dispatcher(idle, drive)
    assert future.result(TIMEOUT_S).tensor_parallel_size == 4
    end(idle, submitted)
