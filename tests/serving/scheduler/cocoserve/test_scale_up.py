"""Algorithm 1, compared with brute force over all placements of up to 6 layers on up to 3 devices."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler.cocoserve.algorithms import max_replicas, scale_up
from serving.scheduler.cocoserve.speedup import Homes, count_transitions, even_speedup

HEAD: Homes = (0,)
COSTS = (0.0, 0.2, 0.26, 0.6, 1.2)
"""Costs of a transition relative to a layer."""


@cache
def all_placements(layers: int, devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return homes by placement, layer and device, then sums of 1 / p, transitions and replicas by device."""
    numbers = np.arange(2 ** (layers * devices))
    bits = (numbers[:, None] >> np.arange(layers * devices)) & 1
    member = bits.reshape(-1, layers, devices).astype(bool)
    sums = (1 / (1 + member.sum(axis=2))).sum(axis=1)
    ends = np.zeros((len(member), 1, devices), bool)
    path = np.concatenate([ends, member, ends], axis=1)
    transitions = (path[:, 1:] != path[:, :-1]).any(axis=2).sum(axis=1)
    return member, sums, transitions, member.sum(axis=1)


def brute_force(homes: list[Homes], room: dict[int, int], cost: float, max_degree: int | None = None) -> float:
    """Return the highest speedup of all placements that keep the present homes."""
    member, sums, transitions, _ = all_placements(len(homes), len(room))
    present = np.array([[device in layer for device in room] for layer in homes])
    allowed = (member | ~present).all(axis=(1, 2)) & ((member & ~present).sum(axis=1) <= list(room.values())).all(
        axis=1
    )
    if max_degree is not None:
        degrees = 1 + member.sum(axis=2)
        allowed &= ((degrees <= max_degree) | (degrees == 1 + present.sum(axis=1))).all(axis=1)
    return len(homes) / float((sums + cost * transitions)[allowed].min())


def grown(homes: list[Homes], added: dict[int, tuple[int, ...]]) -> list[Homes]:
    """Return the homes with the replicas that Algorithm 1 adds."""
    return [
        tuple(sorted({*layer, *(device for device, layers in added.items() if index in layers)}))
        for index, layer in enumerate(homes)
    ]


def value(homes: list[Homes], cost: float) -> float:
    """Return the speedup by Equation 4."""
    return even_speedup([len(layer) for layer in homes], count_transitions(homes, HEAD), cost)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_equals_brute_force_without_replicas(layers: int, devices: int):
    """All numbers of free layers on each device."""
    for rooms in itertools.combinations_with_replacement(range(layers + 1), devices):
        for cost in COSTS:
            check_optimal(layers, rooms, cost)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=3, max_size=3), st.floats(0, 2))
def test_equals_brute_force_with_six_layers_on_three_devices(rooms: list[int], cost: float):
    check_optimal(6, tuple(rooms), cost)


def check_optimal(layers: int, rooms: tuple[int, ...], cost: float) -> None:
    homes, room = [HEAD] * layers, {device + 1: count for device, count in enumerate(rooms)}
    added = scale_up(homes, HEAD, room, cost)
    assert all(len(taken) <= room[device] for device, taken in added.items())
    assert value(grown(homes, added), cost) == pytest.approx(brute_force(homes, room, cost)), (rooms, cost)


@st.composite
def runs(draw: st.DrawFn) -> list[Homes]:
    """Draw six layers with a run of replicas on some devices."""
    homes = [{0} for _ in range(6)]
    for device in draw(st.sets(st.integers(1, 3))):
        first, end = sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
        for layer in homes[first:end]:
            layer.add(device)
    return [tuple(sorted(layer)) for layer in homes]


@settings(max_examples=40)
@given(runs(), st.lists(st.integers(0, 6), min_size=3, max_size=3), st.floats(0, 2), st.integers(1, 4))
def test_equals_brute_force_with_present_replicas(homes: list[Homes], rooms: list[int], cost: float, most: int):
    """Present replicas stay, and no layer gets more homes than allowed."""
    room = {device + 1: count for device, count in enumerate(rooms)}
    added = scale_up(homes, HEAD, room, cost, most)
    after = grown(homes, added)
    assert all(len(new) <= max(most, len(old)) for new, old in zip(after, homes, strict=True))
    assert all(len(taken) <= room[device] for device, taken in added.items())
    assert value(after, cost) == pytest.approx(brute_force(homes, room, cost, most))


def test_layers_of_a_device_are_consecutive():
    added = scale_up([HEAD] * 40, HEAD, {1: 10, 2: 10, 3: 10}, 0.3)
    assert sorted(len(layers) for layers in added.values()) == [10, 10, 10]
    assert all(layers == tuple(range(layers[0], layers[0] + 10)) for layers in added.values())


def test_no_layer_replicates_if_transitions_cost_more_than_they_gain():
    """One layer gains half a layer and needs two transitions. A run of three layers gains one and a half."""
    assert scale_up([HEAD] * 8, HEAD, {1: 1}, 0.26) == {}
    assert scale_up([HEAD] * 8, HEAD, {1: 3}, 0.26) == {1: (0, 1, 2)}


@pytest.mark.parametrize("cost", [1e9, math.inf])
def test_transitions_of_any_cost(cost: float):
    """Without bandwidth between devices, only replicas that need no further transition pay."""
    present = [HEAD, (0, 1), HEAD, (0, 1), HEAD, HEAD]
    assert scale_up([HEAD] * 6, HEAD, {1: 5}, cost) == {}
    assert scale_up(present, HEAD, {1: 1}, cost) == {1: (2,)}
    assert scale_up(present, HEAD, {1: 3}, cost) == {1: (0, 2, 4)}


def test_replicas_are_bounded_by_free_memory():
    assert max_replicas(6.1e9, 608e6, 40) == 10
    assert max_replicas(100e9, 608e6, 40) == 40
    assert max_replicas(-1.0, 608e6, 40) == 0


def test_a_deep_model_considers_fewer_devices():
    """Two devices with room for 70 of 80 layers have 5,041 states. Three devices would have 357,911."""
    added = scale_up([HEAD] * 80, HEAD, {1: 70, 2: 70, 3: 70, 4: 20}, 0.3)
    assert set(added) == {1, 2}
