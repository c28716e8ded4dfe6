"""Changes wait for the steps in flight of their own instances, while other instances go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import engine_of, in_dispatcher
from pausing_cases import done, expected_of, greedy, outputs, prompt, steps, submit
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_model
from transform_cases import SHARED, make

from amoeba_jax import LLM
from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.steps import MAX_PENDING_STEPS
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.instance import Instance
from amoeba_jax.request import Request
from amoeba_jax.transform.options import TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

ASKED = [(prompt(5 + i, 30 + i), greedy(24)) for i in range(4)]
HALF, ALL = (0, 1), (0, 1, 2, 3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory: Path = tiny_model("llama2", tmp_path_factory.mktemp("models"))
    with make(directory, compile_cache, **SHARED) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """Provide the engine as 4 x TP1 without requests. Check afterwards that no page is lost."""
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)


def decoding(llm: LLM) -> list[Request]:
    """Start the requests of `ASKED`. Return them when every sequence has a token."""
    requests = submit(llm, ASKED)
    steps(llm, lambda: all(s.output for r in requests for s in r.sequences))
    return requests


def drain(engine: Engine, instance: Instance) -> None:
    """Take the results of all steps in flight of an instance."""
    while instance.pending:
        engine.steps.take(instance, instance.pending.popleft())


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_other_instances_go_on_while_steps_in_flight_are_waited_for(idle: LLM, up: bool):
    """The call returns at once. The change begins with the last result of its instances."""
    expected = expected_of(idle, ASKED)

    def drive() -> None:
        engine = engine_of(idle)
        if not up:
            engine.transform(TransformOptions(2, HALF))
            engine.end_transformations()
        requests = decoding(idle)
        for _ in range(MAX_PENDING_STEPS):
            engine.advance()
        changing = [i for i in engine.instances if i.id in HALF]
        others = [i for i in engine.instances if i.id not in HALF]
        assert all(len(instance.pending) == MAX_PENDING_STEPS for instance in engine.instances)
        future = engine.transform(TransformOptions(2 if up else 1, HALF))
        assert [i for i in engine.instances if i.id in HALF] == changing, "it has not begun"
        with pytest.raises(RequestError, match="is being transformed"):
            engine.admission.preempt(changing[0].running[0])
        late = submit(idle, [(prompt(9, 50), greedy(4))])
        for instance in others:  # take their results first
            drain(engine, instance)
        for _ in range(MAX_PENDING_STEPS):
            engine.advance()
        assert all(len(instance.pending) == MAX_PENDING_STEPS for instance in others), "they go on"
        assert not any(s in i.running for s in late[0].sequences for i in changing), "no request starts beside them"
        drain(engine, changing[0])
        engine.changes.collect()
        if up:
            assert [i for i in engine.instances if i.id in HALF] == changing, "the other has not run yet"
            engine.advance()
            assert not changing[0].pending, "it launches nothing"
            drain(engine, changing[1])
            engine.changes.collect()
        assert all(i.transition is not None for i in engine.instances if i.id in HALF), "it has begun"
        steps(idle, lambda: done(requests) and done(late) and not engine.changes.busy)
        assert future.result().groups[0].devices == HALF
        assert outputs(requests) == expected

    in_dispatcher(idle, drive)


def test_instances_with_nothing_in_flight_launch_nothing_while_their_group_waits(idle: LLM):
    """If members launched steps in turn, the group would wait as long as requests run."""
    expected = expected_of(idle, ASKED)

    def drive() -> None:
        engine, requests = engine_of(idle), decoding(idle)
        engine.drain()
        first, second = (i for i in engine.instances if i.id in HALF)
        assert engine.steps.launch(first)
        assert second.running
        assert not second.pending
        engine.transform(TransformOptions(2, HALF))
        engine.advance()
        assert not second.pending, "it launches nothing"
        drain(engine, first)
        engine.changes.collect()
        assert any(i.transition is not None for i in engine.instances), "it has begun"
        steps(idle, lambda: done(requests) and not engine.changes.busy)
        assert outputs(requests) == expected

    in_dispatcher(idle, drive)


def test_instances_that_are_paused_between_the_launches_of_others_launch_nothing(
    idle: LLM, monkeypatch: pytest.MonkeyPatch
):
    """A scheduler may pause requests between any two launches."""
    expected = expected_of(idle, ASKED)

    def drive() -> None:
        engine, requests = engine_of(idle), decoding(idle)
        engine.drain()
        failed, admit, calls = engine.stats.failed_steps, engine.admission.admit, []

        def admit_and_pause() -> None:
            admit()
            calls.append(None)
            if len(calls) == 2:
                engine.transform(TransformOptions(4, ALL, release_weights=False, running="pause"))

        with monkeypatch.context() as patched:
            patched.setattr(engine.admission, "admit", admit_and_pause)
            engine.advance()
            assert all(instance.pending for instance in engine.instances)
            assert not engine.advance(), "none is launched on the group, nor on those that paused"
        assert [i.tp for i in engine.instances] == [4]
        engine.transform(TransformOptions(1, ALL))
        steps(idle, lambda: done(requests) and not engine.changes.busy)
        assert engine.stats.failed_steps == failed
        assert not any(s.num_preemptions for r in requests for s in r.sequences)
        assert outputs(requests) == expected

    in_dispatcher(idle, drive)


def test_requests_end_while_steps_in_flight_are_waited_for(idle: LLM):
    """One request ends with these steps, and one is aborted. Both instances are idle, so all layers switch at once."""

    def drive() -> None:
        engine = engine_of(idle)
        requests = submit(idle, [(prompt(6, 60), greedy(4)), (prompt(7, 61), greedy(40))])
        steps(idle, lambda: len(requests[0].sequences[0].output) == 2)
        for _ in range(MAX_PENDING_STEPS):
            engine.advance()
        future = engine.transform(TransformOptions(2, HALF))
        engine.sequences.finish(requests[1].sequences, "abort")
        engine.drain()
        engine.end_transformations()
        assert done(requests)
        assert future.result().groups[0].steps == 0
        assert [i.tp for i in engine.instances] == [2, 1, 1]
        again = submit(idle, [(prompt(6, 62), greedy(4))])
        steps(idle, lambda: done(again))

    in_dispatcher(idle, drive)


def test_change_that_is_refused_once_steps_have_run_leaves_all_as_it_was(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    expected = expected_of(idle, ASKED)

    def drive() -> None:
        engine, requests = engine_of(idle), decoding(idle)
        engine.advance()
        before = engine.instances
        future = engine.transform(TransformOptions(2, HALF))
        with monkeypatch.context() as patched:
            patched.setattr("amoeba_jax.transform.merge_split.place_up", _no_room)
            engine.drain()
        with pytest.raises(RequestError, match=r"the transformation to TP\d is refused: no room"):
            future.result(0)
        assert engine.instances == before
        steps(idle, lambda: done(requests))
        assert outputs(requests) == expected
        again = submit(idle, ASKED)  # all instances take requests
        engine.advance()
        assert all(instance.running for instance in engine.instances)
        steps(idle, lambda: done(again))

    in_dispatcher(idle, drive)


def _no_room(*_: object) -> None:
    raise RequestError("no room")
