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
    r"mended": "fixed",
    r"(?<!how )so many": "that many; N",
}
_BANNED = re.compile("|".join(rf"\b{word}\b" for word in INSTEAD), re.IGNORECASE)
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


def test_the_words_are_found():
    text = "It is made anew, so many times; it falls apart on the way. How so many?"
    assert [match[0] for match in _BANNED.finditer(text)] == ["anew", "so many", "falls apart", "on the way"]
