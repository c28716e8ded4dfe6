"""One suite for both executors, which must accept, refuse and show the same."""

import pytest
from executor_harness import CACHE, SLOTS, Harness, apply, of, snapshot

from serving.scheduler import Action, Dispatch, Preempt, Reject, RejectKind, ScaleDown, ScaleUp

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_snapshot_shows_instances_degrees_and_the_queue(harness: Harness):
    names = harness.start([(8, 4), (6, 10)])
    view = snapshot(harness)
    assert [i.devices for i in view.instances] == [(0,), (1,)]
    assert all((i.free_tokens, i.free_slots, i.transition_to) == (CACHE, SLOTS, None) for i in view.instances)
    assert [(d.degree, d.max_requests) for d in view.degrees] == [(1, SLOTS), (2, 2 * SLOTS)]
    assert view.limits[2].capacity_tokens > 2 * CACHE, "weights are released"
    queue = {r.request_id: (r.prompt_tokens, r.max_total_tokens, r.started) for r in view.queue}
    assert queue == {names[0]: (8, 12, False), names[1]: (6, 16, False)}


def test_dispatched_request_runs_to_its_end(harness: Harness):
    (name,) = harness.start([(8, 12)])
    assert apply(harness, Dispatch(name, 1))[0].accepted
    view = snapshot(harness)
    assert not view.queue
    assert of(view, name).id == 1
    view = harness.until(lambda view: view.instances[1].free_slots == SLOTS)
    assert view.instances[1].free_tokens == CACHE


def test_what_cannot_be_is_refused_with_nothing_changed(harness: Harness):
    short, long = harness.start([(8, 4), (CACHE, 8)])
    before = snapshot(harness)
    actions: list[Action] = [
        Dispatch("no such request", 0),
        Dispatch(short, 7),
        Dispatch(long, 0),
        Preempt(short),
        Reject("no such request", RejectKind.DEADLINE, "late"),
        ScaleUp((0, 1), 2, running="pause"),
        ScaleUp((0, 1), 2, release_weights=False, running="sleep"),  # type: ignore[arg-type]
        ScaleUp((1, 0), 2),
        ScaleUp((0,), 2),
        ScaleUp((0, 1), 3),
        ScaleUp((0, 1, 2, 3), 4),
    ]
    for action, outcome in zip(actions, apply(harness, *actions), strict=True):
        assert not outcome.accepted, action
        assert outcome.detail
    after = snapshot(harness)
    assert (after.instances, after.queue) == (before.instances, before.queue)


def test_no_more_requests_run_than_there_are_slots(harness: Harness):
    names = harness.start([(4, 12)] * (SLOTS + 1))
    outcomes = apply(harness, *(Dispatch(name, 0) for name in names))
    assert [outcome.accepted for outcome in outcomes] == [True] * SLOTS + [False]


def test_no_request_is_taken_without_room_for_its_prompt(harness: Harness):
    first, second = harness.start([(40, 8), (32, 8)])
    outcomes = apply(harness, Dispatch(first, 0), Dispatch(second, 0), Dispatch(second, 1))
    assert [outcome.accepted for outcome in outcomes] == [True, False, True]


def test_preempted_request_waits_again_with_its_output_as_prompt(harness: Harness):
    (name,) = harness.start([(8, 40)])
    apply(harness, Dispatch(name, 0))
    harness.until(lambda view: any(r.num_tokens > 12 for i in view.instances for r in i.running))
    assert apply(harness, Preempt(name))[0].accepted
    view = harness.until(lambda view: bool(view.queue))
    (waiting,) = view.queue
    assert waiting.started
    assert 12 < waiting.prompt_tokens < 48
    assert waiting.max_total_tokens == 48
    assert view.instances[0].free_tokens == CACHE


def test_rejected_request_is_gone(harness: Harness):
    names = harness.start([(8, 4), (8, 4)])
    assert apply(harness, Reject(names[0], RejectKind.QUEUE_FULL, "too many"))[0].accepted
    assert [r.request_id for r in snapshot(harness).queue] == names[1:]


def test_instances_merge_and_split_while_a_request_runs(harness: Harness):
    (name,) = harness.start([(8, 50)])
    apply(harness, Dispatch(name, 1))
    up = apply(harness, ScaleUp((0, 1), 2), ScaleUp((0, 1), 2), Dispatch(name, 0))
    assert [outcome.accepted for outcome in up] == [True, False, False]
    view = harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert [i.devices for i in view.instances] == [(0, 1)]
    assert of(view, name).capacity_tokens == view.limits[2].capacity_tokens
    assert [o.accepted for o in apply(harness, ScaleDown((0, 1), 1), Preempt(name))] == [True, False]
    view = harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert [i.devices for i in view.instances] == [(0,), (1,)]


def test_long_request_runs_where_instances_have_merged(harness: Harness):
    (name,) = harness.start([(CACHE + 20, 8)])
    assert apply(harness, ScaleUp((0, 1), 2))[0].accepted
    harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert apply(harness, Dispatch(name, 0))[0].accepted
    harness.until(lambda view: all(not i.running for i in view.instances) and not view.queue)
