"""Requests that pause while an instance over all devices serves others, and resume from their old state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import engine_of, in_dispatcher, registry_of
from pausing_cases import (
    KINDS,
    URGENT,
    done,
    expected_of,
    greedy,
    options,
    outputs,
    prompt,
    state_of,
    steps,
    submit,
    transform,
)
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_model
from transform_cases import SHARED, make

from amoeba_jax import LLM
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.instance import Phase
from amoeba_jax.instances.sequence import SequenceState
from amoeba_jax.instances.step_sampler import StepSampler
from amoeba_jax.request import Request
from amoeba_jax.transform.options import TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

ALL = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, **SHARED) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """Provide the engine as 4 x TP1 without requests. Check afterwards that no page is lost."""
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    "pause_after", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 20))], ids=lambda count: f"{count} tokens"
)
def test_paused_requests_go_on_where_they_were(idle: LLM, pause_after: int):
    """Requests of every kind pause while another request runs on all devices. Some pause in the middle of a prompt."""
    expected, urgent_expected = expected_of(idle, KINDS), expected_of(idle, [URGENT])

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, KINDS)
        steps(idle, lambda: any(len(s.output) >= pause_after for r in requests for s in r.sequences))
        engine.advance()  # leave steps in flight
        members = engine.instances
        report = transform(idle, options(4, "pause"))
        engine.drain()
        (group,) = engine.instances
        assert group.paused == members
        assert report.moved_bytes == 0
        assert report.groups[0].paused == sum(len(member.running) for member in members)
        before = [state_of(member) for member in members]
        sequences = [sequence for member in members for sequence in member.running]
        assert {member.phase for member in members} == {Phase.PAUSED}
        assert group.phase == Phase.SERVING
        assert {sequence.state for sequence in sequences} == {SequenceState.PAUSED}
        urgent = submit(idle, [URGENT])
        steps(idle, lambda: done(urgent))
        assert outputs(urgent) == urgent_expected
        assert [state_of(member) for member in members] == before
        report = transform(idle, options(1))
        assert engine.instances == members
        assert {member.phase for member in members} == {Phase.SERVING}
        assert {sequence.state for sequence in sequences} == {SequenceState.RUNNING}
        assert report.moved_bytes == 0
        assert report.groups[0].resumed == sum(map(len, before))
        steps(idle, lambda: done(requests))
        assert outputs(requests) == expected
        assert not any(s.num_preemptions for r in requests for s in r.sequences)
        registry_of(idle).end([*requests, *urgent])

    in_dispatcher(idle, drive)


def test_requests_of_the_group_go_on_beside_those_that_paused(idle: LLM):
    """The group splits while it has requests. Their pages move, and pages of paused requests stay in place."""
    asked = [*KINDS, URGENT, (prompt(30, 8), greedy(40))]
    expected = expected_of(idle, asked)

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, asked[:-2])
        steps(idle, lambda: all(r.sequences[0].num_computed for r in requests))
        members = engine.instances
        transform(idle, options(4, "pause"))
        assert engine.num_paused >= len(requests)
        later = submit(idle, asked[-2:])
        steps(idle, lambda: all(r.sequences[0].output for r in later))
        future = engine.transform(TransformOptions(1, ALL, layers_per_step=1))
        engine.advance()
        engine.sequences.finish(requests[0].sequences, "abort")  # while layers change
        engine.end_transformations()
        assert future.result().groups[0].recomputed == 0
        assert engine.instances == members
        steps(idle, lambda: done([*requests, *later]))
        assert outputs([*requests, *later])[1:] == expected[1:]
        assert not any(s.num_preemptions for r in [*requests, *later] for s in r.sequences)
        registry_of(idle).end([*requests, *later])

    in_dispatcher(idle, drive)


def test_what_ends_a_paused_request_frees_its_pages_at_once(idle: LLM):
    """Three requests are aborted, and the others go on."""
    expected = expected_of(idle, KINDS)

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, KINDS)
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        transform(idle, options(4, "pause"))
        engine.drain()
        group = engine.instances[0]
        free = group.page_counts().available
        paused = len(group.paused_sequences)
        for request in requests[:3]:
            engine.sequences.finish(request.sequences, "abort")
        assert len(group.paused_sequences) < paused
        assert group.page_counts().available > free
        transform(idle, options(1))
        steps(idle, lambda: done(requests))
        assert outputs(requests)[3:] == expected[3:]
        registry_of(idle).end(requests)

    in_dispatcher(idle, drive)


def test_what_would_lose_paused_requests_is_refused(idle: LLM):
    with pytest.raises(RequestError, match="needs release_weights=False"):
        idle.transform(4, running="pause")
    with pytest.raises(RequestError, match=r"running=.sleep. is not known"):
        idle.transform(4, running="sleep")  # pyright: ignore[reportArgumentType]

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, KINDS)
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        transform(idle, options(4, "pause"))
        with pytest.raises(RequestError, match=r"requests are paused on devices \[0, 1, 2, 3\]: transform them to TP1"):
            engine.transform(options(2))
        engine.sequences.finish([s for r in requests for s in r.sequences], "abort")
        transform(idle, options(2))
        assert [i.tp for i in engine.instances] == [2, 2]
        registry_of(idle).end(requests)

    in_dispatcher(idle, drive)


def test_instances_of_two_degrees_do_not_pause_together(idle: LLM):
    """The TP1 instances would pause in an instance that pauses too."""
    idle.transform(2, devices=[0, 1])
    with pytest.raises(RequestError, match=r"devices \[0, 1, 2, 3\] have instances of degrees \[1, 2\]"):
        idle.transform(4, release_weights=False, running="pause")
    assert [view.tensor_parallel_size for view in idle.instances] == [2, 1, 1]


def test_requests_that_are_waited_for_end_first(idle: LLM):
    """A request that arrives meanwhile does not start on these devices. It runs on the merged instance."""
    asked = [*KINDS[:3], URGENT]
    expected = expected_of(idle, asked)

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, asked[:-1])
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        future = engine.transform(options(4, "wait", release=True))
        later = submit(idle, asked[-1:])
        steps(idle, lambda: any(s.finished for r in requests for s in r.sequences))
        assert all(instance.tp == 1 for instance in engine.instances)
        assert len(engine.waiting) == 1
        steps(idle, lambda: done(later))
        assert future.result().tensor_parallel_size == 4
        assert outputs([*requests, *later]) == expected
        registry_of(idle).end([*requests, *later])

    in_dispatcher(idle, drive)


def test_paused_requests_survive_a_step_that_fails(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """The failed step loses the KV cache, so all requests are computed again."""
    expected = expected_of(idle, [*KINDS, URGENT])

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, KINDS)
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        transform(idle, options(4, "pause"))
        later = submit(idle, [URGENT])
        steps(idle, lambda: bool(later[0].sequences[0].output))
        (group,) = engine.instances
        run = group.runner.run

        def fail(inputs: Any) -> Any:
            run(inputs)
            raise RuntimeError("the device failed")

        monkeypatch.setattr(group.runner, "run", fail)
        engine.advance()
        assert not engine.num_paused
        steps(idle, lambda: done([*requests, *later]))
        assert outputs([*requests, *later]) == expected
        assert all(r.sequences[0].num_preemptions for r in requests)
        registry_of(idle).end([*requests, *later])

    in_dispatcher(idle, drive)


def test_instances_whose_paused_requests_have_ended_keep_their_prefixes(idle: LLM):
    """The instances are the same objects afterwards, and no page moves."""
    asked = [(prompt(40, 90 + i), greedy(20)) for i in range(4)]

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, asked)
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        members = engine.instances
        transform(idle, options(4, "pause"))
        engine.sequences.finish([r.sequences[0] for r in requests], "abort")
        report = transform(idle, options(1))
        assert engine.instances == members
        assert report.moved_bytes == 0
        registry_of(idle).end(requests)

    in_dispatcher(idle, drive)
    before = idle.stats.cached_tokens
    idle.generate([[*tokens, 5] for tokens, _ in asked], greedy(1))
    assert idle.stats.cached_tokens - before >= 0.9 * 4 * 40


def test_views_and_sets_of_layouts_show_what_is_paused(idle: LLM):
    def begin() -> list[Request]:
        requests = submit(idle, KINDS)
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        transform(idle, options(4, "pause"))
        return requests

    requests = in_dispatcher(idle, begin)
    (view,) = idle.instances
    assert view.paused >= len(KINDS)
    assert view.running == 0
    assert view.kv_used_pages > 0
    with pytest.raises(RequestError, match=f"0 running, {view.paused} paused"):
        idle.set_layout(1)
    in_dispatcher(idle, lambda: engine_of(idle).sequences.finish([s for r in requests for s in r.sequences], "abort"))
    assert idle.instances[0].paused == 0
    idle.set_layout(1)
    registry_of(idle).end(requests)


def test_closing_ends_paused_requests(directory: Path, compile_cache: str):
    with make(directory, compile_cache, **SHARED) as llm:

        def begin() -> list[Request]:
            requests = submit(llm, KINDS[:2])
            steps(llm, lambda: all(r.sequences[0].output for r in requests))
            transform(llm, options(4, "pause"))
            return requests

        requests = in_dispatcher(llm, begin)
    assert all(s.error is not None for r in requests for s in r.sequences)


def test_a_split_that_fails_in_the_end_loses_no_request(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """The group's requests are moving to the instances with paused requests. All requests are computed again."""
    asked = [*KINDS, URGENT, (prompt(30, 8), greedy(40, repetition_penalty=1.2))]
    expected = expected_of(idle, asked)

    def fail(self: StepSampler, sequence: Any, slot: int) -> None:
        raise RuntimeError("injected")

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, asked[:-2])
        steps(idle, lambda: all(r.sequences[0].output for r in requests))
        transform(idle, options(4, "pause"))
        later = submit(idle, asked[-2:])
        steps(idle, lambda: all(r.sequences[0].output for r in later))
        with monkeypatch.context() as patch:
            future = engine.transform(TransformOptions(1, ALL))
            patch.setattr(StepSampler, "remember", fail)
            while engine.changes.busy:
                for instance in engine.instances:
                    engine.steps.launch(instance)  # admit no requests: each would fail too
                engine.drain()
                engine.changes.wait()
        assert "injected" in str(future.exception())
        assert not engine.num_paused
        steps(idle, lambda: done([*requests, *later]))
        assert outputs([*requests, *later]) == expected
        registry_of(idle).end([*requests, *later])

    in_dispatcher(idle, drive)
