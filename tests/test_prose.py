"""Prose of the repository is plain: `tools/prose.py` finds few places in every package."""

from pathlib import Path

import pytest

from tools.prose import Passage, Report, by_package, check, find, score

MAX_PER_1000_WORDS = 3.0


@pytest.fixture(scope="module")
def packages() -> dict[str, Report]:
    return by_package()


def test_packages_are_plain(packages: dict[str, Report]):
    too_many = {
        name: hits for name, report in packages.items() if (hits := round(score(report), 1)) > MAX_PER_1000_WORDS
    }
    assert not too_many, "`python tools/prose.py PATH` lists the places"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Return what moves pages between devices.", "clause for a noun"),
        ("Whatever it takes is measured.", "clause for a noun"),
        ("What a step is launched with.", "clause for a noun"),
        ("Pages are those of the old layout.", "pronoun as head"),
        ("A request and one that waits.", "pronoun as head"),
        ("The queue and the head of it.", "pronoun as head"),
        ("The time of each step, and the bytes of\n    these.", "pronoun as head"),
        ("Have the layers compute there.", "periphrasis"),
        ("The step that is to be launched next.", "periphrasis"),
        ("Take note of the failure.", "periphrasis"),
        ("It keeps a buffer besides.", "archaic word"),
        ("They are made anew.", "archaic word"),
        ("Fails where there is no room.", '"where" for "if"'),
        ("The next step starts unless the device is busy.", '"where" for "if"'),
        ("Attributes:\n    launcher: of its steps.", "attribute without a noun"),
        ("Args:\n    rows, slots: for the sampler.", "attribute without a noun"),
    ],
)
def test_clumsy_sentences_are_found(text: str, name: str):
    assert [hit.rule.name for hit in find(Passage(1, text))] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "Return the exchange programs.",
        "The table says what each flag does.",
        "What happens if a step fails: its requests are computed again.",
        "Extents of the old layout. One of the devices holds them.",
        "Each instance has a queue, in which requests wait.",
        "Mark the layers as switched.",
        "If there is no room, raise `MemoryBudgetError`.",
        "The directory where JAX keeps programs.",
        "Args:\n    launcher: launches the steps of this instance.",
    ],
)
def test_plain_sentences_pass(text: str):
    assert list(find(Passage(1, text))) == []


def test_hits_name_file_lines(tmp_path: Path):
    """Docstrings, comments and help texts count; code, and code blocks of documents, do not."""
    source = tmp_path / "module.py"
    source.write_text(
        '"""A module.\n\nIt keeps pages besides."""\n'
        "x = 1  # made anew\n"
        'option(help="Have the server wait.", name="for want of it")\n'
    )
    report = check(source)
    assert sorted((hit.line, hit.rule.name) for hit in report.hits) == [
        (3, "archaic word"),
        (4, "archaic word"),
        (5, "periphrasis"),
    ]
    assert report.words == 12
    document = tmp_path / "page.md"
    document.write_text("# What it is\n\nPlain text\nof it.\n\n```\nmade anew\n```\n\n| of late |\n| --- |\n")
    assert [(hit.line, hit.rule.name) for hit in check(document).hits] == [
        (4, "pronoun as head"),
        (10, "archaic word"),
    ]
