"""A room that is kept from one snapshot to the next is the room made from the last one alone."""

import dataclasses
import random

import pytest
from cluster_views import TP4_LONG, cluster, instance, running, waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler import merge_groups
from serving.scheduler.instance_tables import InstanceTables
from serving.scheduler.room import KeptRoom, Room
from serving.scheduler.view import ClusterView, InstanceView

NUM_DEVICES = 64


def some_instance(chance: random.Random, first: int, degree: int) -> InstanceView:
    """An instance in any state."""
    requests = [running(f"r{first}-{n}", priority=chance.randint(-1, 1)) for n in range(chance.randint(0, 3))]
    if degree == 4 and chance.random() < 0.5:
        requests.append(running(f"long{first}", TP4_LONG))
    state = {"transition_to": chance.choice([2, 4])} if chance.random() < 0.1 else {}
    free = {"free_slots": 0} if chance.random() < 0.2 else {}
    return instance(first, degree, *requests, draining=chance.random() < 0.05, **state, **free)


def another(chance: random.Random, view: ClusterView, share: float) -> ClusterView:
    """The snapshot after some instances have changed, merged or split."""
    instances = []
    for first in range(0, NUM_DEVICES, 4):
        here = [i for i in view.instances if first <= i.id < first + 4]
        if chance.random() < share:
            degree = chance.choice([1, 2, 4, here[0].degree])
            here = [some_instance(chance, device, degree) for device in range(first, first + 4, degree)]
        instances += here
    return cluster(*instances, num_devices=NUM_DEVICES)


def tables(room: Room, view: ClusterView) -> dict[str, object]:
    """What a policy can see of a room."""
    request = waiting("w")
    return {
        "free": {i.id: room.free(i) for i in view.instances},
        "by_load": list(room.by_load()),
        "with_room": room.with_room(request),
        "count": room.num_with_room(request),
        "merged": list(room.merged.values()),
        "unsteady": sorted(room.unsteady),
        "num_requests": room.num_requests,
        "slots": room.most_have_slots,
        "roomiest": room.roomiest(),
        "members": [room.members((device,)) for device in range(NUM_DEVICES)],
        "groups": {degree: list(room.merge_groups(degree)) for degree in (2, 4)},
        "groups_by_load": {degree: list(room.groups_by_load(degree)) for degree in (2, 4)},
    }


def check_groups(room: Room, degree: int) -> None:
    """The groups are those of a definition, and in order."""
    expected = []
    for first in range(0, NUM_DEVICES, degree):
        devices = tuple(range(first, first + degree))
        if (members := room.parts(devices)) is not None:
            mixed = len({i.degree for i in members}) > 1
            expected.append((mixed, -room.merged_free(members, degree), devices, members))
    assert list(room.merge_groups(degree)) == sorted(expected, key=lambda group: group[:3])
    by_load = list(room.groups_by_load(degree))
    assert {group.devices for group in by_load} == {devices for _, _, devices, _ in expected}
    assert by_load == sorted(by_load, key=lambda group: group[:2])
    for load, devices, free, kind, members in by_load:
        assert members == room.parts(devices)
        assert free == room.merged_free(members, degree)
        assert load == pytest.approx(sum(map(room.load, members)) / len(members))
        degrees = {i.degree for i in members}
        busy_kind = degrees.pop() if len(degrees) == 1 else None
        assert kind == (busy_kind if any(i.running for i in members) else 0)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 0.03, 0.1, 1.0]), min_size=1, max_size=6))
def test_a_kept_room_is_the_room_of_its_last_snapshot(seed: int, shares: list[float]):
    chance = random.Random(seed)
    view = another(chance, cluster(num_devices=NUM_DEVICES), 1.0)
    kept = KeptRoom(0.0)
    for share in shares:
        room, new = kept.of(view), Room(view, 0.0)
        assert tables(room, view) == tables(new, view)
        for number in range(chance.randint(0, 3)):  # what a decision gives away shows at once, and only in it
            options = room.with_room(waiting("w"))
            if options:
                taken = chance.choice(options)
                for one in (room, new):
                    one.give(taken, waiting(f"w{number}"))
            for one in (room, new):
                one.keep_coming(waiting("coming", TP4_LONG))
                if one.merged:
                    one.set_aside(next(iter(one.merged.values())), waiting("long", TP4_LONG), 1_000)
            if (steady := list(room.open)) and chance.random() < 0.5:
                closed = chance.choice(steady)
                room.close(closed)
                new.close(closed)
        assert tables(room, view) == tables(new, view)
        assert room.roomiest() == sorted(
            room.merged.values(), key=lambda i: (-room.free(i) - room.facts.freed_by_long(i), i.id)
        )
        for degree in (2, 4):
            check_groups(room, degree)
        view = another(chance, view, share)


def test_many_groups_are_sorted_as_few_are_moved(monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(0)
    view = another(chance, cluster(num_devices=NUM_DEVICES), 1.0)
    for few in (1, 10_000):
        monkeypatch.setattr(merge_groups, "_FEW", few)
        room = Room(view, 0.0)
        for share in (0.0, 0.2, 1.0, 0.2):
            check_groups(room, 2)
            view = another(chance, view, share)
            room.refresh(view)
            check_groups(room, 2)


def test_a_room_that_could_not_be_refreshed_is_made_again(monkeypatch: pytest.MonkeyPatch):
    view, kept = cluster(num_devices=NUM_DEVICES), KeptRoom(0.0)
    kept.of(view)
    later = another(random.Random(1), view, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(InstanceTables, "_add", None)
        with pytest.raises(TypeError):
            kept.of(later)
    assert tables(kept.of(later), later) == tables(Room(later, 0.0), later)


def test_a_kept_room_knows_other_limits():
    view, kept = cluster(), KeptRoom(0.0)
    before = [group.minus_free for group in kept.of(view).merge_groups(4)]
    more = tuple(dataclasses.replace(limits, capacity_tokens=2 * limits.capacity_tokens) for limits in view.degrees)
    after = [group.minus_free for group in kept.of(dataclasses.replace(view, degrees=more)).merge_groups(4)]
    assert before == [-80_000] * 2
    assert after == [-80_000 - 80_000] * 2
