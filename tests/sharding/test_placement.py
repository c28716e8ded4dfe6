"""Placements of layers and paths between them, compared with a list of the homes of every layer."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sharding.errors import LayoutError
from sharding.placement import Home, Placement, Stage, joined, path

D0, D1, D2, D3 = (Home(i, 1) for i in range(4))
Q = Home(0, 4)


@st.composite
def lanes_of_homes(draw: st.DrawFn, num_lanes: int) -> tuple[Home, ...]:
    """Draw homes that share no device, some with several lanes."""
    homes = draw(
        st.sampled_from([(Q,), (Home(0, 2), Home(2, 2)), (Home(0, 2), D2, D3), (D0, D1, Home(2, 2)), (D0, D1, D2, D3)])
    )
    return tuple(draw(st.lists(st.sampled_from(homes), min_size=num_lanes, max_size=num_lanes)))


@st.composite
def placements(draw: st.DrawFn, num_layers: int, num_lanes: int) -> Placement:
    kinds = draw(st.lists(lanes_of_homes(num_lanes), min_size=1, max_size=3))
    homes = draw(st.lists(st.sampled_from(kinds), min_size=num_layers, max_size=num_layers))
    return Placement.of_layers(draw(st.sampled_from([Q, Home(0, 2), D0])), homes)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Placement, Placement]:
    size = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    return draw(placements(*size)), draw(placements(*size))


@given(pairs())
def test_stages_say_what_every_layer_s_homes_are(pair: tuple[Placement, Placement]):
    placement, _ = pair
    homes = placement.homes()
    assert [placement.stage_of(layer).homes for layer in range(placement.num_layers)] == homes
    assert placement.parallelism() == [len(set(of_lanes)) for of_lanes in homes]
    assert all(one.homes != other.homes for one, other in zip(placement.stages, placement.stages[1:], strict=False))
    used = {d for of_lanes in [*homes, (placement.ends,)] for home in of_lanes for d in home.devices}
    assert placement.devices == tuple(sorted(used))
    for lane in range(placement.num_lanes):
        assert set(placement.homes_of(lane)) == {of_lanes[lane] for of_lanes in homes}
    for stage in placement.stages:
        assert sorted(lane for home in stage.distinct_homes for lane in stage.lanes(home)) == list(
            range(placement.num_lanes)
        )


@given(pairs(), st.integers(1, 5), st.booleans())
def test_a_path_changes_every_layer_that_differs_once(pair: tuple[Placement, Placement], most: int, last_first: bool):
    source, target = pair
    before, after = source.homes(), target.homes()
    changed: list[int] = []
    present = source
    for layers, placement in path(source, target, most, last_first=last_first):
        homes = placement.homes()
        now = {i for i in range(len(homes)) if homes[i] != present.homes()[i]}
        assert now == set(layers)
        assert len(layers) <= most
        assert all(homes[i] == after[i] for i in layers)
        changed += reversed(layers) if last_first else layers
        if placement != target:
            assert placement.ends.degree == max(source.ends.degree, target.ends.degree)
        present = placement
    assert present == target
    differing = [i for i in range(len(before)) if before[i] != after[i]]
    assert changed == (differing[::-1] if last_first else differing)


def test_amoeba_s_merge():
    ones = [Placement.uniform(home, 5) for home in (D0, D1, D2, D3)]
    source, target = joined(ones, Q), Placement.uniform(Q, 5, 4)
    assert [str(placement) for _, placement in path(source, target, 2)] == [
        "0-3: TP1[0], TP1[1], TP1[2], TP1[3]  4: TP4[0-3], TP4[0-3], TP4[0-3], TP4[0-3]",
        "0-1: TP1[0], TP1[1], TP1[2], TP1[3]  2-4: TP4[0-3], TP4[0-3], TP4[0-3], TP4[0-3]",
        "0-4: TP4[0-3], TP4[0-3], TP4[0-3], TP4[0-3]",
    ]
    split = list(path(target, source, 5, last_first=False))
    assert split == [(range(5), source)]


def test_replicated_and_migrated_layers():
    replicated = Placement.uniform(D0, 20).with_lanes(2).with_homes(range(5, 15), (D0, D1))
    assert replicated.parallelism() == [1] * 5 + [2] * 10 + [1] * 5
    assert [stage.layers for stage in replicated.stages] == [range(5), range(5, 15), range(15, 20)]
    assert replicated.homes_of(0) == (D0,)
    assert replicated.homes_of(1) == (D0, D1)
    migrated = Placement.uniform(D0, 20).with_homes(range(5, 15), (D1,))
    assert list(path(Placement.uniform(D0, 20), migrated, 100)) == [(range(5, 15), migrated)]


def test_ends_alone_change_in_a_step_without_layers():
    source = Placement.uniform(Q, 3)
    assert list(path(source, source, 1)) == []
    assert list(path(source, source.with_ends(D0), 1)) == [(range(0), source.with_ends(D0))]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Home(0, 3), "3 devices is not supported"),
        (lambda: Home(1, 2), "cannot start at device 1"),
        (lambda: Home(-1, 1), "device -1"),
        (lambda: Stage(range(3), ()), "0-2 have no home"),
        (lambda: Stage(range(2, 2), (D0,)), "one or more consecutive layers"),
        (lambda: Stage(range(0, 4, 2), (D0,)), "one or more consecutive layers"),
        (lambda: Stage(range(3), (D1, Q)), r"homes TP4\[0-3\] and TP1\[1\], which share devices"),
        (lambda: Placement(D0, ()), "needs at least one stage"),
        (lambda: Placement(D0, (Stage(range(1, 3), (D0,)),)), "start at layer 0, not at 1"),
        (lambda: Placement(D0, (Stage(range(2), (D0,)), Stage(range(1, 3), (D0,)))), "start at layer 2, not at 1"),
        (lambda: Placement(D0, (Stage(range(2), (D0,)), Stage(range(2, 3), (D0, D1)))), "2 lanes, others 1"),
        (lambda: Placement.uniform(D0, 3).stage_of(3), "no layer 3: the model has 3"),
        (lambda: Placement.uniform(D0, 3).with_homes(range(2, 4), (D1,)), "2-3 are not among the model's 3"),
        (lambda: Placement.uniform(D0, 3, 2).with_lanes(4), "2 lanes cannot have 4"),
        (lambda: joined([Placement.uniform(D0, 3), Placement.uniform(D0, 3)], Q), r"share devices \[0\]"),
        (lambda: joined([Placement.uniform(D0, 3), Placement.uniform(D1, 4)], Q), "different models"),
        (lambda: list(path(Placement.uniform(D0, 3), Placement.uniform(D0, 4), 1)), "no path from 3 layers"),
        (lambda: list(path(Placement.uniform(D0, 3), Placement.uniform(Q, 3), 0)), "layers_per_step=0"),
        (lambda: list(path(Placement.uniform(D0, 3), Placement.uniform(D1, 3), 1)), "neither contains the other"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Callable[[], object], text: str):
    with pytest.raises(LayoutError, match=text):
        make()
