"""Steps that are launched a few segments at a time: requests that pause keep one that was begun, and it goes on."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from begun_steps import HOUR_S, Launched, begin, end, long_steps, num_preemptions
from device_memory import live_bytes, settled_live_bytes
from harness import engine_of, in_dispatcher
from pausing_cases import KINDS, URGENT, done, expected_of, greedy, options, outputs, prompt, steps, submit, transform
from serving_checks import TIMEOUT_S
from transform_cases import SHARED, Background, make, requests, tokens

from amoeba_jax import LLM
from amoeba_jax.engine import launching
from amoeba_jax.engine.logits import sequence_logits
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.step_plan import StepPlan
from amoeba_jax.transform.options import TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

ALL = (0, 1, 2, 3)
MEASURED = Pace.expected


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, prepare_pausing=True, **SHARED) as llm:
        yield llm


@pytest.mark.parametrize("num_parts", [1, 2], ids=["one of two layers", "both layers, and not the head"])
def test_a_step_that_was_begun_goes_on_after_the_pause(idle: LLM, monkeypatch: pytest.MonkeyPatch, num_parts: int):
    """Every program of it is launched once, and none of it while others are served."""
    expected, urgent_expected = expected_of(idle, KINDS), expected_of(idle, [URGENT])

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        paused = begin(idle, num_parts=num_parts)
        members = engine.instances
        computed = [(s, s.num_computed, s.num_in_flight) for m in members for s in m.running]
        launched = Launched(monkeypatch)
        transform(idle, options(4, "pause"))
        urgent = submit(idle, [URGENT])
        steps(idle, lambda: done(urgent))
        assert outputs(urgent) == urgent_expected
        assert all(member.begun is not None for member in members)
        assert [(s, s.num_computed, s.num_in_flight) for m in members for s in m.running] == computed
        launched.layers.clear()
        transform(idle, options(1))
        assert engine.instances == members
        engine.drain()
        layers = list(range(idle.dims.config.num_layers))
        assert all(launched.of(member.id) == layers[num_parts:] for member in members)
        assert all(member.begun is None for member in members)
        steps(idle, lambda: done(paused))
        assert outputs(paused) == expected
        assert num_preemptions(paused) == 0
        end(idle, paused, urgent)

    in_dispatcher(idle, drive)


@pytest.mark.parametrize("held", [False, True], ids=["serving", "paused"])
def test_a_sequence_leaves_a_step_that_was_begun(idle: LLM, held: bool):
    """Another that gets its slot and pages, with a state of its own on the device, is not touched by the rest of it."""
    new = [(prompt(8, 20 + i), greedy(20, repetition_penalty=1.3)) for i in range(4)]
    expected, new_expected = expected_of(idle, KINDS), expected_of(idle, new)

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        left = begin(idle)
        if held:
            transform(idle, options(4, "pause"))
        engine.finish([s for r in left[1:4] for s in r.sequences], "abort")
        if held:
            transform(idle, options(1))
        assert any(i.begun is not None for i in engine.instances)
        later = submit(idle, new)
        engine.admission.admit()
        steps(idle, lambda: done([*left, *later]))
        assert [outputs(left)[i] for i in (0, 4, 5)] == [expected[i] for i in (0, 4, 5)]
        assert outputs(later) == new_expected
        end(idle, left, later)

    in_dispatcher(idle, drive)


def test_a_sequence_that_is_preempted_in_a_step_that_was_begun_is_computed_again(idle: LLM):
    """What that step would have computed of it does not count: it may run elsewhere by then."""
    expected = expected_of(idle, KINDS)

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        sequence = submitted[0].sequences[0]
        known = sequence.num_known
        engine.admission.preempt(sequence)
        engine.drain()
        assert (sequence.num_computed, sequence.num_known, sequence.num_in_flight) == (0, known, 0)
        steps(idle, lambda: done(submitted))
        assert outputs(submitted) == expected
        end(idle, submitted)

    in_dispatcher(idle, drive)


@pytest.mark.parametrize("how", ["the next part", "all that is left", "when a request starts"])
def test_a_part_that_fails_has_the_step_computed_again(idle: LLM, monkeypatch: pytest.MonkeyPatch, how: str):
    new = [(prompt(8, 30 + i), greedy(8)) for i in range(4)]
    expected = expected_of(idle, [*KINDS, *new])

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        instance = engine.instances[0]

        def fail(*_: Any) -> None:
            raise RuntimeError("the device failed")

        with monkeypatch.context() as patch:
            patch.setattr(instance.runner, "run" if how != "the next part" else "run_segments", fail)
            if how == "the next part":
                engine.launching.launch(instance)
            elif how == "all that is left":
                engine.drain()
            else:
                submitted += submit(idle, new)
                engine.admission.admit()
        assert instance not in engine.instances
        if how != "when a request starts":
            submitted += submit(idle, new)
        steps(idle, lambda: done(submitted))
        assert outputs(submitted) == expected
        assert num_preemptions(submitted) > 0
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_logits_are_computed_behind_steps_that_were_begun(idle: LLM):
    """They use the same buffer of hidden states."""
    expected, asked = expected_of(idle, KINDS), tuple(prompt(20, 60))
    logits = idle.logits(list(asked))

    @long_steps()
    def drive() -> None:
        submitted = begin(idle)
        np.testing.assert_array_equal(sequence_logits(engine_of(idle), asked, len(asked)), logits)
        steps(idle, lambda: done(submitted))
        assert outputs(submitted) == expected
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_requests_of_the_group_join_those_that_paused_in_a_step(idle: LLM):
    """The step is begun again, with all of them: some have slots of paused ones that have ended."""
    penalized = [(prompt(20, 40 + i), greedy(30, repetition_penalty=1.3)) for i in range(8)]
    asked = [*KINDS, *penalized]
    expected = expected_of(idle, asked)

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle, asked[:-4])
        members = engine.instances
        transform(idle, options(4, "pause"))
        submitted += submit(idle, asked[-4:])
        steps(idle, lambda: all(r.sequences[0].output for r in submitted[-4:]))
        engine.finish([s for r in submitted[-8:-4] for s in r.sequences], "abort")
        future = engine.transform(TransformOptions(1, ALL, layers_per_step=1))
        engine.end_transformations()
        assert future.result().groups[0].recomputed == 0
        assert engine.instances == members
        steps(idle, lambda: done(submitted))
        others = [*range(len(KINDS)), *range(len(asked) - 4, len(asked))]
        assert [outputs(submitted)[i] for i in others] == [expected[i] for i in others]
        assert num_preemptions(submitted) == 0
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_every_live_byte_has_an_owner_while_steps_are_held(directory: Path, compile_cache: str):
    """Hidden states as well, of which each device has two buffers."""
    before = live_bytes()

    def check(llm: LLM) -> None:
        now = settled_live_bytes()
        report = llm.memory()
        for device in ALL:
            assert now[device] - before.get(device, 0) == report.device_bytes(device)

    @long_steps()
    def serve_urgent() -> None:
        paused = begin(llm, [KINDS[0]] * 4)
        transform(llm, options(4, "pause"))
        urgent = submit(llm, [URGENT])
        steps(llm, lambda: done(urgent))
        transform(llm, options(1))
        steps(llm, lambda: done(paused))
        end(llm, paused, urgent)

    @long_steps()
    def drop_paused() -> None:
        paused = begin(llm, [KINDS[0]] * 4)
        transform(llm, options(4, "pause"))
        engine_of(llm).finish([s for r in paused for s in r.sequences], "abort")
        transform(llm, options(2))
        end(llm, paused)

    with make(directory, compile_cache, prepare_pausing=True, **SHARED) as llm:
        check(llm)
        for what in (serve_urgent, serve_urgent, drop_paused):
            in_dispatcher(llm, what)
            check(llm)


def test_steps_are_launched_at_once_where_none_pauses_for_another(directory: Path, compile_cache: str):
    """By default, and by instances of the highest degree."""
    with make(directory, compile_cache, **SHARED) as llm:

        @long_steps()
        def launched_at_once() -> bool:
            submitted = submit(llm, [KINDS[0]])
            engine_of(llm).advance()
            found = not any(i.begun for i in engine_of(llm).instances) and any(
                i.pending for i in engine_of(llm).instances
            )
            steps(llm, lambda: done(submitted))
            end(llm, submitted)
            return found

        assert in_dispatcher(llm, launched_at_once)


def test_instances_of_the_highest_degree_launch_steps_at_once(idle: LLM):
    idle.transform(4)

    @long_steps()
    def drive() -> None:
        submitted = submit(idle, [KINDS[0]])
        engine_of(idle).advance()
        (instance,) = engine_of(idle).instances
        assert instance.begun is None
        assert instance.pending
        steps(idle, lambda: done(submitted))
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_tokens_while_requests_pause_and_go_on_by_themselves(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """The dispatcher launches each part when the ones before are about to have run, by measured times."""
    parts, launch_part = [], Instance.launch_part

    def noted(instance: Instance, **options: Any) -> StepPlan | None:
        parts.append(instance.begun.num_launched if instance.begun else 0)
        return launch_part(instance, **options)

    asked = requests(12, max_tokens=80)
    expected = tokens(idle.generate(*asked))
    expected_urgent = expected_of(idle, [URGENT])
    monkeypatch.setattr(Pace, "expected", MEASURED)
    for name in ("SHORT_STEP_S", "LAUNCH_LEAD_S", "PART_LEAD_S", "PART_S"):
        monkeypatch.setattr(launching, name, 1e-9)
    monkeypatch.setattr(Instance, "launch_part", noted)
    before = idle.stats.preemptions
    background = Background(idle, list(asked[0]), asked[1])
    for _ in range(4):
        time.sleep(0.05)
        idle.transform(4, release_weights=False, running="pause")
        assert tokens(idle.generate([URGENT[0]], URGENT[1])) == expected_urgent
        idle.transform(1)
    assert tokens(background.result()) == expected
    assert 1 in parts, "steps were launched in parts"
    assert idle.stats.preemptions == before


def test_parts_are_due_from_when_devices_wait_for_one(idle: LLM):
    """Once the first part has run, devices have nothing to do: the parts behind the next are counted from now."""

    @long_steps(done_early=True)
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        for instance in engine.instances:
            while not instance.runner.hidden.is_ready:
                time.sleep(0.001)
            engine.launching.launch(instance)
            assert instance.begun is not None, "what was not launched can still be kept back"
            assert instance.begun.num_launched == 2
            assert engine.launching.due_s(instance) == pytest.approx(HOUR_S / 3, abs=60)
        engine.finish([s for r in submitted for s in r.sequences], "abort")
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_parts_are_due_from_when_the_result_before_them_came(idle: LLM):
    """The step before took less than the hour that was expected of it."""

    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        for instance in engine.instances:
            engine.launching.finish_begun(instance)
            engine.launching.launch(instance)
            assert instance.begun is not None
            assert engine.launching.due_s(instance) == pytest.approx(HOUR_S + HOUR_S / 3, abs=60)
            instance.pending[0].result.result()
            engine.collect()
            assert engine.launching.due_s(instance) == pytest.approx(HOUR_S / 3, abs=60)
        engine.finish([s for r in submitted for s in r.sequences], "abort")
        end(idle, submitted)

    in_dispatcher(idle, drive)


def test_a_step_whose_sequences_have_all_gone_is_not_launched(idle: LLM):
    @long_steps()
    def drive() -> None:
        engine = engine_of(idle)
        submitted = begin(idle)
        launched = engine.stats.steps
        engine.finish([s for r in submitted for s in r.sequences], "abort")
        engine.drain()
        assert not any(instance.has_steps for instance in engine.instances)
        assert engine.stats.steps == launched
        end(idle, submitted)

    in_dispatcher(idle, drive)
