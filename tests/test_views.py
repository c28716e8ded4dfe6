"""The memory report: its picture is to scale, its totals agree, and its text is escaped."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from amoeba_jax.views import _COLORS, InstanceStatus, MemoryEntry, MemoryReport
from sharding.ledger import format_bytes

MIB = 2**20


def report(num_devices: int = 4, num_layers: int = 3, owner: str = "ffn weights") -> MemoryReport:
    """Return devices with different layers and different shares of their cache in use."""
    entries = []
    for device in range(num_devices):
        entries.append(MemoryEntry(device, None, "head", 6 * MIB, 5000))
        entries.append(MemoryEntry(device, None, "sampling", MIB))
        for layer in range(num_layers):
            entries.append(MemoryEntry(device, layer, owner, (2 + layer % 2) * MIB, 100_000))
            entries.append(MemoryEntry(device, layer, "norm weights", 2304))
            entries.append(MemoryEntry(device, layer, "kv cache", 4 * MIB, MIB))
    used = tuple(num_layers * 65536 * device for device in range(num_devices))
    kept = tuple(num_layers * 131072 for _ in range(num_devices))
    live = 7 * MIB + sum((6 + layer % 2) * MIB + 2304 for layer in range(num_layers))
    reserved = (3 * MIB,) * num_devices
    return MemoryReport(live + 5 * MIB, tuple(entries), used, reserved, {"kv cache": 4 / 3, "head": 1.0}, kept)


class Page(HTMLParser):
    """Parser of an HTML fragment that fails on tags that are not closed in order."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "br":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def picture(memory: MemoryReport) -> ElementTree.Element:
    """Parse the SVG as XML."""
    html = memory._repr_html_()
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + len("</svg>")])


def areas(memory: MemoryReport) -> list[dict[tuple[str, str], float]]:
    """Return for each device in the picture the area by (title of the column, part)."""
    names = {color: part for part, color in _COLORS.items()}
    rows = []
    for row in picture(memory):
        drawn = {}
        for column in row.iter("g"):
            name = column.findtext("title", "").split("\n")[0]
            for shape in column.findall("rect"):
                part = names[shape.get("fill"), float(shape.get("fill-opacity"))]
                drawn[name, part] = float(shape.get("width")) * float(shape.get("height"))
        rows.append(drawn)
    return rows


@pytest.mark.parametrize(("num_devices", "num_layers"), [(1, 1), (4, 3), (8, 80)])
def test_areas_are_proportional_to_bytes(num_devices: int, num_layers: int):
    memory = report(num_devices, num_layers)
    drawn = areas(memory)
    assert len(drawn) == num_devices
    area_per_byte = sum(drawn[0].values()) / memory.budget_bytes
    for device, row in enumerate(drawn):
        expected = {
            ("outside the layers", "temporaries (reserved)"): 3 * MIB,
            ("outside the layers", "unused"): 2 * MIB,
        }
        expected |= {("outside the layers", "weights"): 6 * MIB - 5000, ("outside the layers", "padding"): 5000}
        expected["outside the layers", "sampling"] = MIB
        for layer in range(num_layers):
            name = f"layer {layer}"
            # A quarter of the cache is padding.
            expected[name, "kv cache in use"] = 65536 * device * 3 // 4
            expected[name, "kv cache kept"] = 131072 * 3 // 4
            expected[name, "kv cache free"] = 3 * MIB - (131072 + 65536 * device) * 3 // 4
            expected[name, "padding"] = MIB + 100_000
            expected[name, "weights"] = (2 + layer % 2) * MIB + 2304 - 100_000
        row = {(title.removeprefix(f"device {device}, "), part): area for (title, part), area in row.items()}
        assert row.keys() == {key for key, size in expected.items() if size}
        for key, area in row.items():
            # Coordinates have three digits after the point.
            assert area == pytest.approx(expected[key] * area_per_byte, rel=0.01, abs=0.05)


def test_columns_fill_the_row_without_overlap():
    for row in picture(report(2, 5)):
        columns = [list(column.iter("rect")) for column in row.iter("g") if column.find("title") is not None]
        x = 0.0
        for shapes in columns:
            for shape in shapes:
                assert float(shape.get("x")) == pytest.approx(x, abs=0.01)
            x += float(shapes[0].get("width"))
            y = float(shapes[0].get("y"))
            for shape in shapes:
                assert float(shape.get("y")) == pytest.approx(y, abs=0.01)
                y += float(shape.get("height"))
        assert x == pytest.approx(920, abs=0.1)


