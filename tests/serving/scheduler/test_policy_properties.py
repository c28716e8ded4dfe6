"""Actions that are forbidden in every state, and a test against starvation."""

import dataclasses

from cluster_views import CAPACITY, DEGREES, cluster, instance
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import simulate

from serving.scheduler import (
    POLICY_NAMES,
    AmoebaConfig,
    ClusterView,
    Dispatch,
    InstanceView,
    Preempt,
    Reject,
    RunningRequest,
    ScaleDown,
    ScaleUp,
    WaitingRequest,
    make_policy,
)

short_sizes, long_sizes = st.integers(2, 12_000), st.integers(12_001, 80_000)
sizes = st.one_of(short_sizes, long_sizes, long_sizes, short_sizes, st.integers(70_000, 90_000))


@st.composite
def requests(draw: st.DrawFn, name: str) -> WaitingRequest:
    total = draw(sizes)
    arrival_s = draw(st.floats(0, 100))
    deadline_s = draw(st.none() | st.none() | st.floats(50, 400).map(lambda after: arrival_s + after))
    prompt, priority = draw(st.integers(1, total - 1)), draw(st.integers(-3, 3))
    return WaitingRequest(name, prompt, total, priority, arrival_s, deadline_s, draw(st.booleans()))


@st.composite
def instances(draw: st.DrawFn, first: int, degree: int) -> InstanceView:
    running, used = [], 0
    for number in range(draw(st.integers(0, 6))):
        total = min(draw(sizes), CAPACITY[degree])
        tokens = draw(st.integers(1, total))
        if used + (pages := -(-tokens // 16) * 16) <= CAPACITY[degree]:
            used += pages
            name, priority = f"running-{first}-{number}", draw(st.integers(-3, 3))
            running.append(RunningRequest(name, tokens, total, 0, priority, draw(st.floats(0, 100))))
    view = instance(first, degree, *running)
    changes = {
        "draining": draw(st.integers(0, 12)) == 7,
        "transition_to": draw(st.sampled_from([*[None] * 12, 1, degree])),
        "free_slots": draw(st.sampled_from([30, 30, 1, 0])),
    }
    return dataclasses.replace(view, **changes)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    members: list[InstanceView] = []
    device = 0
    while device < 8:
        degree = draw(st.sampled_from([d for d in (1, 2, 4) if device % d == 0]))
        members.append(draw(instances(device, degree)))
        device += degree
    queue = [draw(requests(f"waiting-{n}")) for n in range(draw(st.integers(0, 8)))]
    refused = draw(st.frozensets(st.sampled_from([((0, 1, 2, 3), 4), ((4, 5), 2), ((0, 1, 2, 3), 1)])))
    return cluster(*members, queue=queue, now_s=draw(st.floats(100, 400)), refused=refused)


def check(view: ClusterView, actions: list) -> None:
    by_id = {i.id: i for i in view.instances}
    waiting = {r.request_id: r for r in view.queue}
    running = {r.request_id for i in view.instances for r in i.running}
    ended = [a.request_id for a in actions if isinstance(a, Dispatch | Reject)]
    assert len(ended) == len(set(ended)), "a request is dispatched or rejected once"
    assert set(ended) <= set(waiting)
    preempted = [a.request_id for a in actions if isinstance(a, Preempt)]
    assert len(preempted) == len(set(preempted))
    assert set(preempted) <= running
    given: dict[int, list[WaitingRequest]] = {}
    transformed: set[int] = set()
    for action in actions:
        assert action.reason
        if isinstance(action, Dispatch):
            target = by_id[action.instance_id]
            assert transformed.isdisjoint(target.devices), "no one is sent to what changes"
            given.setdefault(target.id, []).append(waiting[action.request_id])
        elif isinstance(action, ScaleUp | ScaleDown):
            assert transformed.isdisjoint(action.devices), "devices are transformed once"
            transformed.update(action.devices)
            check_transformation(view, action)
    for instance_id, new in given.items():
        target = by_id[instance_id]
        assert target.transition_to is None
        assert not target.draining
        assert len(new) <= target.free_slots
        assert all(r.max_total_tokens <= target.capacity_tokens for r in new)
        assert sum(view.whole_pages(r.prompt_tokens + 1) for r in new) <= target.free_tokens


def check_transformation(view: ClusterView, action: ScaleUp | ScaleDown) -> None:
    members = view.instances_on(action.devices)
    assert (action.devices, action.degree) not in view.refused
    assert sorted(d for i in members for d in i.devices) == list(action.devices)
    assert all(i.transition_to is None and not i.draining for i in members)
    if isinstance(action, ScaleUp):
        assert action.devices in view.groups(action.degree)
        assert all(i.degree < action.degree for i in members)
    else:
        (member,) = members
        assert member.degree > action.degree
        assert all(r.max_total_tokens <= CAPACITY[action.degree] for r in member.running)


@settings(max_examples=80)
@given(clusters(), st.sampled_from(POLICY_NAMES), st.sampled_from([0.0, 60.0]), st.sampled_from([0.0, 1.0]))
def test_decisions_can_be_carried_out(view: ClusterView, name: str, linger_s: float, growth: float):
    policy = make_policy(name, config=AmoebaConfig(linger_s=linger_s, reserved_growth=growth))
    for _ in range(2):  # the second decision uses the policy's memory
        check(view, policy.decide(view))


@settings(max_examples=60)
@given(clusters(), st.sampled_from(POLICY_NAMES))
def test_decisions_do_not_depend_on_the_order_in_the_snapshot(view: ClusterView, name: str):
    shuffled = dataclasses.replace(view, queue=view.queue[::-1])
    assert set(make_policy(name).decide(view)) == set(make_policy(name).decide(shuffled))


@settings(max_examples=60)
@given(clusters(), st.sampled_from([0.0, 1.0]))
def test_nobody_of_higher_priority_is_preempted(view: ClusterView, growth: float):
    priority = {r.request_id: r.priority for i in view.instances for r in i.running}
    best = min((r.priority for r in view.queue), default=0)
    for action in make_policy("amoeba", config=AmoebaConfig(reserved_growth=growth)).decide(view):
        if isinstance(action, Preempt):
            assert priority[action.request_id] > best


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.sampled_from([1_000, 6_000, 11_000, 20_000, 50_000]), st.integers(-5, 5)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([name for name in POLICY_NAMES if name != "static"]),
)
def test_all_requests_finish_under_a_stream_of_higher_priority(arrivals: list[tuple[float, int, int]], name: str):
    """Urgent requests keep two devices busy all the time. Every other request is still served."""
    requests = [
        (WaitingRequest(f"r{n}", total - 500, total, priority, arrival_s), 300)
        for n, (arrival_s, total, priority) in enumerate(arrivals)
    ]
    urgent = [(WaitingRequest(f"urgent{n}", 9_000, 9_500, -10, n * 3.0), 300) for n in range(100)]
    ran = simulate(make_policy(name), [*requests, *urgent], 900, DEGREES, num_devices=4)
    assert set(ran.finished_s) == {r.request_id for r, _ in [*requests, *urgent]}
