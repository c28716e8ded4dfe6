"""What policies remember from one decision to the next makes no difference, and baselines forget no one."""

import dataclasses
import random
from collections.abc import Collection

import pytest
from cluster_views import SHORT, TP2_LONG, TP4_LONG, cluster, filled, instance, running, waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler import (
    Admission,
    AmoebaPaperPolicy,
    ClusterView,
    Dispatch,
    FlyingPolicy,
    InstanceView,
    LeastLoadFirstPolicy,
    Policy,
    QueueOrder,
    Reject,
    RoundRobinPolicy,
    ScaleUp,
    SplitConfig,
    WaitingQueue,
)
from serving.scheduler.naive import BindingPolicy
from serving.scheduler.room import KeptRoom, Room

BASELINES = (RoundRobinPolicy, LeastLoadFirstPolicy)


def some_instance(chance: random.Random, first: int, degree: int, round_: int) -> InstanceView:
    requests = [running(f"r{first}-{n}-{round_}") for n in range(chance.randint(0, 12))]
    if degree > 1 and chance.random() < 0.4:
        requests.append(running(f"long{first}", TP2_LONG))
    fields: dict = {"draining": chance.random() < 0.05}
    if chance.random() < 0.1:
        fields |= {"transition_to": 4, "joinable_tokens": chance.choice([0, 4_000])}
    if chance.random() < 0.25:
        fields["free_slots"] = 0
    return instance(first, degree, *requests, **fields)


def another(chance: random.Random, before: tuple[InstanceView, ...], round_: int) -> list[InstanceView]:
    instances = []
    for first in (0, 4):
        here = [i for i in before if first <= i.id < first + 4]
        if not here or chance.random() < 0.15:
            degree = chance.choice([1, 1, 2, 4])
            here = [some_instance(chance, device, degree, round_) for device in range(first, first + 4, degree)]
        elif chance.random() < 0.5:
            place = chance.randrange(len(here))
            here[place] = some_instance(chance, here[place].id, here[place].degree, round_)
        if chance.random() < 0.1:  # a device is out of service
            here = [i for i in here if i.id != first]
        instances += here
    return instances


def forget(policy: Policy) -> None:
    """Have a policy look at all instances again."""
    if isinstance(policy, BindingPolicy):
        policy._look = set(range(8))
    elif isinstance(policy, (AmoebaPaperPolicy, FlyingPolicy)):
        policy._room = KeptRoom(0.0)


def check_choices(policy: BindingPolicy) -> None:
    """Have each choice compared with one that looks at all instances."""
    choose = policy.choose

    def load(instance: InstanceView) -> float:
        tokens = sum(policy.bound.tokens.get(device, 0) for device in instance.devices)
        return instance.load + 2 * tokens / instance.capacity_tokens

    def checked(room: Room, closed: Collection[int]) -> InstanceView:
        choices = sorted({i.id: i for i in room.home.values() if i.id not in closed}.values(), key=lambda i: i.devices)
        if isinstance(policy, RoundRobinPolicy):
            later = [i for i in choices if i.devices[0] >= policy._next_device]
            expected = (later or choices)[0]
        else:
            expected = min(choices, key=load)
        assert choose(room, closed) is expected
        return expected

    policy.choose = checked  # type: ignore[method-assign]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from((*BASELINES, AmoebaPaperPolicy, FlyingPolicy)))
def test_what_is_remembered_of_instances_makes_no_difference(seed: int, make: type):
    """A policy that forgets it before each decision decides the same. Requests come, go and starve; instances merge."""
    chance, queue = random.Random(seed), WaitingQueue()
    admission = Admission(QueueOrder(starving_s=5.0))
    settings_of = {"splits": SplitConfig(linger_s=2.0)} if issubclass(make, BindingPolicy) else {}
    kept, plain = (make(admission=admission, **settings_of) for _ in range(2))
    if isinstance(kept, BindingPolicy):
        check_choices(kept)
    refused: frozenset = frozenset()
    present: set[str] = set()
    instances: list[InstanceView] = []
    now_s = 0.0
    for round_ in range(12):
        now_s += 2 * chance.random()
        for number in range(chance.randint(0, 5)):
            name, size = f"w{round_}-{number}", chance.choice([SHORT, SHORT, 600, TP2_LONG, TP4_LONG, 90_000])
            queue.add(
                waiting(
                    name,
                    size,
                    priority=chance.randint(-1, 1),
                    arrival_s=now_s,
                    beyond_share=chance.random() < 0.1,
                    deadline_s=now_s + 9 * chance.random() if chance.random() < 0.1 else None,
                )
            )
            present.add(name)
        for name in sorted(present):
            if chance.random() < 0.05:
                queue.remove(name)
                present.remove(name)
        instances = another(chance, tuple(instances), round_)
        if chance.random() < 0.5:
            groups = [((0, 1, 2, 3), 4), ((4, 5, 6, 7), 4), ((0, 1), 2), ((6, 7), 2), ((0, 1, 2, 3), 1)]
            refused = frozenset(group for group in groups if chance.random() < 0.3)
        view = dataclasses.replace(cluster(*instances, now_s=now_s), queue=queue.snapshot(), refused=refused)
        forget(plain)
        actions = kept.decide(view)
        assert sorted(map(str, plain.decide(view))) == sorted(map(str, actions))
        for action in actions:  # some dispatches are refused
            if isinstance(action, Reject) or (isinstance(action, Dispatch) and chance.random() < 0.9):
                queue.remove(action.request_id)
                present.remove(action.request_id)
        if isinstance(kept, BindingPolicy):
            assert kept.bound.device_of.keys() | kept.bound.unbound >= present, "no one is forgotten"


