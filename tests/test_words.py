"""Words that readers stumble over, and what to say instead."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"anew": "again; recreated",
    r"nobody": "no one, no request",
    r"whoever": "the one that; new requests",
    r"of late": "recently",
    r"on (its|their|the) way": "in flight; during a transition",
    r"falls? apart": "splits",
    r"likeliest": "argmax; the greedy token",
    r"mended": "fixed",
    r"(?<!how )so many": "that many; N",
    r"(is|are|be) held against": "counts against the budget; is compared with",
    r"said so": "documented in",
    r"it is said where": "documented in",
    r"(the|its|their|below) aims?": "target; within, above",
    r"(are|is|was|were) aimed (for|at)": "the target is",
}
_BANNED = re.compile("|".join(rf"\b({word})\b" for word in INSTEAD), re.IGNORECASE)
# A docstring that begins with a noun phrase without its noun: "Of the pages in use." says less than "Pages in use."
_NO_NOUN = re.compile(r'^\s*r?"""(Of|Its|Their|Likewise)\b')
_FOLDERS = ("amoeba_jax", "benchmarks", "docs", "examples", "kvcache", "pallas_kernels", "serving", "sharding", "tests")


def _files() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / "CHANGELOG.md")
    for folder in _FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".md", ".proto") and "_pb2" not in file.name and file != Path(__file__).resolve():
                yield file


def test_files_say_it_plainly():
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in _files()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if _BANNED.search(line)
    ]
    assert not found, f"say instead: {INSTEAD}"


def test_docstrings_begin_with_what_they_describe():
    found = []
    for file in _files():
        name = file.relative_to(ROOT).as_posix()
        if file.suffix == ".py":
            lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
            found += [f"{name}:{number}: {line.strip()}" for number, line in lines if _NO_NOUN.search(line)]
    assert not found, "name the thing that is described"


def test_help_texts_begin_with_what_they_describe():
    """Help texts of options come from docstrings of settings, and from the command line itself."""
    lines = (ROOT / "serving" / "cli.py").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.search(r'help="(Of|Its|Their)\b', line)]


def test_the_words_are_found():
    text = "It is made anew, so many times; it falls apart on the way. How so many?"
    assert [match[0] for match in _BANNED.finditer(text)] == ["anew", "so many", "falls apart", "on the way"]
