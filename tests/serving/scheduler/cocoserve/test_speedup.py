"""Equations 1 to 4 of CoCoServe, compared with hand calculations and a simulation of each layer and home."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.scheduler.cocoserve.speedup import (
    Homes,
    communication_s,
    computation_s,
    count_transitions,
    even_speedup,
    speedup,
    transition_cost,
)


def test_a_layer_takes_as_long_as_its_slowest_home():
    """8 rows at 4 rows/s take 2 s, and 7 rows at 2 rows/s take 3.5 s."""
    assert computation_s([[15], [8, 7]], [[5], [4, 2]]) == 3 + 3.5


@pytest.mark.parametrize(
    ("homes", "transitions"),
    [
        ([(0,)] * 6, 0),
        ([(0,), (0, 1), (0, 1), (0,)], 2),
        ([(0, 1)] * 4, 2),
        ([(0, 1), (0,), (0, 1), (0,)], 4),
        ([(1,)] * 4, 2),
        ([(0, 1), (0, 2), (0,)], 3),
    ],
)
def test_transitions_grow_with_runs_of_layers_and_not_with_layers(homes: list[Homes], transitions: int):
    assert count_transitions(homes, (0,)) == transitions


@pytest.mark.parametrize(
    ("replicated", "degree", "expected"),
    [(0, 2, 1.0), (20, 2, 40 / 30), (25, 2, 40 / 27.5), (30, 2, 1.6), (20, 4, 1.6), (40, 4, 4.0)],
)
def test_equation_4_without_communication(replicated: int, degree: int, expected: float):
    """The configurations of the paper's Figure 6: 1.33, 1.45 and 1.60 at p = 2, and 1.60 for 20 layers at p = 4."""
    parallelism = [degree] * replicated + [1] * (40 - replicated)
    assert even_speedup(parallelism, 2, 0.0) == pytest.approx(expected)


def test_communication_lowers_the_speedup():
    """20 of 40 layers have p = 2, and each of two transitions costs half a layer: 40 / (30 + 1)."""
    assert even_speedup([2] * 20 + [1] * 20, 2, 0.5) == pytest.approx(40 / 31)
    assert communication_s(2e6, 3, 1e9) == pytest.approx(6e-3)
    assert speedup(40e-3, 30e-3, 1e-3) == pytest.approx(40 / 31)
    assert transition_cost(2e6, 1e9, 1e-3, 6e-3) == pytest.approx(0.5)


layer_homes = st.sets(st.integers(0, 3), min_size=1).map(lambda devices: tuple(sorted(devices)))


@given(st.lists(layer_homes, min_size=1, max_size=12), st.floats(0.1, 64), st.floats(0, 4))
def test_equation_4_is_the_even_case_of_equations_1_to_3(homes: list[Homes], batch: float, cost: float):
    layer_s = 0.02 * batch
    loads = [[batch / len(layer)] * len(layer) for layer in homes]
    computed_s = computation_s(loads, [[50.0] * len(layer) for layer in homes])
    transitions = count_transitions(homes, (0,))
    sent_s = communication_s(cost * layer_s * 1e9, transitions, 1e9)
    general = speedup(len(homes) * layer_s, computed_s, sent_s)
    assert general == pytest.approx(even_speedup([len(layer) for layer in homes], transitions, cost))


@given(st.data(), st.lists(layer_homes, min_size=1, max_size=8))
def test_step_agrees_with_a_walk_of_the_batch_through_the_layers(data: st.DataObject, homes: list[Homes]):
    """The walk sends each share to its home, waits for the slowest, and pays a transfer when homes change."""
    speeds = data.draw(st.fixed_dictionaries({device: st.floats(1, 10) for device in range(4)}))
    shares = [data.draw(st.lists(st.integers(1, 9), min_size=len(h), max_size=len(h))) for h in homes]
    clock_s, at = 0.0, {0}
    for layer, share in zip(homes, shares, strict=True):
        if set(layer) != at:
            clock_s, at = clock_s + 0.25, set(layer)
        finished_s = []
        for device, rows in zip(layer, share, strict=True):
            finished_s.append(clock_s + rows / speeds[device])
        clock_s = sorted(finished_s)[-1]
    clock_s += 0.25 * (at != {0})
    computed_s = computation_s(shares, [[speeds[device] for device in layer] for layer in homes])
    total_s = computed_s + communication_s(25.0, count_transitions(homes, (0,)), 100.0)
    assert total_s == pytest.approx(clock_s)