def dispatched(policy: BindingPolicy, view: ClusterView) -> list[tuple[str, int]]:
    return [(a.request_id, a.instance_id) for a in policy.decide(view) if isinstance(a, Dispatch)]


@pytest.mark.parametrize("make", BASELINES)
def test_requests_of_several_devices_are_served_in_order_by_what_these_merge_into(make: type[BindingPolicy]):
    policy, queue = make(), [waiting(f"r{n}", arrival_s=float(n)) for n in range(6)]
    full = [filled(device, 1.0) for device in range(4)]
    assert dispatched(policy, cluster(*full, queue=queue, num_devices=4)) == []
    merged = cluster(instance(0, 4, running("long", TP4_LONG)), queue=queue, num_devices=4)
    assert dispatched(policy, merged) == [(f"r{n}", 0) for n in range(6)]


@pytest.mark.parametrize("make", BASELINES)
def test_a_member_whose_own_request_is_ahead_is_not_taken_for_a_merge(make: type[BindingPolicy]):
    """Also when that request is not looked at again."""
    members = [instance(0), filled(1, 1.0)]
    busy = [instance(device, draining=True) for device in (2, 3)]
    ahead = waiting("ahead", arrival_s=0.0)
    policy = make()
    policy.decide(cluster(instance(0, draining=True), members[1], *busy, queue=[ahead], num_devices=4))
    assert policy.bound.device_of == {"ahead": 1}
    for arrival_s, merges in ((1.0, 0), (-1.0, 1)):
        queue = [ahead, waiting(f"long{arrival_s}", TP2_LONG, arrival_s=arrival_s)]
        kept = dataclasses.replace(members[1], draining=True)
        refused = frozenset({((0, 1), 2)})
        policy.decide(cluster(instance(0), kept, *busy, queue=queue, num_devices=4, refused=refused))
        view = cluster(*members, *busy, queue=queue, num_devices=4)
        policy.decide(dataclasses.replace(view, refused=refused))
        assert sum(isinstance(action, ScaleUp) for action in policy.decide(view)) == merges


@pytest.mark.parametrize("make", BASELINES)
def test_requests_of_an_instance_that_splits_are_bound_again(make: type[BindingPolicy]):
    policy = make(splits=SplitConfig(linger_s=0.0))
    long = running("long", TP4_LONG)
    merged = instance(0, 4, long, free_slots=0)
    policy.decide(cluster(merged, *[instance(d, draining=True) for d in range(4, 8)], queue=[waiting("a")]))
    assert policy.bound.device_of == {"a": 0}
    done = instance(0, 4, running("short"))
    assert dispatched(policy, cluster(done, queue=[waiting("a")])) == [("a", 4)]


def test_a_request_is_not_lost_where_choosing_fails():
    class Failing(RoundRobinPolicy):
        fails = True

        def choose(self, room: Room, closed: Collection[int]) -> InstanceView:
            if self.fails:
                raise RuntimeError("injected")
            return super().choose(room, closed)

    policy, view = Failing(), cluster(queue=[waiting("a")])
    with pytest.raises(RuntimeError, match="injected"):
        policy.decide(view)
    policy.fails = False
    assert dispatched(policy, view) == [("a", 0)]


@pytest.mark.parametrize("make", BASELINES)
def test_requests_behind_some_that_wait_for_a_merge_are_served(make: type[BindingPolicy]):
    """Up to a limit."""
    policy = make()
    others = [instance(device, draining=True) for device in range(1, 4)]
    queue = [waiting(f"long{n}", TP2_LONG, arrival_s=float(n)) for n in range(31)] + [waiting("short", arrival_s=40.0)]
    view = cluster(instance(0), *others, queue=queue, num_devices=4)
    assert dispatched(policy, view) == [("short", 0)]
    more = cluster(instance(0), *others, queue=[*queue, waiting("long31", TP2_LONG, arrival_s=31.0)], num_devices=4)
    assert dispatched(policy, more) == []
