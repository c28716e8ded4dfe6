"""The queue kept by its changes is the queue sorted from scratch."""

import dataclasses

import pytest
from cluster_views import cluster, instance, running, waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler import (
    Admission,
    AmoebaConfig,
    AmoebaPolicy,
    Dispatch,
    QueueIndex,
    QueueOrder,
    WaitingQueue,
    WaitingRequest,
)

ORDER = QueueOrder(starving_s=50)
requests = st.builds(
    WaitingRequest,
    st.sampled_from([f"r{n}" for n in range(12)]),
    prompt_tokens=st.just(10),
    max_total_tokens=st.integers(11, 100),
    priority=st.integers(-2, 2),
    arrival_s=st.floats(0, 100),
    deadline_s=st.none() | st.floats(0, 200),
    beyond_share=st.booleans(),
    waiting_since_s=st.none() | st.floats(0, 150),
)


@settings(max_examples=80)
@given(st.lists(st.lists(requests | st.sampled_from([f"r{n}" for n in range(12)]), max_size=8), max_size=6))
def test_changes_give_what_sorting_gives(rounds: list[list[WaitingRequest | str]]):
    queue, index, present, now_s = WaitingQueue(), QueueIndex(ORDER), {}, 90.0
    for changes in rounds:
        for change in changes:
            if isinstance(change, WaitingRequest):
                queue.add(change)
                present[change.request_id] = change
            elif present.pop(change, None) is not None:
                queue.remove(change)
        now_s += 5
        index.update(queue.snapshot())
        everyone = list(present.values())
        ordered = list(index.ordered(now_s))
        assert ordered == sorted(everyone, key=lambda r: ORDER.key(r, now_s))
        late = {r.request_id for r in everyone if r.deadline_s is not None and r.deadline_s <= now_s}
        assert {r.request_id for r in index.expired(now_s)} == late == {r.request_id for r in index.expired(now_s)}
        assert {r.request_id for r in index.larger_than(50)} == {
            r.request_id for r in everyone if r.max_total_tokens > 50
        }
        assert index.largest(50) == max((r.max_total_tokens for r in everyone if r.max_total_tokens <= 50), default=0)
        plain = QueueIndex(ORDER)
        plain.update(tuple(everyone))
        assert list(plain.ordered(now_s)) == ordered


def test_many_changes_at_once_are_read_from_the_whole_queue():
    queue, index = WaitingQueue(), QueueIndex(ORDER)
    for n in range(9_000):
        queue.add(waiting(f"r{n:05}", arrival_s=n / 1_000))
    index.update(queue.snapshot())
    for n in range(8_999):
        queue.remove(f"r{n:05}")
    index.update(queue.snapshot())
    assert [r.request_id for r in index.ordered(10.0)] == ["r08999"]


def test_deadlines_of_requests_that_came_again_are_dropped():
    queue, index = WaitingQueue(), QueueIndex(ORDER)
    for again in range(40):
        for n in range(100):
            queue.add(waiting(f"r{n:02}", arrival_s=float(again), deadline_s=1_000.0 + n))
        index.update(queue.snapshot())
        assert len(index._deadlines) <= 2 * 100 + 256
    assert [r.request_id for r in index.expired(1_001.0)] == ["r00", "r01"]
    for n in range(100):
        queue.remove(f"r{n:02}")
    index.update(queue.snapshot())
    assert len(index._deadlines) <= 256
    assert index.expired(2_000.0) == []


def test_a_snapshot_of_a_queue_that_has_changed_is_not_read():
    queue = WaitingQueue()
    queue.add(waiting("a"))
    snapshot = queue.snapshot()
    assert len(snapshot) == 1
    assert waiting("a") in snapshot
    queue.remove("a")
    for read in (lambda: list(snapshot), lambda: len(snapshot), lambda: snapshot.changes_since(0)):
        with pytest.raises(RuntimeError, match="version 1, and the queue has changed to 2"):
            read()


def test_reading_the_first_requests_does_not_go_through_the_rest(monkeypatch: pytest.MonkeyPatch):
    index, asked = QueueIndex(ORDER), []
    index.update(tuple(waiting(f"r{n:05}", arrival_s=n / 100) for n in range(5_000)))
    monkeypatch.setattr(QueueOrder, "starves", lambda self, request, now_s: asked.append(request) or False)
    ordered = index.ordered(1.0)
    assert [next(ordered).request_id for _ in range(3)] == ["r00000", "r00001", "r00002"]
    assert len(asked) <= 3


def test_a_decision_looks_past_a_limited_number_of_requests_that_find_no_place():
    """Forty that are too large for what is free come before one that is not."""
    busy = [instance(d, 1, running(f"b{d}", 6_000)) for d in range(2)]
    large = [waiting(f"large{n:02}", 11_000, arrival_s=n / 100) for n in range(40)]
    view = cluster(*busy, queue=[*large, waiting("small", arrival_s=1)], now_s=2, num_devices=2)
    four = [instance(d, 1, running(f"b{d}", 6_000)) for d in range(8)]
    wide = cluster(*four, queue=[*large[:7], waiting("small", arrival_s=1)], now_s=2)
    assert AmoebaPolicy(AmoebaConfig(lookahead=7)).decide(wide) == []
    (action,) = AmoebaPolicy(AmoebaConfig(lookahead=8)).decide(wide)
    assert isinstance(action, Dispatch)
    assert AmoebaPolicy().decide(view) == []


def test_a_policy_keeps_up_with_a_queue_that_changes():
    """Decisions from a kept queue are those from tuples."""
    queue, kept, fresh = (
        WaitingQueue(),
        AmoebaPolicy(admission=Admission(ORDER)),
        AmoebaPolicy(admission=Admission(ORDER)),
    )
    view = cluster(*[instance(d, 1, free_slots=1) for d in range(8)])

    for n in range(30):
        queue.add(waiting(f"r{n:02}", 1_000 + 400 * (n % 7), priority=n % 3, arrival_s=float(n)))
        if n % 4 == 3:
            queue.remove(f"r{n - 2:02}")
        now = dataclasses.replace(view, now_s=float(n))
        snapshot = queue.snapshot()
        assert kept.decide(dataclasses.replace(now, queue=snapshot)) == fresh.decide(
            dataclasses.replace(now, queue=tuple(snapshot))
        )
