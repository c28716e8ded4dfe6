"""The picture of a placement in notebooks, against plain lists of every module's homes."""

import re
from xml.etree import ElementTree

from hypothesis import given
from placement_cases import placements

from sharding.picture import degree_color
from sharding.placement import Home, Placement


def cells(placement: Placement) -> dict[tuple[str, str], list[str]]:
    """Return the colors of each cell, from top to bottom, by (device, first line of its title)."""
    html = placement._repr_html_()
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + len("</svg>")])
    rows = {float(text.get("y", 0)) - 17: text.text or "" for text in svg.iter("text") if text.get("x") is None}
    found = {}
    for cell in svg.iter("g"):
        if (title := cell.findtext("title")) is not None:
            shapes = cell.findall("rect")
            row = next(name for top, name in rows.items() if top <= float(shapes[0].get("y", 0)) < top + 26)
            found[row, title.split("\n")[0]] = [shape.get("fill", "") for shape in shapes]
    return found


@given(placements())
def test_cells_are_the_modules_of_each_device(placement: Placement):
    expected: dict[tuple[str, str], list[str]] = {}
    for device in range(4):
        name = f"device {device}"
        for layer in range(placement.num_layers):
            modules = (placement.attention[layer], placement.ffn[layer])
            here = [[h for h in homes if device in h.devices] for homes in modules]
            if colors := [degree_color(homes[0].degree) for homes in here if homes]:
                expected[name, f"layer {layer}"] = colors
        if device in placement.head.devices:
            expected[name, f"embedding and head: {placement.head}"] = [degree_color(placement.head.degree)]
    assert cells(placement) == expected


def test_degrees_have_different_colors_and_a_legend():
    placement = Placement.uniform(Home(0, 1), 80, 2).with_modules(range(80), "ffn", (Home(2, 2),) * 2)
    html = placement._repr_html_()
    assert [color in html for color in map(degree_color, (1, 2, 4))] == [True, True, False]
    assert "TP2</span>" in html
    assert len({degree_color(2**power) for power in range(7)}) == 7


def test_notebook_output_stands_alone():
    html = Placement.uniform(Home(0, 4), 3)._repr_html_()
    assert not re.search(r"https?:|url\(|href|<script|<style|\son\w+=", html)
    assert "\nattention: TP4[0-3]\nFFN: TP4[0-3]" in html
