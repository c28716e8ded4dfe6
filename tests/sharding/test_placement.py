"""Placements of modules, against plain lists of every module's homes, and as data."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from placement_cases import D0, D1, D2, D3, P0, Q, homes_of_a_module, placements

from sharding.errors import LayoutError
from sharding.placement import Home, Homes, Placement


@given(placements())
def test_runs_name_the_homes_of_every_module_once(placement: Placement):
    found: list[tuple[int, str, Homes]] = []
    for run in placement.runs:
        for layer in run.layers:
            names = ("attention", "ffn") if run.module == "layer" else (run.module,)
            found += [(layer, name, run.homes) for name in names]
    expected = [
        (layer, name, homes)
        for layer, both in enumerate(zip(placement.attention, placement.ffn, strict=True))
        for name, homes in zip(("attention", "ffn"), both, strict=True)
    ]
    assert found == expected
    neighbours = zip(placement.runs, placement.runs[1:], strict=False)
    assert not any(one.homes == other.homes and one.module == other.module == "layer" for one, other in neighbours)


@given(placements())
def test_devices_are_those_of_any_home(placement: Placement):
    homes = {placement.head, *(home for module in (*placement.attention, *placement.ffn) for home in module)}
    assert placement.devices == tuple(sorted({device for home in homes for device in home.devices}))
    assert (placement.home is not None) == (len(homes) == 1 and placement.num_microbatches == 1)


@given(placements())
def test_each_layer_is_at_one_home_of_a_microbatch(placement: Placement):
    for number in range(placement.num_microbatches):
        layers = placement.layers_by_home(number)
        assert sorted(layer for of in layers.values() for layer in of) == list(range(placement.num_layers))
        assert all(placement.attention[layer][number] == home for home, of in layers.items() for layer in of)


@given(placements())
def test_a_placement_is_what_its_data_describes(placement: Placement):
    assert Placement.from_data(placement.to_dict(), placement.num_layers, 4, 4) == placement


@given(placements(), st.data())
def test_a_change_of_modules_changes_these_alone(placement: Placement, data: st.DataObject):
    first = data.draw(st.integers(0, placement.num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, placement.num_layers)))
    module = data.draw(st.sampled_from(["layer", "attention", "ffn"]))
    homes = data.draw(homes_of_a_module(placement.num_microbatches))
    changed = placement.with_modules(layers, module, homes)
    for name, before, after in (
        ("attention", placement.attention, changed.attention),
        ("ffn", placement.ffn, changed.ffn),
    ):
        expected = list(before)
        if module in ("layer", name):
            expected[layers.start : layers.stop] = [homes] * len(layers)
        assert list(after) == expected


def test_placements_of_the_three_papers():
    four = (D0, D1, D2, D3)
    merge = Placement.uniform(Q, 5, 4).with_modules(range(3), "layer", four)
    assert str(merge) == "0-2: TP1[0], TP1[1], TP1[2], TP1[3]   3-4: TP4[0-3]"
    assert merge.layers_by_home(1) == {D1: (0, 1, 2), Q: (3, 4)}
    replicated = Placement.uniform(D0, 20, 2).with_modules(range(5, 15), "layer", (D0, D1))
    assert replicated.parallelism() == [1] * 5 + [2] * 10 + [1] * 5
    beside = Placement.uniform(P0, 2, 2).with_modules(range(2), "attention", (D0, D1))
    assert str(beside) == (
        "attention 0: TP1[0], TP1[1]   ffn 0: TP2[0-1]   attention 1: TP1[0], TP1[1]   ffn 1: TP2[0-1]"
    )


def stages(*stages: dict[str, Any], head: Any = (0,)) -> Any:
    return {"head": list(head), "stages": list(stages)}


WHOLE = {"layers": [0, 4], "homes": [[0]]}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "must be an object"),
        ({"head": [0]}, "lacks \\['stages'\\]"),
        (stages(WHOLE) | {"heads": []}, "unknown keys \\['heads'\\]"),
        (stages(), "1 to 4096 stages"),
        (stages(WHOLE, head=[]), "head must be a list of device indices"),
        (stages(WHOLE, head=[True]), "head must be a list of device indices"),
        (stages(WHOLE, head=[4]), "names devices \\[4\\]: there are devices 0 to 3"),
        (stages(WHOLE, head=[0, 2]), "not consecutive"),
        (stages(WHOLE, head=[1, 2]), "not aligned"),
        (stages(WHOLE, head=[0, 1, 2]), "must be a power of two"),
        (stages({"layers": [0, 5], "homes": [[0]]}), "from 0 to 4"),
        (stages({"layers": [2, 2], "homes": [[0]]}), "from 0 to 4"),
        (stages({"layers": [0], "homes": [[0]]}), "two integers"),
        (stages({"layers": [0, 4], "homes": []}), "1 to 64 lists"),
        (stages({"layers": [0, 4], "homes": [[0]], "module": "mlp"}), "layer, attention or ffn"),
        (stages({"layers": [0, 3], "homes": [[0]]}), "no stage places the attention of layer 3"),
        (stages(WHOLE, {"layers": [3, 4], "homes": [[1]]}), "attention of layer 3 a second time"),
        (stages({"layers": [0, 4], "homes": [[0]], "module": "attention"}), "no stage places the ffn of layer 0"),
        (stages({"layers": [0, 4], "homes": [[0, 1], [1]]}), "share devices"),
        (
            stages(
                {"layers": [0, 2], "homes": [[0], [1], [2]]},
                {"layers": [2, 4], "homes": [[0], [1]]},
            ),
            "stage 1 has 2 homes, and another stage has 3",
        ),
    ],
)
def test_impossible_data_is_refused_by_name(data: Any, text: str):
    with pytest.raises(LayoutError, match=text):
        Placement.from_data(data, 4, 4, 4)


def test_a_home_has_at_most_the_largest_degree():
    with pytest.raises(LayoutError, match="has 4 devices: a home has at most 2"):
        Placement.from_data(stages(WHOLE, head=[0, 1, 2, 3]), 4, 4, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Home(0, 3), "3 devices is not supported"),
        (lambda: Home(1, 2), "cannot start at device 1"),
        (lambda: Home(-1, 1), "device -1"),
        (lambda: Placement(D0, (), ()), "every layer needs one of each"),
        (lambda: Placement(D0, ((D0,),), ()), "every layer needs one of each"),
        (lambda: Placement(D0, ((D0,), (D0, D1)), ((D0,), (D0,))), "2 microbatches, other modules for 1"),
        (lambda: Placement(D0, ((D1, Q),), ((D0, D0),)), r"homes TP4\[0-3\] and TP1\[1\], which share devices"),
        (lambda: Placement.uniform(D0, 3).with_modules(range(2, 4), "layer", (D1,)), "2-3 are not among the model's 3"),
    ],
)
def test_impossible_placements_are_refused_by_name(make: Callable[[], object], text: str):
    with pytest.raises(LayoutError, match=text):
        make()
