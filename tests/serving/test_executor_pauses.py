"""Pauses on both executors, which must accept, refuse and show the same."""

import pytest
from executor_harness import CACHE, SLOTS, Harness, apply, of, snapshot

from serving.scheduler import ClusterView, Dispatch, Preempt, ScaleDown, ScaleUp

pytestmark = pytest.mark.usefixtures("quick_compile")
PAUSE = ScaleUp((0, 1), 2, release_weights=False, running="pause")
RESUME = ScaleDown((0, 1), 1)


def decoding(harness: Harness, *names: str) -> ClusterView:
    """Wait until the requests have some output, and return that snapshot."""

    def some_output(view: ClusterView) -> bool:
        running = {r.request_id: r for i in view.instances for r in i.running}
        return all(running[name].uncomputed_tokens == 0 and running[name].num_tokens > 10 for name in names)

    return harness.until(some_output)


def paused(view: ClusterView) -> dict[str, int]:
    """Return the tokens of each paused request."""
    return {r.request_id: r.num_tokens for i in view.instances for member in i.paused for r in member}


def test_requests_pause_while_others_run_on_all_devices_and_go_on(harness: Harness):
    first, second, urgent = harness.start([(8, 50), (8, 50), (8, 12)])
    apply(harness, Dispatch(first, 0), Dispatch(second, 1))
    decoding(harness, first, second)
    assert [o.accepted for o in apply(harness, PAUSE, PAUSE)] == [True, False]
    view = snapshot(harness)
    (group,) = view.instances
    assert (group.degree, group.transition_to, group.running, group.paused_degree) == (2, None, (), 1)
    assert [[r.request_id for r in member] for member in group.paused] == [[first], [second]]
    assert group.capacity_tokens == view.kept_tokens(2) == 2 * CACHE
    assert 0 < group.free_tokens < 2 * CACHE
    assert group.free_slots == 2 * SLOTS - 1, "slots are those of the first device"
    assert apply(harness, Dispatch(urgent, 0))[0].accepted
    harness.until(lambda view: not view.instances[0].running and not view.queue)
    before = paused(view)
    after = paused(snapshot(harness))
    assert after.keys() == before.keys()
    assert all(after[name] - before[name] <= 2 for name in before), "no more than what was in flight"
    assert apply(harness, RESUME)[0].accepted
    view = snapshot(harness)
    assert [i.devices for i in view.instances] == [(0,), (1,)]
    assert [[r.request_id for r in i.running] for i in view.instances] == [[first], [second]]
    harness.until(lambda view: all(not i.running and not i.paused for i in view.instances))
    assert not snapshot(harness).queue, "none was computed again"


def test_requests_of_a_group_move_beside_those_that_go_on(harness: Harness):
    first, later = harness.start([(8, 50), (8, 50)])
    apply(harness, Dispatch(first, 1))
    decoding(harness, first)
    apply(harness, PAUSE)
    assert apply(harness, Dispatch(later, 0))[0].accepted
    decoding(harness, later)
    assert apply(harness, RESUME)[0].accepted
    view = harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert [i.devices for i in view.instances] == [(0,), (1,)]
    assert {r.request_id for i in view.instances for r in i.running} == {first, later}
    assert of(view, first).id == 1
    harness.until(lambda view: all(not i.running for i in view.instances) and not view.queue)


def test_paused_request_can_be_preempted(harness: Harness):
    (name,) = harness.start([(8, 40)])
    apply(harness, Dispatch(name, 0))
    decoding(harness, name)
    apply(harness, PAUSE)
    assert apply(harness, Preempt(name))[0].accepted
    view = harness.until(lambda view: bool(view.queue))
    assert [r.request_id for r in view.queue] == [name]
    assert not view.instances[0].paused
    assert view.instances[0].paused_degree is None
    assert view.instances[0].free_tokens == 2 * CACHE


def test_what_would_lose_paused_requests_is_refused(harness: Harness):
    first, other = harness.start([(8, 50), (CACHE + 20, 8)])
    apply(harness, Dispatch(first, 0))
    decoding(harness, first)
    (refused,) = apply(harness, ScaleUp((0, 1), 2, running="pause"))
    assert not refused.accepted
    assert "release_weights=False" in refused.detail
    apply(harness, PAUSE)
    outcomes = apply(harness, Dispatch(other, 1), ScaleUp((0, 1), 2, release_weights=False), ScaleDown((0,), 1))
    assert [o.accepted for o in outcomes] == [False] * 3
    assert apply(harness, RESUME)[0].accepted


def test_a_merge_that_waits_begins_when_requests_have_ended(harness: Harness):
    name, later = harness.start([(8, 40), (8, 4)])
    apply(harness, Dispatch(name, 0))
    decoding(harness, name)
    (accepted,) = apply(harness, ScaleUp((0, 1), 2, release_weights=False, running="wait"))
    assert accepted.accepted
    view = snapshot(harness)
    assert [(i.devices, i.transition_to) for i in view.instances] == [((0,), 2), ((1,), 2)]
    outcomes = apply(harness, Dispatch(later, 1), PAUSE, ScaleUp((0, 1), 2))
    assert [o.accepted for o in outcomes] == [False] * 3
    view = harness.until(lambda view: len(view.instances) == 1 and view.instances[0].transition_to is None)
    assert not view.instances[0].running
    assert view.instances[0].capacity_tokens == 2 * CACHE
    assert apply(harness, Dispatch(later, 0))[0].accepted


def test_merged_without_releasing_weights_it_holds_what_its_members_held(harness: Harness):
    (name,) = harness.start([(CACHE + 20, 20)])
    assert apply(harness, ScaleUp((0, 1), 2, release_weights=False))[0].accepted
    view = harness.until(lambda view: all(i.transition_to is None for i in view.instances))
    assert view.instances[0].capacity_tokens == view.kept_tokens(2) < view.limits[2].capacity_tokens
    assert view.keeps_weights(view.instances[0])
    assert apply(harness, Dispatch(name, 0))[0].accepted
    harness.until(lambda view: all(not i.running for i in view.instances) and not view.queue)
