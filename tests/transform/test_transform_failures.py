"""Transformations that fail part-way, or whose requests end meanwhile. Other requests are not affected."""

from typing import Any

import pytest
from harness import engine_of, in_dispatcher, registry_of
from pausing_cases import KINDS, done, expected_of, options, outputs, steps, submit, transform
from serving_checks import TIMEOUT_S
from transform_cases import (
    Background,
    after_each_switch,
    decoding,
    requests,
    tokens,
    transition_of,
    wait_until_decoding,
)

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import TransformError
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.transform.relayout import Relayout

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.mark.slow
@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_cancel_and_new_requests_on_the_way(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """An aborted request frees its pages in both views. A new request gets the right tokens."""
    prompts, _ = requests(6)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = tokens(idle.generate(prompts, params))
    if not up:
        idle.transform(4)
    names = [f"on-the-way-{index}" for index in range(5)]
    running = Background(idle, prompts[:5], params, request_ids=names)
    wait_until_decoding(idle, 5)
    late: list[Background] = []

    def on_switch(transition: Any) -> None:
        if transition.num_switched == 1:
            victim = next(s for s in transition.instance.running if s.request_id == names[2])
            idle._engine.sequences.finish([victim], "abort")
            late.append(Background(idle, prompts[5:], params))

    after_each_switch(monkeypatch, on_switch)
    idle.transform(4 if up else 1)
    outputs = tokens(running.result())
    assert [outputs[i] for i in (0, 1, 3, 4)] == [expected[i] for i in (0, 1, 3, 4)]
    assert running.outputs[2].outputs[0].finish_reason == "abort"
    assert tokens(late[0].result()) == expected[5:]


# Failures

UP = {True: "merge", False: "split"}


def failures_on_the_way() -> list[Any]:
    """Return cases: the place of the failure, the number of layers that have switched, and whether instances merge.

    By default, run every place after the first layer, and the failed plan of a merge that changes nothing.
    """
    every = [(where, layers, up) for where in ("plan", "extents", "exchange", "step") for layers in (0, 1) for up in UP]
    often = {("plan", 0, True), *(case for case in every if case[1])}
    return [
        pytest.param(*case, marks=() if case in often else pytest.mark.slow, id=f"{case[0]}-{case[1]}-{UP[case[2]]}")
        for case in every
    ]


@pytest.mark.first_by_default
@pytest.mark.parametrize(("where", "layers_done", "up"), failures_on_the_way())
def test_failure_on_the_way(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool, layers_done: int, where: str):
    """A plan that fails before the first layer changes nothing. After other failures the group is at the higher degree.

    An exchange fails after it has taken the extents.
    """
    running, expected = decoding(idle, 6, requests(10, max_tokens=40), tp=1 if up else 4)
    name = {"plan": "_plan_moves", "extents": "take_extents", "exchange": "hand_over", "step": "run"}[where]
    owner = Runner if where == "step" else Relayout
    method = getattr(owner, name)
    failures = [RuntimeError("injected")]

    def fails(self: Any, *arguments: Any) -> Any:
        transition = transition_of(idle, self) if where == "step" else self
        if failures and transition is not None and transition.num_switched == layers_done + (where == "step"):
            if where == "exchange":
                layer, _ = arguments
                assert all(extent.is_deleted() for extent in transition.high.kv[layer]), "those before it"
            raise failures.pop()
        return method(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(TransformError, match="injected") as caught:
            idle.transform(4 if up else 1)
    assert caught.value.__cause__ is not None
    untouched = where == "plan" and layers_done == 0
    degree = (1 if up else 4) if untouched else 4
    assert {view.tensor_parallel_size for view in idle.instances} == {degree}
    assert tokens(running.result()) == expected
    assert any(output.metrics.num_preemptions for output in running.outputs) != untouched
    idle.transform(2)
    assert tokens(idle.generate(*running.asked)) == expected


@pytest.mark.first_by_default
@pytest.mark.parametrize("rank", [pytest.param(rank, marks=[pytest.mark.slow] * (rank != 2)) for rank in range(4)])
@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_extents_that_a_failed_step_lost_are_made_anew(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool, rank: int):
    """A failed program may have lost the extents of any one device."""
    running, expected = decoding(idle, 6, requests(10, max_tokens=40), tp=1 if up else 4)
    run = Runner.run
    failures = [RuntimeError("injected")]

    def fails(runner: Runner, *arguments: Any) -> Any:
        transition = transition_of(idle, runner)
        if failures and transition is not None and transition.num_switched == 1:
            lost = transition.members[rank].kv[0 if up else -1]
            assert lost, "a layer in the lower layout"
            for extent in lost:
                extent.delete()
            raise failures.pop()
        return run(runner, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", fails)
        with pytest.raises(TransformError, match="injected"):
            idle.transform(4 if up else 1)
    assert {view.tensor_parallel_size for view in idle.instances} == {4}
    assert tokens(running.result()) == expected
    idle.transform(1)
    assert tokens(idle.generate(*running.asked)) == expected


@pytest.mark.first_by_default
@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_failure_with_the_token_of_a_preempted_request_in_flight(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """The token is lost, so the request must not wait for it."""
    expected = expected_of(idle, KINDS)
    switch, preempted = Relayout.switch_layers, list[Sequence]()

    def fails(transition: Relayout, step: StepPlan | None = None) -> None:
        if transition.num_switched and not preempted:
            preempted.append(next(s for s in transition.instance.running if s.num_in_flight))
            engine_of(idle).sequences.preempt(transition.instance, preempted[0])
            raise RuntimeError("injected")
        switch(transition, step)

    def drive() -> None:
        engine = engine_of(idle)
        if not up:
            transform(idle, options(4))
        submitted = submit(idle, KINDS)
        steps(idle, lambda: all(s.output for request in submitted for s in request.sequences))
        future = engine.transform(options(4 if up else 1))
        with monkeypatch.context() as patch:
            patch.setattr(Relayout, "switch_layers", fails)
            for _ in range(2):
                engine.advance()  # switch twice before the first result is taken
        assert preempted
        engine.end_transformations()
        with pytest.raises(TransformError, match="injected"):
            future.result()
        steps(idle, lambda: done(submitted))
        assert outputs(submitted) == expected
        registry_of(idle).end(submitted)

    in_dispatcher(idle, drive)


@pytest.mark.parametrize("up", [True, False], ids=["merge", "split"])
def test_failure_while_sequences_change_their_instance(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool):
    """Some sequences already have pages and slots of the new instance. Sampling state of others is overwritten."""
    prompts, _ = requests(10)
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=40, ignore_eos=True)
    expected = tokens(idle.generate(prompts, params))
    if not up:
        idle.transform(4)
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 10)
    add, adding = Instance.add, []

    def fails(instance: Instance, sequence: Sequence, lane: Lane) -> None:
        adding.append(sequence)
        add(instance, sequence, lane)
        if len(adding) == 8:
            raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Instance, "add", fails)
        with pytest.raises(RuntimeError, match="injected"):
            idle.transform(4 if up else 1)
    assert {view.tensor_parallel_size for view in idle.instances} == {1 if up else 4}
    assert tokens(running.result()) == expected


@pytest.mark.slow
def test_failure_of_a_merge_of_instances_that_released_and_one_that_did_not(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """The first instance has released weights for the merge. Their memory stays part of its KV cache."""
    prompts, params = requests(10, max_tokens=40)
    expected = tokens(idle.generate(prompts, params))
    idle.transform(2, devices=[0, 1], release_weights=False)
    idle.transform(2, devices=[2, 3])
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 6)
    pages = [view.kv_total_pages for view in idle.instances]

    def fails(transition: Relayout) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Relayout, "_plan_moves", fails)
        with pytest.raises(TransformError, match=r"injected.*as they were"):
            idle.transform(4)
    assert pages[0] < pages[1]
    assert [view.kv_total_pages for view in idle.instances] == [pages[1]] * 2
    idle.transform(4)
    assert tokens(running.result()) == expected
    idle.transform(1)
    assert tokens(idle.generate(prompts, params)) == expected