def test_parts_and_table_agree_with_the_entries():
    memory = report()
    table = {row[0]: row[1:] for row in memory.rows()}
    for device in memory.devices:
        parts = memory.parts(device)
        assert sum(sum(layer.values()) for layer in parts.values()) == memory.device_bytes(device)
        padding = sum(layer["padding"] for layer in parts.values())
        assert padding == sum(entry.padding_bytes for entry in memory.entries if entry.device == device)
        assert table["  of all padding"][device] == format_bytes(padding)
        assert memory.device_bytes(device) + 3 * MIB + memory.unused_bytes(device) == memory.budget_bytes
        assert table["  of it in use (kv)"][device] == format_bytes(memory.kv_used_bytes[device])
    assert table["  of it kept (prefixes)"] == ["384.0 KiB"] * 4
    assert table["temporaries (reserved)"] == ["3.0 MiB"] * 4
    assert table["unused"] == ["2.0 MiB"] * 4


def test_devices_have_their_own_reservations_and_owners():
    """While some devices are transformed, the others reserve nothing for it."""
    entries = (
        MemoryEntry(0, 0, "kv cache", 4 * MIB),
        MemoryEntry(1, 0, "kv cache", 2 * MIB),
        MemoryEntry(1, 0, "ffn weights", MIB),
        MemoryEntry(1, None, "head", MIB),
    )
    memory = MemoryReport(10 * MIB, entries, (0, 0), (MIB, 3 * MIB), {})
    table = {row[0]: row[1:] for row in memory.rows()}
    assert list(table)[1:4] == ["kv cache", "ffn weights", "head"]
    assert table["ffn weights"] == table["head"] == ["0 B", "1.0 MiB"]
    assert table["temporaries (reserved)"] == ["1.0 MiB", "3.0 MiB"]
    assert table["unused"] == ["5.0 MiB", "3.0 MiB"]
    drawn = [
        row[f"device {device}, outside the layers", "temporaries (reserved)"]
        for device, row in enumerate(areas(memory))
    ]
    assert drawn[1] == pytest.approx(3 * drawn[0], rel=0.01)


def test_pointing_at_a_column_gives_its_bytes():
    titles = [title.text for title in picture(report()).iter("title")]
    parts = ["weights: 1.9 MiB", "kv cache in use: 96.0 KiB", "kv cache kept: 96.0 KiB", "kv cache free: 2.8 MiB"]
    assert "\n".join(["device 2, layer 0", *parts, "padding: 1.1 MiB"]) in titles
    assert "device 3, outside the layers\ntemporaries (reserved): 3.0 MiB" in titles


def test_deep_models_have_numbers_that_do_not_touch():
    for num_devices, num_layers in ((8, 80), (2, 30), (1, 2)):
        for row in picture(report(num_devices, num_layers)):
            texts = [(float(t.get("x")), t.text) for t in row.iter("text") if t.get("x") is not None]
            assert texts[0][1] == "0"
            gaps = [b[0] - a[0] for a, b in pairwise(texts)]
            assert min(gaps, default=20) >= 20


def test_notebook_output_stands_alone():
    """The output fits any theme: no colors for text or background, no script, no style sheet, no outside reference."""
    html = report()._repr_html_()
    page = Page(html)
    assert page.tags.isdisjoint({"script", "style", "link", "img", "image", "iframe"})
    assert not re.search(r"https?:|url\(|href|\son\w+=", html)
    assert 'fill="currentColor"' in html
    assert not re.search(r"[^-]color:", html)


def test_legend_names_the_parts_that_occur():
    texts = [text.strip() for text in Page(report(1)._repr_html_()).texts]
    assert [part for part in _COLORS if part in texts] == [part for part in _COLORS if part != "kv cache in use"]


def test_text_is_escaped():
    owner = "<b>&\"weights'</b><script>"
    html = report(owner=owner)._repr_html_()
    page = Page(html)
    assert "script" not in page.tags
    assert owner in page.texts


def test_programs_over_the_budget_leave_nothing_unused():
    memory = MemoryReport(10 * MIB, (MemoryEntry(0, 0, "kv cache", 9 * MIB),), (0,), (3 * MIB,), {})
    assert ("device 0, outside the layers", "unused") not in areas(memory)[0]
    assert {row[0]: row[1] for row in memory.rows()}["unused"] == "-2.0 MiB"


def test_terminal_shows_a_table_with_every_figure():
    for num_devices in (1, 8):
        text = str(report(num_devices, 80))
        for name in ("kv cache", "of it in use (kv)", "of all padding", "temporaries (reserved)", "unused", "budget"):
            assert name in text
        assert "padding: kv cache 1.33x" in text
        assert "…" not in text
        assert f"device {num_devices - 1}" in text


def test_instance_view_counts_no_cached_pages_by_default():
    assert InstanceStatus(0, (0,), 1, running=0, waiting=0, kv_used_pages=0, kv_total_pages=8).num_cached_pages == 0
